"""Cutting against brute force and against bounds that hold for any split."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dist.batching.steps.classes import class_bounds, draw_steps
from hf_dist.batching.steps.cut import Ordered, cut_exactly, split_costliest
from hf_dist.batching.steps.deal import deal, split_anew
from hf_dist.batching.steps.order import choose_window, shuffled, sort_windows, window_bounds

CASES = settings(max_examples=200, deadline=None)


def partitions(items: list[int]):
    """All ways to put items into groups, in plain recursion."""
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        for index in range(len(rest)):
            yield [*rest[:index], [items[0], *rest[index]], *rest[index + 1 :]]
        yield [[items[0]], *rest]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 7), st.integers(30, 90))
def test_no_split_at_all_is_better(lengths, count, cap):
    """Of all partitions, neighbours or not, into so many groups under the cap none has a lower maximum."""
    possible = [
        max(len(group) * max(group) for group in partition)
        for partition in partitions(lengths)
        if len(partition) <= count and all(len(g) * max(g) <= cap or len(g) == 1 for g in partition)
    ]
    falling = np.sort(np.array(lengths))[::-1].copy()
    starts = cut_exactly(Ordered(falling, cap=cap), count)
    if not possible:
        assert starts is None
        return
    assert starts is not None and len(starts) == min(count, len(lengths))
    sizes = np.diff(starts, append=len(falling))
    assert max(falling[starts] * sizes) == min(possible)


@CASES
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=200),
    st.integers(1, 12),
    st.sampled_from([0.0, 0.02]),
    st.integers(0, 3),
    st.booleans(),
)
def test_windows_side_by_side_equal_one_by_one(lengths, windows, weight, more, parts):
    rng = np.random.default_rng(len(lengths))
    values = np.array(lengths)
    bounds = np.arange(windows + 1) * len(values) // windows
    if parts:
        values = np.stack([values, rng.permutation(values)], axis=1)
    else:
        values = np.concatenate([np.sort(part)[::-1] for part in np.split(values, bounds[1:-1])])
    together = Ordered(values, cap=128, attention_weight=weight, bounds=bounds)
    threshold = 100.0
    apart = [
        Ordered(part, cap=128, attention_weight=weight).starts(threshold) + begin
        for part, begin in zip(np.split(values, bounds[1:-1]), bounds[:-1], strict=True)
        if len(part)
    ]
    assert together.starts(threshold).tolist() == np.concatenate(apart).tolist()
    assert together.counts(threshold).sum() == sum(len(part) for part in apart)
    least = int(together.counts(np.inf).sum())
    assert least == 1 or cut_exactly(together, least - 1) is None
    starts = cut_exactly(together, least + more)
    assert starts is not None and len(starts) == min(least + more, len(values))
    assert set(bounds[:-1][np.diff(bounds) > 0].tolist()) <= set(starts.tolist())


def test_a_threshold_that_is_a_cost_loses_no_row():
    for length, rows, weight in itertools.product([3, 7, 49], [3, 11, 49], [0.0, 1 / 3, 0.1]):
        ordered = Ordered(np.full(rows * 2, length), cap=None, attention_weight=weight)
        assert ordered.starts(rows * (length * (1 + weight * length))).tolist() == [0, rows]


def test_split_costliest_halves_what_costs_most():
    ordered = Ordered(np.array([9, 9, 9, 9, 1, 1, 1, 1]), cap=None)
    assert split_costliest(ordered, np.array([0, 4]), 3).tolist() == [0, 2, 4]
    assert split_costliest(ordered, np.array([0, 4]), 5).tolist() == [0, 1, 2, 3, 4]
    assert split_costliest(ordered, np.array([0, 4]), 99).tolist() == list(range(8))


def least_possible_maximum(lengths: np.ndarray, slots: int) -> float:
    """A bound for any split of rows to slots: the mean, and the pigeonhole over the longest rows."""
    falling = np.sort(lengths)[::-1]
    pigeonhole = max(
        (index // slots + 1) * falling[index] for index in range(0, len(falling), slots)
    )  # among the index+1 longest one slot has index//slots+1 rows
    return max(pigeonhole, falling.sum() / slots)


@CASES
@given(st.integers(8, 40), st.integers(0, 1000))
def test_split_anew_is_close_to_what_any_split_can_reach(slots, seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(20, 60, slots * int(rng.integers(8, 20)))
    parts = split_anew(lengths, slots, cap=None, attention_weight=0.0, planned=None)
    assert len(parts) == slots
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(lengths)))
    costliest = max(len(part) * int(lengths[part].max()) for part in parts)
    # Above the bound is only padding and one row's share.
    assert costliest <= 1.2 * least_possible_maximum(lengths, slots)


def test_deal_puts_like_costs_side_by_side():
    lengths = np.array([10, 10, 40, 10, 40, 9, 9, 9, 9, 9, 9])
    planned = [np.array([0, 1, 3]), np.array([2]), np.array([4]), np.array([5, 6, 7, 8, 9, 10])]
    dealt = deal(lengths, planned, data_parallel_size=2, accumulation_steps=2, cap=60, attention_weight=0.0)
    costs = [len(part) * lengths[part].max() for part in dealt if part is not None]
    assert costs == [54, 40, 40, 30]


def test_deal_keeps_most_of_the_plan_where_ranks_do_not_divide():
    lengths = np.repeat([60, 30, 20, 12, 10], [1, 2, 3, 5, 6])
    planned = np.split(np.arange(17), np.cumsum([1, 2, 3, 5]))
    dealt = deal(lengths, planned, data_parallel_size=3, accumulation_steps=2, cap=60, attention_weight=0.0)
    assert len(dealt) == 6 and all(part is not None for part in dealt)
    kept = {tuple(part.tolist()) for part in planned} & {
        tuple(part.tolist()) for part in dealt if part is not None
    }
    # 5 micro-batches on 2 x 3 slots: only the two of the shortest rows are split anew, to three.
    assert kept == {tuple(part.tolist()) for part in planned[:3]}


@CASES
@given(st.integers(1, 5000), st.integers(0, 100))
def test_shuffled_is_a_permutation(rows, seed):
    order = shuffled(rows, np.random.default_rng(seed))
    assert np.array_equal(np.sort(order), np.arange(rows))


def test_shuffled_is_even():
    """Each of the 24 orders of four comes up as often, within five deviations of a binomial."""
    counts: dict[tuple[int, ...], int] = {}
    random = np.random.default_rng(0)
    for _ in range(12000):
        order = tuple(shuffled(4, random).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert all(abs(count - 500) < 5 * (12000 / 24 * 23 / 24) ** 0.5 for count in counts.values())


@CASES
@given(st.integers(1, 3000), st.integers(1, 400))
def test_sorted_inside_windows_only(rows, window):
    rng = np.random.default_rng(rows)
    lengths = rng.integers(1, 50, rows)
    order = rng.permutation(rows)
    bounds = window_bounds(rows, window)
    assert bounds[0] == 0 and bounds[-1] == rows and np.ptp(np.diff(bounds)) <= 1
    ordered = sort_windows(lengths, order, bounds)
    for left, right in itertools.pairwise(bounds):
        part = ordered[left:right]
        assert sorted(part.tolist()) == sorted(order[left:right].tolist())
        place = {int(row): index for index, row in enumerate(order[left:right])}
        keys = [(-int(lengths[row]), place[int(row)]) for row in part]
        assert keys == sorted(keys)


def test_the_window_follows_the_lengths_and_the_budget():
    rng = np.random.default_rng(0)
    wide = np.maximum(1, rng.lognormal(4, 1, 200_000)).astype(int)
    assert choose_window(np.full(200_000, 17), 512) == 256
    small, large = choose_window(wide, 2048), choose_window(wide, 32768)
    assert 256 < small < large <= 200_000
    assert choose_window(wide[:100], 2048) == 100
    # Few rows: half of them, where that pads little, so that neighbours change from epoch to epoch.
    assert choose_window(wide[:20_000], 2048) == 10_000


@CASES
@given(st.integers(0, 600), st.integers(1, 9), st.integers(0, 9))
def test_steps_draw_every_micro_batch_once(count, per_step, seed):
    cost = np.random.default_rng(seed).random(count) ** 0.2
    parts = draw_steps(cost, per_step, np.random.default_rng(seed))
    assert sorted(parts.tolist()) == list(range(count))


def test_class_bounds_are_the_best_for_their_number():
    cost = np.sort(np.concatenate([np.full(32, 0.5), np.full(168, 0.99), [1.0] * 200]))
    bounds = class_bounds(cost, 4)
    assert bounds.tolist() == [0, 8, 100]
    # Alike costs need no classes, nor does a step of one micro-batch.
    assert class_bounds(np.full(400, 0.97), 4).tolist() == [0, 100]
    assert class_bounds(cost, 1).tolist() == [0, 400]


@pytest.mark.parametrize("per_step", [8, 64])
def test_classes_shorten_the_wait(per_step):
    cost = np.random.default_rng(0).uniform(0.7, 1.0, 64 * 200)
    parts = draw_steps(cost, per_step, np.random.default_rng(0))
    waited = cost[parts].reshape(-1, per_step).max(axis=1).mean() / cost.mean()
    at_random = np.random.default_rng(1).permutation(cost).reshape(-1, per_step).max(axis=1).mean()
    assert waited <= 1.05 < at_random / cost.mean()
