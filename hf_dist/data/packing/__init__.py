"""Packs as rows: whole documents joined in one row and kept apart inside the model (docs/packing.md).

A data set, the packs of `hf_dist.batching.packing` and a model come in; a data set of packs and the collator
that this model needs go out. Tasks that pack import it.
"""
