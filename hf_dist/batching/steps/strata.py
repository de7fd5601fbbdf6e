"""Steps of a fixed number of rows that are all alike in length.

The rows of a stretch of the epoch are sorted by length and cut into as many strata as a step has rows; each
step takes one row from each stratum, at random. So a row meets any other row but its near equals in length,
steps hold nearly the same number of tokens, and the worst step there can be, in any epoch, is known before:
the longest row of every stratum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from hf_dist.batching.steps.cost import IntArray, row_tokens
from hf_dist.batching.steps.cut import Positions


def _stretches(rows: int, per_step: int, window: int) -> list[int]:
    """Rows of each stretch: whole steps, but for what is left in the last one."""
    steps = -(-rows // per_step)
    count = max(1, min(steps, rows // max(window, per_step)))
    ends = [steps * (i + 1) // count * per_step for i in range(count)]
    ends[-1] = rows
    return [end - begin for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def _strata(rows: int, per_step: int) -> NDArray[np.int64]:
    """Offsets of the strata of a stretch; those with a row for the last step are spread evenly."""
    steps = -(-rows // per_step)
    in_last = rows - (steps - 1) * per_step
    extra = np.arange(per_step + 1, dtype=np.int64) * in_last // per_step
    return np.arange(per_step + 1, dtype=np.int64) * (steps - 1) + extra


def _by_length(padded_lengths: IntArray) -> Positions:
    """Places in falling order of tokens, and of the parts: ties would let the shuffle decide the strata."""
    keys = [-row_tokens(padded_lengths).astype(np.int64)]
    if padded_lengths.ndim > 1:
        keys += [-part.astype(np.int64) for part in padded_lengths.T]
    return np.lexsort(keys[::-1])


def worst_steps(
    padded_lengths: IntArray, per_step: int, window: int
) -> Iterator[tuple[int, Positions, IntArray]]:
    """The worst steps there can be: of a stretch of so many rows, its strata, and a length for each.

    No row of a stratum is longer than this, in any part, whatever the shuffle.

    Args:
        padded_lengths: (n,) or (n, d).
        per_step: rows of a step.
        window: rows of a stretch.
    """
    n = len(padded_lengths)
    falling = padded_lengths[_by_length(padded_lengths)]
    for rows in sorted(set(_stretches(n, per_step, window))) if n else []:
        bounds = _strata(rows, per_step)
        filled = bounds[:-1] < bounds[1:]
        if falling.ndim == 1:
            longest = falling[bounds[:-1][filled]]
        elif rows == n:
            longest = np.maximum.reduceat(falling, bounds[:-1][filled], axis=0)
        else:
            # Which rows a stretch holds decides the longest part in a stratum: take the most there is.
            tokens = falling.sum(axis=1)[bounds[:-1][filled]]
            longest = np.minimum(falling.max(axis=0), tokens[:, None])
        yield rows, np.flatnonzero(filled), longest


def steps_of_strata(
    padded_lengths: IntArray,
    order: NDArray[np.int64],
    per_step: int,
    window: int,
    *,
    random: np.random.Generator,
    groups: Mapping[int, Positions],
) -> tuple[Positions, Positions | None]:
    """Row numbers, step after step of `per_step` rows, in falling length inside a step; and their groups.

    Args:
        padded_lengths: (n,) or (n, d).
        order: all rows, shuffled.
        per_step: rows of a step.
        window: rows of a stretch.
        random: assigns the rows of a stratum to the steps.
        groups: a number for each stratum of a stretch of so many rows; none at all for rows without groups.
    """
    pieces, numbers = [], []
    begin = 0
    stretches = _stretches(len(order), per_step, window) if len(order) else []
    for rows in stretches:
        stretch = order[begin : begin + rows]
        begin += rows
        stretch = stretch[_by_length(padded_lengths[stretch])]
        bounds = _strata(rows, per_step)
        stratum = np.repeat(np.arange(per_step), np.diff(bounds))
        # The order is a shuffle but for its sorting; a second one in each stratum assigns it to the steps.
        shuffled = np.lexsort((random.random(rows), stratum))
        step = np.arange(rows) - bounds[stratum]
        by_step = np.lexsort((stratum, step))
        pieces.append(stretch[shuffled][by_step])
        if groups:
            numbers.append(groups[rows][stratum[by_step]])
    ordered = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)
    return ordered, np.concatenate(numbers) if numbers else None
