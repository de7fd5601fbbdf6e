"""The steps of one epoch as arrays: of a number of tokens, or of a number of examples."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hf_dist.batching.steps.budget import ExampleBatching, TokenBatching
from hf_dist.batching.steps.classes import draw_steps
from hf_dist.batching.steps.cost import row_tokens
from hf_dist.batching.steps.cut import Ordered, cut_exactly, shapes
from hf_dist.batching.steps.micro_batch import Shapes
from hf_dist.batching.steps.order import choose_window, shuffled, sort_windows, window_bounds
from hf_dist.batching.steps.strata import steps_of_strata, worst_steps

# An epoch is stretched by this share at most so that its last step is a full one.
_ROUND_UP = 0.02
# Lengths that differ by so little count as one where the level of a micro-batch is set.
_NEAR = 1.05
# Streams of random numbers of an epoch.
_SHUFFLE, _DRAW = 0, 1


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Rows, and where micro-batches and steps begin (CSR).

    Attributes:
        rows: row numbers. With micro-batches in cutting order, else step after step.
        bounds: (micro-batches + 1,) offsets of the micro-batches in `rows`; None where the plan has none.
        step_parts: numbers of the micro-batches, step after step; None where the plan has none.
        step_bounds: (steps + 1,) offsets of the steps in `step_parts`, or else in `rows`.
        groups: where the plan has a cap and no micro-batches, a cut of each step that fits it: equal numbers
            are together.
    """

    rows: NDArray[np.int64]
    bounds: NDArray[np.int64] | None
    step_parts: NDArray[np.int64] | None
    step_bounds: NDArray[np.int64]
    groups: NDArray[np.int64] | None = None

    def costliest_first(self, row_cost: NDArray[np.float64]) -> Layout:
        """Swaps the step with the costliest micro-batch (or row) to the first place.

        Memory peaks with the costliest micro-batch, not with the costliest sum of them. Where it is in a last
        step that holds fewer, it alone is swapped.

        Args:
            row_cost: cost of each of `rows` alone.
        """
        if len(self.step_bounds) < 3:
            return self
        if self.bounds is None or self.step_parts is None:
            units, cost = self.rows.copy(), row_cost
        else:
            longest = np.maximum.reduceat(row_cost, self.bounds[:-1])
            units, cost = self.step_parts.copy(), (longest * np.diff(self.bounds))[self.step_parts]
        costliest = int(np.argmax(cost))
        step = int(np.searchsorted(self.step_bounds, costliest, side="right")) - 1
        sizes = np.diff(self.step_bounds)
        first, other = slice(0, sizes[0]), slice(self.step_bounds[step], self.step_bounds[step + 1])
        if sizes[step] != sizes[0]:
            first, other = slice(0, 1), slice(costliest, costliest + 1)
        if not step:
            return self
        units[first], units[other] = units[other].copy(), units[first].copy()
        if self.bounds is not None:
            return replace(self, step_parts=units)
        groups = None if self.groups is None else self.groups.copy()
        if groups is not None and sizes[step] == sizes[0]:
            groups[first], groups[other] = groups[other].copy(), groups[first].copy()
        return replace(self, rows=units, groups=groups)


