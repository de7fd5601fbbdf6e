"""Lengths -> optimizer steps that know no hardware -> micro-batches (docs/batching.md).

The lengths of a data set's rows, a budget and a seed come in; a `Plan` goes out, the same on every rank, with
its report, the torch sampler that carries it and the stream that does without lengths. Numpy only, but for
the sampler and the stream; it knows errors alone, and everything above may import it.
"""
