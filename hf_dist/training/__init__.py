"""From a task and a config to a trained model, in packages that import one way.

A task and a RunConfig come in at `run`; a folder with the model, its checkpoints and its results goes out.
From the top: run; checkpoints; flags, steps, adapters; models, reports; engines; ranks.
"""
