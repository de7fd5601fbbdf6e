"""One optimizer step, exactly: the plan of a run's steps, their batches, their loss, and evaluation.

Lengths or a stream, settings and a task's items come in; a plan and the lower half of the Trainer go out,
which loads planned batches and weighs losses by items. Checkpoints and the run import it.
"""
