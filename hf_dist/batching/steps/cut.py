"""Cutting ordered rows into micro-batches: as few as the cap allows, or exactly so many, evenly.

A micro-batch is a run of neighbours in an order. With rows in falling order of length its first row is its
longest, so a cost threshold says at once how many rows fit: `threshold // cost of the first row`. Among
all ways of forming groups (neighbours or not) whose cost stays under a threshold, taking that many from
the long end each time needs the fewest groups: the group of the longest row has at most that many rows,
and nothing is better to join it than the next longest. So the smallest threshold at which the count is met
gives the smallest possible maximum, and a search over thresholds finds it.

Windows (stretches of rows ordered on their own) are cut side by side, as vectors: a Python loop over the
micro-batches of one window serves all of them. A single window is walked by plain numbers, which is faster
than vectors of one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hf_dist.batching.steps.cost import IntArray, row_cost, row_tokens

Positions = NDArray[np.int64]
Costs = NDArray[np.float64]

# A threshold that is a cost must not lose a row to rounding.
_ROUNDING = 1 + 1e-12


class Ordered:
    """Rows in the order they will be cut in.

    Attributes:
        lengths: padded lengths in that order, (n,) or (n, d). With one part they fall within each window.
        cap: most computed tokens of a micro-batch of more than one row; None for no cap.
        bounds: (windows + 1,) offsets; no micro-batch crosses one.
    """

    def __init__(
        self,
        lengths: IntArray,
        *,
        cap: int | None,
        attention_weight: float = 0.0,
        bounds: Positions | None = None,
    ) -> None:
        self.lengths = lengths
        self.size = len(lengths)
        self.cap = cap
        self.attention_weight = attention_weight
        self.bounds = np.array([0, self.size]) if bounds is None else bounds
        self.cost = row_cost(lengths, attention_weight)
        self._one_part = lengths.ndim == 1
        # Rows as long as this one that the cap allows; only where the first row is the longest.
        self._cap_rows: IntArray | None = None
        if cap is not None and self._one_part:
            self._cap_rows = np.maximum(cap // lengths, 1)

    def largest_cost(self) -> float:
        """No micro-batch costs more than this, whatever the cut."""
        if self._cap_rows is not None:
            return float((self.cost * self._cap_rows).max())
        return float(row_cost(self.lengths.max(axis=0, keepdims=True), self.attention_weight)[0]) * self.size

    def starts(self, threshold: float | Costs) -> Positions:
        """First rows of the micro-batches when each is filled up to `threshold` (and the cap), sorted."""
        if len(self.bounds) == 2:
            return np.array(self._starts_of_one_window(float(threshold), self.size), dtype=np.int64)
        limits = np.broadcast_to(np.asarray(threshold, dtype=np.float64), (len(self.bounds) - 1,))
        found = [position for position, _ in self._walk(self.bounds[:-1], self.bounds[1:], limits)]
        return np.sort(np.concatenate(found)) if found else np.zeros(0, dtype=np.int64)

    def counts(self, threshold: float | Costs) -> Positions:
        """Number of micro-batches in each window at `threshold` (one number, or one per window)."""
        if len(self.bounds) == 2:
            return np.array([len(self._starts_of_one_window(float(threshold), self.size))])
        limits = np.broadcast_to(np.asarray(threshold, dtype=np.float64), (len(self.bounds) - 1,))
        counts = np.zeros(len(limits), dtype=np.int64)
        for _, walker in self._walk(self.bounds[:-1], self.bounds[1:], limits):
            counts[walker] += 1
        return counts

    def fits(self, threshold: float, count: int) -> bool:
        """Whether `count` micro-batches are enough at `threshold`."""
        if len(self.bounds) == 2:
            return len(self._starts_of_one_window(threshold, count)) <= count
        return int(self.counts(threshold).sum()) <= count

    def _starts_of_one_window(self, threshold: float, most: int) -> list[int]:
        """First rows of the micro-batches; gives up once there are more than `most`."""
        limit = threshold * _ROUNDING
        starts: list[int] = []
        position = 0
        if self._one_part:
            cost = self.cost.data
            cap_rows = None if self._cap_rows is None else self._cap_rows.data
            while position < self.size and len(starts) <= most:
                starts.append(position)
                rows = int(min(limit / cost[position], self.size))
                if cap_rows is not None and rows > cap_rows[position]:
                    rows = cap_rows[position]
                position += max(rows, 1)
            return starts
        cap = math.inf if self.cap is None else self.cap
        weight = self.attention_weight
        longest: list[int] = []
        rows = 0
        for position, lengths in enumerate(self.lengths.tolist()):
            longer = list(map(max, longest, lengths)) if rows else lengths
            rows += 1
            if rows > 1 and (
                rows * sum(longer) > cap or rows * sum(x * (1.0 + weight * x) for x in longer) > limit
            ):
                longer, rows = lengths, 1
            if rows == 1:
                starts.append(position)
                if len(starts) > most:
                    break
            longest = longer
        return starts

    def _walk(
        self, begin: Positions, ends: Positions, limits: Costs
    ) -> Iterator[tuple[Positions, Positions]]:
        """Yields (first rows, walkers) of the next micro-batch of every walker that has rows left."""
        walker = np.flatnonzero(ends > begin)
        position, ends, limits = begin[walker], ends[walker], limits[walker] * _ROUNDING
        advance = self._rows_that_fit if self._one_part else self._rows_that_fit_in_parts
        while len(position):
            yield position, walker
            position = position + advance(position, ends, limits)
            alive = position < ends
            if not alive.all():
                position, ends, walker, limits = position[alive], ends[alive], walker[alive], limits[alive]

    def _rows_that_fit(self, position: Positions, ends: Positions, limits: Costs) -> Positions:
        rows = np.minimum(limits / self.cost[position], 2.0**31).astype(np.int64)
        if self._cap_rows is not None:
            rows = np.minimum(rows, self._cap_rows[position])
        return np.maximum(rows, 1)

    def _rows_that_fit_in_parts(self, position: Positions, ends: Positions, limits: Costs) -> Positions:
        """With several parts the first row is not the longest in each: grow one row at a time, together."""
        rows = np.ones(len(position), dtype=np.int64)
        longest = self.lengths[position].astype(np.int64)
        cap = np.inf if self.cap is None else self.cap
        growing = np.flatnonzero(position + 1 < ends)
        while len(growing):
            longer = np.maximum(longest[growing], self.lengths[position[growing] + rows[growing]])
            more = rows[growing] + 1
            fits = more * longer.sum(axis=1) <= cap
            fits &= more * row_cost(longer, self.attention_weight) <= limits[growing]
            growing = growing[fits]
            longest[growing] = longer[fits]
            rows[growing] += 1
            growing = growing[position[growing] + rows[growing] < ends[growing]]
        return rows


def shapes(ordered: Ordered, starts: Positions) -> tuple[Positions, Costs]:
    """(computed tokens, cost) of the micro-batches that begin at `starts` (sorted, the first is row 0)."""
    if not len(starts):
        return np.zeros(0, dtype=np.int64), np.zeros(0)
    rows: Positions = np.diff(starts, append=ordered.size)
    one_part = ordered.lengths.ndim == 1
    longest = ordered.lengths[starts] if one_part else np.maximum.reduceat(ordered.lengths, starts)
    longest = longest.astype(np.int64)
    return rows * row_tokens(longest), rows * row_cost(longest, ordered.attention_weight)


def split_costliest(ordered: Ordered, starts: Positions, count: int) -> Positions:
    """Halves the costliest micro-batches of several rows until there are `count` (at most: one a row)."""
    count = min(count, ordered.size)
    while len(starts) < count:
        rows = np.diff(starts, append=ordered.size)
        cost = shapes(ordered, starts)[1]
        cost[rows < 2] = -1.0
        # A few at a time, so that a half can be halved again while it is still the costliest.
        few = min(count - len(starts), max(1, int((rows > 1).sum()) // 4))
        costliest = np.argpartition(cost, len(cost) - few)[len(cost) - few :]
        starts = np.sort(np.concatenate([starts, starts[costliest] + (rows[costliest] + 1) // 2]))
    return starts


def cut_exactly(ordered: Ordered, count: int) -> Positions | None:
    """Cuts into exactly `count` micro-batches whose largest cost is as small as it can be.

    With several windows each gets its share of the count at one common threshold, and then its own
    smallest threshold for that share.

    Returns:
        Sorted first rows of the micro-batches (fewer than `count` only where there are fewer rows), or None
        where `count` are too few for the cap.
    """
    if ordered.size == 0:
        return np.zeros(0, dtype=np.int64)
    if count >= ordered.size:
        return np.arange(ordered.size)
    low = float(ordered.cost.sum()) / count * 0.999
    high = max(low, ordered.largest_cost())
    if not ordered.fits(high, count):
        return None
    while high - low > 1e-4 * high:
        # Near the cap's own threshold nothing changes, so the first steps of the search are long ones.
        middle = (low + high) / 2 if high < 2 * low else (low * high) ** 0.5
        low, high = (low, middle) if ordered.fits(middle, count) else (middle, high)
    if len(ordered.bounds) > 2:
        return _cut_windows(ordered, count, high)
    return split_costliest(ordered, ordered.starts(high), count)


def _cut_windows(ordered: Ordered, count: int, high: float) -> Positions:
    share = ordered.counts(high)
    # What is left over goes to windows that can take one more; which ones hardly matters.
    spare = count - int(share.sum())
    share[np.flatnonzero(np.diff(ordered.bounds) > share)[:spare]] += 1
    upper = np.full(len(share), high)
    lower = high * (1 - 4.0 / np.maximum(share, 4))
    for _ in range(12):
        middles = (lower + upper) / 2
        fits = ordered.counts(middles) <= share
        upper = np.where(fits, middles, upper)
        lower = np.where(fits, lower, middles)
    return split_costliest(ordered, ordered.starts(upper), count)
