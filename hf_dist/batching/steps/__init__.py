"""How the steps of one epoch are made: order the rows, cut micro-batches, draw steps, deal to ranks.

Lengths, a budget and what a row costs come in as arrays; micro-batches by step and rank go out as arrays.
Pure functions of their arguments, numpy only, which know errors alone; `hf_dist.batching` imports them.
"""
