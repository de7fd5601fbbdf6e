"""Adapters beside frozen weights: which modules, how many numbers, which files (docs/adapters.md).

A model and a PeftConfig come in; a wrapped model, its saved adapter and the name of its base go out.
Checkpoints and the run import it, and `hf-dist merge`.
"""
