"""The engine of a run: asked for, checked before it starts, started, compared with what was asked for.

A preset, the launcher's environment and TrainingArguments come in; errors, overrides and an `Engine` go out.
Models and everything above import it; it knows presets and errors alone. Importing `launch`, `conflicts` or
`running` imports no torch.
"""
