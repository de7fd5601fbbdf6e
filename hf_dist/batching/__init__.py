"""Lengths -> steps that know no hardware -> micro-batches for the hardware at hand (docs/batching.md)."""
