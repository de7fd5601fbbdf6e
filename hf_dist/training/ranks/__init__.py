"""What processes do together: gather, wait for each other, notice a dead one, stop in step.

Values, signals and heartbeats of one process come in; those of all go out, or one error on all. Everything
in training may import it; it knows config and errors alone.
"""
