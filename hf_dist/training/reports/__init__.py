"""What a run shows while it trains: bar, counters, the log of its batches.

The Trainer's events and batches come in; lines on the terminal, metrics and files go out. The run imports
it; it decides nothing about the training.
"""
