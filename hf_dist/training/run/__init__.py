"""The order of a run: flags, data, plan, model, engine, Trainer, evaluation, results.

A task class and flags (or a RunConfig) come in at `runner`; a `Recipe` that can be run goes out, and its
output folder. Recipes import it, and nothing in `hf_dist` does.
"""
