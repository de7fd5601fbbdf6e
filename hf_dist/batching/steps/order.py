"""The order rows are cut in: shuffled, then sorted by length inside windows."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from hf_dist.batching.steps.cost import IntArray, row_tokens
from hf_dist.batching.steps.cut import Ordered, shapes

# Efficiency a window must reach on a sample, against padded lengths (rounding is not the window's doing).
_WINDOW_EFFICIENCY = 0.997
# Where no window reaches it, half of the rows will do if they reach this: with all rows in one window the
# long ones meet the same neighbours in every epoch.
_HALF_EFFICIENCY = 0.9865
_SMALLEST_WINDOW = 256


def shuffled(rows: int, random: np.random.Generator) -> NDArray[np.int64]:
    """A random permutation: like `random.permutation`, at two thirds of its time for millions of rows."""
    keys = random.integers(0, 2**63 - 1, size=rows, dtype=np.int64)
    # The place in the low bits makes keys distinct, so the order depends on no sorting algorithm.
    low = (1 << max(1, rows.bit_length())) - 1
    keys &= ~np.int64(low)
    keys |= np.arange(rows, dtype=np.int64)
    keys.sort()
    keys &= low
    return keys


def window_bounds(rows: int, window: int) -> NDArray[np.int64]:
    """Offsets of windows of nearly equal size, about `window` rows each."""
    count = max(1, round(rows / window))
    return np.arange(count + 1, dtype=np.int64) * rows // count


def sort_windows(
    padded_lengths: IntArray, order: NDArray[np.int64], bounds: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Sorts each window of `order` by falling length; ties keep the order they have in `order`.

    With several parts (n, d) rows are sorted by the first part in stretches of like length, and inside a
    stretch by the second, up and down in turn, so that neighbours are alike in both.
    """
    if padded_lengths.ndim == 2:
        return _sort_windows_of_parts(padded_lengths, order, bounds)
    # Sorting one integer made of (length, place) is several times faster than an argsort.
    keys = padded_lengths[order].astype(np.int64)
    np.subtract(np.int64(2**31 - 1), keys, out=keys)
    keys <<= 32
    keys |= np.arange(len(order), dtype=np.int64)
    sizes = np.diff(bounds)
    begin = 0
    # Equal windows sort as the rows of a matrix; sizes differ by at most one, in runs.
    edges = np.flatnonzero(np.diff(sizes)) + 1
    if len(edges) < 64:
        for run in np.split(sizes, edges):
            end = begin + int(run.sum())
            keys[begin:end].reshape(len(run), -1).sort(axis=1)
            begin = end
    else:
        for left, right in itertools.pairwise(bounds):
            keys[left:right].sort()
    keys &= 2**32 - 1
    return order[keys]


def _sort_windows_of_parts(
    padded_lengths: IntArray, order: NDArray[np.int64], bounds: NDArray[np.int64]
) -> NDArray[np.int64]:
    sorted_rows = np.empty_like(order)
    for left, right in itertools.pairwise(bounds):
        rows = order[left:right]
        rows = rows[np.argsort(-padded_lengths[rows, 0], kind="stable")]
        # As many stretches as a stretch has micro-batches would be best; the square root of the rows is
        # within a small factor of it, and needs no budget.
        stretches = max(1, round(len(rows) ** 0.5 / 4))
        stretch = np.arange(len(rows)) * stretches // len(rows)
        second = padded_lengths[rows, 1:].sum(axis=1, dtype=np.int64)
        sorted_rows[left:right] = rows[np.lexsort((np.where(stretch % 2, second, -second), stretch))]
    return sorted_rows


def choose_window(padded_lengths: IntArray, tokens: int) -> int:
    """The smallest window whose micro-batches of `tokens` waste little, from a sample of the rows.

    Small windows mix more from epoch to epoch; large ones pad less. Windows double until a sampled one is
    efficient enough; few rows take half of them, or all if that wastes too much.

    Args:
        padded_lengths: (n,) or (n, d).
        tokens: computed tokens that a micro-batch is filled up to.
    """
    n = len(padded_lengths)
    random = np.random.default_rng(0)
    window = _SMALLEST_WINDOW
    while 2 * window <= n:
        if _sampled_efficiency(padded_lengths, window, tokens, random) >= _WINDOW_EFFICIENCY:
            return window
        window *= 2
    half = n // 2
    if half and _sampled_efficiency(padded_lengths, half, tokens, random) >= _HALF_EFFICIENCY:
        return half
    return max(1, n)


def _sampled_efficiency(
    padded_lengths: IntArray, window: int, tokens: int, random: np.random.Generator
) -> float:
    sample = random.choice(len(padded_lengths), size=window, replace=False, shuffle=True)
    bounds = np.array([0, window])
    lengths = padded_lengths[sort_windows(padded_lengths, sample, bounds)]
    ordered = Ordered(lengths, cap=tokens, bounds=bounds)
    computed = int(shapes(ordered, ordered.starts(np.inf))[0].sum())
    return int(row_tokens(lengths).sum(dtype=np.int64)) / computed
