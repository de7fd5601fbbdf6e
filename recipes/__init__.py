"""Recipes: one file a task, runnable with `accelerate launch` and importable (`from recipes.X import build`)."""
