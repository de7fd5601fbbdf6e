"""A micro-batch: the rows of one forward pass of one rank, and what it computes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hf_dist.batching.steps.cost import IntArray, padded, row_tokens


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Rows of one forward pass.

    Attributes:
        rows: row numbers, int64.
        empty: True for a row that only keeps a rank in step: item weight 0, all of it padding.
        computed_tokens: rows x longest row, padding included.
        real_tokens: tokens of the rows themselves; 0 for an empty one.
    """

    rows: NDArray[np.int64]
    empty: bool
    computed_tokens: int
    real_tokens: int


class Shapes:
    """Lengths of all rows, as they are and padded.

    Attributes:
        lengths: (n,) or (n, d).
        padded: the same shape, rounded up to the multiple.
    """

    def __init__(self, lengths: IntArray, pad_to_multiple_of: int) -> None:
        self.lengths = lengths
        self.padded = padded(lengths, pad_to_multiple_of)

    def micro_batch(self, rows: NDArray[np.int64]) -> MicroBatch:
        """The micro-batch of these rows."""
        longest = self.padded[rows].max(axis=0)
        return MicroBatch(
            rows=rows.astype(np.int64, copy=False),
            empty=False,
            computed_tokens=len(rows) * int(longest.sum()),
            real_tokens=int(self.lengths[rows].sum(dtype=np.int64)),
        )

    def empty_micro_batch(self, rows: NDArray[np.int64]) -> MicroBatch:
        """The empty micro-batch of a step of these rows: its shortest row stands in."""
        tokens = row_tokens(self.padded[rows])
        shortest = int(np.argmin(tokens))
        return MicroBatch(
            rows=rows[shortest : shortest + 1].astype(np.int64, copy=False),
            empty=True,
            computed_tokens=int(tokens[shortest]),
            real_tokens=0,
        )
