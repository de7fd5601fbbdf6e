"""Forward passes of an evaluation: longest first, every row once, as many on each rank."""

from __future__ import annotations

from typing import Any

import numpy as np

from hf_dist.batching.steps.cost import check_lengths, row_tokens
from hf_dist.batching.steps.cut import Ordered, cut_exactly
from hf_dist.batching.steps.deal import order_by_length
from hf_dist.batching.steps.micro_batch import MicroBatch, Shapes


def plan_evaluation(
    lengths: Any, max_tokens_per_device: int, pad_to_multiple_of: int = 1, data_parallel_size: int = 1
) -> list[list[MicroBatch]]:
    """Plans an evaluation as `[forward pass][rank]`.

    Rows are sorted by length, longest first, so that running out of memory happens at once. A row that
    exceeds the cap runs alone. Every row is in exactly one micro-batch that is not empty; the others repeat
    the shortest row.

    Args:
        lengths: tokens of each row, (n,) or (n, 2).
        max_tokens_per_device: most computed tokens of a micro-batch of more than one row.
        pad_to_multiple_of: rows are padded to a multiple of this many tokens.
        data_parallel_size: ranks that share the rows.

    Raises:
        DataError: the lengths are no lengths.
    """
    shapes = Shapes(check_lengths(lengths), pad_to_multiple_of)
    if not len(shapes.lengths):
        return []
    rows = order_by_length(shapes.padded)
    ordered = Ordered(shapes.padded[rows], cap=max_tokens_per_device)
    least = int(ordered.counts(np.inf).sum())
    forwards = -(-least // data_parallel_size)
    starts = cut_exactly(ordered, forwards * data_parallel_size)
    assert starts is not None
    built = [shapes.micro_batch(part) for part in np.split(rows, starts[1:])]
    # Like costs side by side.
    built.sort(key=lambda batch: -batch.computed_tokens)
    empty = shapes.empty_micro_batch(rows)
    built += [empty] * (forwards * data_parallel_size - len(built))
    planned = [built[i : i + data_parallel_size] for i in range(0, len(built), data_parallel_size)]
    tokens = row_tokens(shapes.padded)
    return sorted(planned, key=lambda forward: -max(int(tokens[batch.rows].max()) for batch in forward))
