"""Steps of a fixed number of rows that are all alike in length.

The rows of a stretch of the epoch are sorted by length and cut into as many strata as a step has rows; each
step takes one row from each stratum, at random. So a row meets any other row but its near equals in length,
steps hold nearly the same number of tokens, and the worst step there can be, in any epoch, is known before:
the longest row of every stratum.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hf_dist.batching.cost import IntArray, row_tokens


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


def worst_step(padded_lengths: IntArray, per_step: int, window: int) -> Iterator[IntArray]:
    """Padded lengths of the worst steps there can be, in the order their rows are kept in.

    No step's i-th row is longer than the i-th of one of these, whatever the shuffle.

    Args:
        padded_lengths: (n,) or (n, d).
        per_step: rows of a step.
        window: rows of a stretch.
    """
    n = len(padded_lengths)
    falling = padded_lengths[np.argsort(-row_tokens(padded_lengths).astype(np.int64), kind="stable")]
    for rows in sorted(set(_stretches(n, per_step, window))) if n else []:
        bounds = _strata(rows, per_step)
        filled = bounds[:-1] < bounds[1:]
        if falling.ndim == 1:
            yield falling[bounds[:-1][filled]]
        elif rows == n:
            yield np.maximum.reduceat(falling, bounds[:-1][filled], axis=0)
        else:
            # Which rows a stretch holds decides the longest part in a stratum: take the most there is.
            tokens = falling.sum(axis=1)[bounds[:-1][filled]]
            yield np.minimum(falling.max(axis=0), tokens[:, None])


def steps_of_strata(
    padded_lengths: IntArray,
    order: NDArray[np.int64],
    per_step: int,
    window: int,
    random: np.random.Generator,
) -> NDArray[np.int64]:
    """Row numbers, step after step of `per_step` rows, in falling length inside a step."""
    pieces = []
    begin = 0
    stretches = _stretches(len(order), per_step, window) if len(order) else []
    for rows in stretches:
        stretch = order[begin : begin + rows]
        begin += rows
        tokens = row_tokens(padded_lengths[stretch]).astype(np.int64)
        stretch = stretch[np.argsort(-tokens, kind="stable")]
        bounds = _strata(rows, per_step)
        stratum = np.repeat(np.arange(per_step), np.diff(bounds))
        # The order is a shuffle but for its sorting; a second one inside each stratum deals it to the steps.
        shuffled = np.lexsort((random.random(rows), stratum))
        step = np.arange(rows) - bounds[stratum]
        pieces.append(stretch[shuffled][np.lexsort((stratum, step))])
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)
