"""From a task and a config to a trained model, in rooms that import one way.

A task and a RunConfig come in at `run`; a folder with the model, its checkpoints and its results goes out.
Rooms from the top: run; checkpoints; steps, adapters; models, reports; engines; ranks.
"""
