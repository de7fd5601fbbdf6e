"""What the data flags name -> raw splits: hub, saved folders, shards, streams, held-out rows.

A DataConfig comes in; a DatasetDict of train, validation and test goes out, or a stream of training rows,
columns and types checked and no token made. Tasks import it, and training for streams.
"""
