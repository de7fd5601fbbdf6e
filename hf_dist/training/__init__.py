"""The Trainer, its loss and its engine, and the order of a run."""
