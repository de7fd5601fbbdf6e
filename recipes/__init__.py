"""Recipes: one file a task, runnable by `accelerate launch` and importable."""
