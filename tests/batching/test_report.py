"""The report's figures against sums over every micro-batch."""

from __future__ import annotations

import numpy as np
import pytest

from hf_dist.batching.plan import ExampleBatching, Plan, TokenBatching
from hf_dist.batching.report import PlanReport

LENGTHS = np.maximum(1, np.random.default_rng(0).lognormal(3, 0.8, 4000)).astype(int)
WEIGHT = 0.002


def cost(rows: np.ndarray) -> float:
    longest = int(LENGTHS[rows].max())
    return len(rows) * longest * (1 + WEIGHT * longest)


@pytest.mark.parametrize(
    "batching",
    [
        TokenBatching(max_tokens_per_device=2048, tokens_per_step=5 * 2048),
        ExampleBatching(max_tokens_per_device=2048, examples_per_step=100),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2, 7])
def test_figures(batching, ranks):
    plan = Plan.build(LENGTHS, batching, seed=0, attention_weight=WEIGHT)
    report = PlanReport.of(plan, ranks)
    assert plan.steps_per_epoch <= 256
    waited = needed = real = computed = empty = 0.0
    for step in range(plan.steps_per_epoch):
        for forward in plan.epoch(0).deal(step, ranks, plan.accumulation_steps(ranks)):
            costs = [cost(batch.rows) for batch in forward]
            waited, needed = waited + max(costs), needed + float(np.mean(costs))
            computed += sum(len(batch.rows) * LENGTHS[batch.rows].max() for batch in forward)
            real += sum(LENGTHS[batch.rows].sum() for batch in forward if not batch.empty)
            empty += sum(batch.empty for batch in forward)
    assert real == LENGTHS.sum()
    assert report.padding_efficiency == pytest.approx(real / computed)
    assert report.imbalance == pytest.approx(waited / needed)
    assert report.empty_micro_batches_per_step == pytest.approx(empty / plan.steps_per_epoch)
    steps = [plan.epoch(0).step_rows(step) for step in range(plan.steps_per_epoch)]
    assert report.rows_per_step.tolist() == [len(rows) for rows in steps]
    assert report.tokens_per_step.tolist() == [int(LENGTHS[rows].sum()) for rows in steps]
    means = [float(LENGTHS[rows].mean()) for rows in steps]
    assert report.neighbour_correlation == pytest.approx(np.corrcoef(means[:-1], means[1:])[0, 1])
    metrics = report.metrics()
    assert metrics["plan_padding_efficiency"] == report.padding_efficiency
    assert all(isinstance(value, float) for value in metrics.values())


def test_lines():
    plan = Plan.build(LENGTHS, TokenBatching(max_tokens_per_device=2048, tokens_per_step=8192), seed=0)
    lines = PlanReport.of(plan, 2).lines()
    assert lines[0].startswith(f"plan: 4,000 rows an epoch, {plan.steps_per_epoch} steps of 4 micro-batches")
    assert lines[1].startswith("split over 2 ranks x 2 accumulation steps")
    bars = lines[lines.index("tokens of a row:") + 1 :]
    counts = [int(line.split()[3].replace(",", "")) for line in bars]
    powers = np.floor(np.log2(LENGTHS)).astype(int)
    assert [count for count in counts if count] == [int((powers == p).sum()) for p in np.unique(powers)]


def test_nothing_to_report():
    plan = Plan.build([], TokenBatching(max_tokens_per_device=64, tokens_per_step=64), seed=0)
    report = PlanReport.of(plan, 2)
    assert report.padding_efficiency == report.imbalance == 1.0
    assert "0 rows" in report.lines()[0]