def _step_bounds(units: int, per_step: int) -> NDArray[np.int64]:
    return np.minimum(np.arange(-(-units // per_step) + 1, dtype=np.int64) * per_step, units)


def _shuffle(rows: int, kept: NDArray[np.int64] | None, seed: int, epoch: int) -> NDArray[np.int64]:
    order = shuffled(rows, np.random.default_rng([seed, epoch, _SHUFFLE]))
    return order if kept is None else kept[order]


class TokenSteps:
    """Steps of a fixed number of micro-batches, filled up to a number of tokens.

    Attributes:
        window: rows sorted by length together.
        micro_batches_per_epoch: the same for every epoch.
        micro_batches_per_step: of every step but perhaps the last.
        steps_per_epoch: the same for every epoch.
    """

    def __init__(
        self,
        shapes: Shapes,
        kept: NDArray[np.int64] | None,
        batching: TokenBatching,
        seed: int,
        attention_weight: float,
    ) -> None:
        self._shapes = shapes
        self._kept = kept
        self._cap = batching.max_tokens_per_device
        self._seed = seed
        self._attention_weight = attention_weight
        self._rows = len(shapes.padded) if kept is None else len(kept)
        self.micro_batches_per_step = batching.micro_batches_per_step
        self.micro_batches_per_epoch = self.steps_per_epoch = 0
        target = batching.tokens_per_micro_batch
        lengths = shapes.padded if kept is None else shapes.padded[kept]
        self.window = batching.window or choose_window(lengths, target)
        self._first: Layout | None = None
        if self._rows:
            self._first = self._fix_counts(target)

    def layout(self, epoch: int) -> Layout:
        """The steps of an epoch."""
        if epoch == 0 and self._first is not None:
            first, self._first = self._first, None
            return first
        window = self.window
        while self._rows:
            ordered, rows = self._ordered(epoch, window)
            starts = cut_exactly(ordered, self.micro_batches_per_epoch)
            if starts is not None:
                return self._draw(epoch, ordered, rows, starts)
            if window >= self._rows:
                break
            # This shuffle needs more micro-batches; wider windows need fewer. With one part, a window of
            # all rows needs the fewest there can be.
            window *= 2
        if not self._rows:
            none = np.zeros(0, dtype=np.int64)
            return Layout(rows=none, bounds=none, step_parts=none, step_bounds=np.zeros(1, dtype=np.int64))
        # Rows of several parts only: no order is sure to need the fewest, but that of epoch 0 fits.
        ordered, rows = self._ordered(0, self.window)
        starts = cut_exactly(ordered, self.micro_batches_per_epoch)
        assert starts is not None
        return self._draw(epoch, ordered, rows, starts)

    def _fix_counts(self, target: int) -> Layout:
        ordered, rows = self._ordered(0, self.window)
        count = int(ordered.counts(self._threshold(ordered, target)).sum())
        windows = len(ordered.bounds) - 1
        if windows > 1:
            # The count differs a little from shuffle to shuffle; epochs that need more are rare then.
            count += int(np.ceil(windows**0.5))
        per_step = self.micro_batches_per_step
        full_steps = -(-count // per_step) * per_step
        if full_steps <= count * (1 + _ROUND_UP):
            count = full_steps
        count = min(count, self._rows)
        self.micro_batches_per_epoch = count
        self.micro_batches_per_step = min(per_step, count)
        self.steps_per_epoch = -(-count // self.micro_batches_per_step)
        starts = cut_exactly(ordered, count)
        assert starts is not None
        return self._draw(0, ordered, rows, starts)

    def _threshold(self, ordered: Ordered, target: int) -> float:
        """Cost that a micro-batch of `target` tokens may have.

        Rows for which attention costs more take fewer tokens, so that all micro-batches cost alike. The
        level is set by the length that 10 % of the tokens are in rows shorter than. As many rows of that
        length, or of one a little longer, fit as `target` holds: where nearly all rows are as long (packs),
        one row less would be a large part of a micro-batch.
        """
        if not self._attention_weight:
            return float(target)
        tokens = np.sort(row_tokens(ordered.lengths))
        total = np.cumsum(tokens, dtype=np.int64)
        length = int(tokens[np.searchsorted(total, total[-1] // 10)])
        level = target * (1 + self._attention_weight * length)
        near = np.unique(tokens[(tokens >= length) & (tokens <= _NEAR * length)]).astype(np.float64)
        full = target // near * near * (1 + self._attention_weight * near)
        return float(max(level, full.max()))

    def _ordered(self, epoch: int, window: int) -> tuple[Ordered, NDArray[np.int64]]:
        bounds = window_bounds(self._rows, window)
        order = _shuffle(self._rows, self._kept, self._seed, epoch)
        rows = sort_windows(self._shapes.padded, order, bounds)
        ordered = Ordered(
            self._shapes.padded[rows], cap=self._cap, attention_weight=self._attention_weight, bounds=bounds
        )
        return ordered, rows

    def _draw(
        self, epoch: int, ordered: Ordered, rows: NDArray[np.int64], starts: NDArray[np.int64]
    ) -> Layout:
        assert len(starts) == self.micro_batches_per_epoch
        cost = shapes(ordered, starts)[1]
        random = np.random.default_rng([self._seed, epoch, _DRAW])
        return Layout(
            rows=rows,
            bounds=np.append(starts, len(rows)),
            step_parts=draw_steps(cost, self.micro_batches_per_step, random),
            step_bounds=_step_bounds(len(starts), self.micro_batches_per_step),
        )


class ExampleSteps:
    """Steps of a fixed number of rows.

    Attributes:
        window: rows of the stretches whose steps share them out evenly by length.
        micro_batches_per_step: the smallest number at which every step there can be fits the cap.
        steps_per_epoch: the same for every epoch.
    """

    def __init__(
        self, shapes: Shapes, kept: NDArray[np.int64] | None, batching: ExampleBatching, seed: int
    ) -> None:
        self._shapes = shapes
        self._kept = kept
        self._seed = seed
        self._per_step = batching.examples_per_step
        self._rows = len(shapes.padded) if kept is None else len(kept)
        self.window = batching.window or max(1, self._rows)
        self.steps_per_epoch = -(-self._rows // self._per_step)
        self.micro_batches_per_step = 1
        # How the worst step is cut: no other needs more micro-batches, since this cut fits it as well.
        self._groups: dict[int, NDArray[np.int64]] = {}
        if batching.max_tokens_per_device is None:
            return
        lengths = shapes.padded if kept is None else shapes.padded[kept]
        for stretch, strata, worst in worst_steps(lengths, self._per_step, self.window):
            starts = Ordered(worst, cap=batching.max_tokens_per_device).starts(np.inf)
            self.micro_batches_per_step = max(self.micro_batches_per_step, len(starts))
            groups = np.zeros(self._per_step, dtype=np.int64)
            groups[strata] = np.searchsorted(starts, np.arange(len(strata)), side="right") - 1
            self._groups[stretch] = groups

    def layout(self, epoch: int) -> Layout:
        """The steps of an epoch."""
        order = _shuffle(self._rows, self._kept, self._seed, epoch)
        random = np.random.default_rng([self._seed, epoch, _DRAW])
        rows, groups = steps_of_strata(
            self._shapes.padded, order, self._per_step, self.window, random=random, groups=self._groups
        )
        step_bounds = _step_bounds(self._rows, self._per_step)
        return Layout(rows=rows, bounds=None, step_parts=None, step_bounds=step_bounds, groups=groups)
