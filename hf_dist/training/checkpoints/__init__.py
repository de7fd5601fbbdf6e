"""Checkpoints: written whole or not at all, copied, found again, resumed on any engine and number of ranks.

A Trainer's state and facts of the run come in; folders with a manifest go out, and the middle of the Trainer,
which saves and resumes. The run imports it (docs/checkpoints.md).
"""
