"""What a plan will do, before it does it: padding, load balance, and how alike the steps are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hf_dist.batching.plan import MicroBatch, Plan
from hf_dist.batching.steps.cost import row_cost, row_tokens

# Steps that are split over the ranks to measure waiting and padding; more say nothing new.
_SAMPLED_STEPS = 256
_BAR = 40


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """Figures of one epoch on given hardware.

    Attributes:
        data_parallel_size: ranks that see different rows.
        accumulation_steps: forward passes of a rank in a step.
        steps_per_epoch: optimizer steps.
        micro_batches_per_step: as planned, before they are split over the ranks.
        rows: rows of an epoch.
        dropped: rows left out as too long.
        window: rows sorted by length together.
        padding_efficiency: real tokens / computed tokens, empty micro-batches and rounding included.
        imbalance: sum over (step, accumulation index) of the slowest rank's cost / of the mean cost.
        empty_micro_batches_per_step: micro-batches without rows of their own.
        rows_per_step: (steps,) rows of each step.
        tokens_per_step: (steps,) real tokens of each step.
        neighbour_correlation: correlation of the mean row length of a step with that of the next.
        row_tokens: (rows,) real tokens of each row, for the histogram.
    """

    data_parallel_size: int
    accumulation_steps: int
    steps_per_epoch: int
    micro_batches_per_step: int
    rows: int
    dropped: int
    window: int
    padding_efficiency: float
    imbalance: float
    empty_micro_batches_per_step: float
    rows_per_step: NDArray[np.int64]
    tokens_per_step: NDArray[np.int64]
    neighbour_correlation: float
    row_tokens: NDArray[np.int64]

    @classmethod
    def of(
        cls, plan: Plan, data_parallel_size: int, accumulation_steps: int | None = None, *, epoch: int = 0
    ) -> PlanReport:
        """Measures an epoch of a plan.

        Rows and tokens are those of every step; padding and imbalance are of at most 256 steps, evenly
        spread.

        Args:
            plan: the plan.
            data_parallel_size: ranks that see different rows.
            accumulation_steps: forward passes of a rank in a step; default: as few as the plan allows.
            epoch: which epoch.
        """
        accumulation = accumulation_steps or plan.accumulation_steps(data_parallel_size)
        planned = plan.epoch(epoch)
        steps = plan.steps_per_epoch
        totals = planned.step_totals()
        sampled: list[int] = []
        if steps:
            sampled = np.unique(np.linspace(0, steps - 1, min(steps, _SAMPLED_STEPS)).astype(int)).tolist()
        waited = needed = computed = real = empty = 0.0
        for step in sampled:
            for forward in planned.deal(step, data_parallel_size, accumulation):
                costs = [micro_batch_cost(plan, batch) for batch in forward]
                waited += max(costs)
                needed += sum(costs) / len(costs)
                computed += sum(batch.computed_tokens for batch in forward)
                real += sum(batch.real_tokens for batch in forward)
                empty += sum(batch.empty for batch in forward)
        return cls(
            data_parallel_size=data_parallel_size,
            accumulation_steps=accumulation,
            steps_per_epoch=steps,
            micro_batches_per_step=plan.micro_batches_per_step,
            rows=plan.rows,
            dropped=plan.dropped,
            window=plan.window,
            padding_efficiency=real / computed if computed else 1.0,
            imbalance=waited / needed if needed else 1.0,
            empty_micro_batches_per_step=empty / max(1, len(sampled)),
            rows_per_step=totals[0],
            tokens_per_step=totals[1],
            neighbour_correlation=_neighbour_correlation(totals[1] / np.maximum(totals[0], 1)),
            row_tokens=row_tokens(plan.shapes.lengths).astype(np.int64),
        )

    def metrics(self) -> dict[str, float]:
        """The figures by name, for a tracker."""
        return {
            "plan_padding_efficiency": self.padding_efficiency,
            "plan_imbalance": self.imbalance,
            "plan_empty_micro_batches_per_step": self.empty_micro_batches_per_step,
            "plan_steps_per_epoch": float(self.steps_per_epoch),
            "plan_micro_batches_per_step": float(self.micro_batches_per_step),
            "plan_dropped_rows": float(self.dropped),
            "plan_window": float(self.window),
            "plan_rows_per_step": _mean(self.rows_per_step),
            "plan_rows_per_step_spread": _spread(self.rows_per_step),
            "plan_tokens_per_step": _mean(self.tokens_per_step),
            "plan_tokens_per_step_spread": _spread(self.tokens_per_step),
            "plan_neighbour_correlation": self.neighbour_correlation,
        }

    def lines(self) -> list[str]:
        """The report as text."""
        dropped = f", {self.dropped:,} dropped as too long" if self.dropped else ""
        return [
            f"plan: {self.rows:,} rows an epoch{dropped}, {self.steps_per_epoch:,} steps of "
            f"{self.micro_batches_per_step} micro-batches (windows of {self.window:,} rows)",
            f"split over {self.data_parallel_size} ranks x {self.accumulation_steps} accumulation steps, "
            f"{self.empty_micro_batches_per_step:.2f} empty micro-batches a step",
            f"padding efficiency {self.padding_efficiency:.4f} (real / computed tokens), imbalance "
            f"{self.imbalance:.4f} (slowest rank / mean)",
            f"rows a step {_range(self.rows_per_step)}, real tokens a step {_range(self.tokens_per_step)}",
            f"correlation of neighbouring steps' mean length {self.neighbour_correlation:+.3f}",
            *self._histogram(),
        ]

    def _histogram(self) -> list[str]:
        if not len(self.row_tokens):
            return []
        top = max(1, int(self.row_tokens.max()))
        edges = 2 ** np.arange(top.bit_length() + 1)
        counts, _ = np.histogram(self.row_tokens, bins=[0, *edges[1:]])
        lines = ["tokens of a row:"]
        for low, high, count in zip([0, *edges[1:-1]], edges[1:], counts, strict=True):
            if not count and len(lines) == 1:
                continue
            bar = "#" * round(_BAR * count / counts.max())
            lines.append(f"  {low:>8,} - {high - 1:<8,} {count:>12,} {bar}")
        return lines


def micro_batch_cost(plan: Plan, batch: MicroBatch) -> float:
    """Cost of a micro-batch: rows x cost of the longest row (see `hf_dist.batching.steps.cost`)."""
    longest = plan.shapes.padded[batch.rows].max(axis=0, keepdims=True)
    return len(batch.rows) * float(row_cost(longest, plan.attention_weight)[0])


def _neighbour_correlation(values: NDArray[np.float64]) -> float:
    if len(values) < 3 or np.ptp(values[:-1]) == 0 or np.ptp(values[1:]) == 0:
        return 0.0
    return float(np.corrcoef(values[:-1], values[1:])[0, 1])


def _mean(values: NDArray[np.int64]) -> float:
    return float(values.mean()) if len(values) else 0.0


def _spread(values: NDArray[np.int64]) -> float:
    """Standard deviation over the mean; the last step, which may hold fewer, is left out."""
    full = values[:-1] if len(values) > 1 else values
    return float(full.std() / full.mean()) if len(full) and full.any() else 0.0


def _range(values: NDArray[np.int64]) -> str:
    if not len(values):
        return "none"
    spread = 100 * _spread(values)
    return f"{values.mean():,.1f} (least {values.min():,}, most {values.max():,}, deviation {spread:.1f} %)"
