"""The plan's promises, on random budgets: each row once, the cap holds, the same steps on any hardware."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hf_dist.batching.plan import ExampleBatching, MicroBatch, Plan, TokenBatching
from hf_dist.errors import ConfigError, DataError

CASES = settings(max_examples=200, deadline=None)
FEWER = settings(max_examples=50, deadline=None)


@st.composite
def batchings(draw, cap_at_least: int = 64):
    cap = draw(st.integers(cap_at_least, 600))
    pad = draw(st.sampled_from([1, 4, 8]))
    window = draw(st.none() | st.integers(1, 80))
    if draw(st.booleans()):
        return TokenBatching(
            max_tokens_per_device=cap,
            tokens_per_step=draw(st.integers(1, 8 * cap)),
            pad_to_multiple_of=pad,
            window=window,
        )
    return ExampleBatching(
        examples_per_step=draw(st.integers(1, 40)),
        max_tokens_per_device=cap,
        pad_to_multiple_of=pad,
        window=window,
    )


row_counts = st.integers(0, 12) | st.integers(13, 300)
lengths_1d = st.tuples(row_counts, st.integers(0, 2**31)).map(
    lambda case: np.random.default_rng(case[1]).integers(0, 57, case[0])
)
lengths_2d = st.tuples(row_counts, st.integers(0, 2**31)).map(
    lambda case: np.random.default_rng(case[1]).integers(0, 29, (case[0], 2))
)


def computed_by_hand(lengths: np.ndarray, batch: MicroBatch, multiple: int) -> int:
    """Rows x the longest, rounded up: the definition, in plain Python."""
    rows = lengths.reshape(len(lengths), -1)[batch.rows].tolist()
    return sum(len(rows) * -(-max(1, *part) // multiple) * multiple for part in zip(*rows, strict=True))


def check_epoch(plan: Plan, lengths: np.ndarray, epoch: int, ranks: int, accumulation: int) -> list[set[int]]:
    """Checks every promise of one epoch on this hardware; returns the steps as sets of rows."""
    batching = plan.batching
    seen: list[int] = []
    steps: list[set[int]] = []
    assert len(plan.epoch(epoch)) == plan.steps_per_epoch
    for step in range(plan.steps_per_epoch):
        dealt = plan.epoch(epoch).deal(step, ranks, accumulation)
        assert [len(forward) for forward in dealt] == [ranks] * accumulation
        rows_of_step = plan.epoch(epoch).step_rows(step)
        mine: list[int] = []
        for batch in itertools.chain(*dealt):
            assert len(batch.rows) > 0
            assert batch.rows.dtype == np.int64
            assert batch.computed_tokens == computed_by_hand(lengths, batch, batching.pad_to_multiple_of)
            if len(batch.rows) > 1 and batching.max_tokens_per_device is not None:
                assert batch.computed_tokens <= batching.max_tokens_per_device
            if batch.empty:
                assert batch.real_tokens == 0 and len(batch.rows) == 1
                parts = lengths.reshape(len(lengths), -1)
                assert parts[batch.rows[0]].sum() <= parts[rows_of_step].sum(axis=1).max()
                assert set(batch.rows.tolist()) <= set(rows_of_step.tolist())
            else:
                assert batch.real_tokens == int(lengths[batch.rows].sum())
                mine += batch.rows.tolist()
        assert sorted(mine) == sorted(rows_of_step.tolist())
        seen += mine
        steps.append(set(mine))
    assert len(seen) == plan.rows and len(set(seen)) == len(seen)
    return steps


# Rows of two parts that neighbours' cuts don't fit in as few micro-batches as the worst step's cut.
TWO_PARTS = np.random.default_rng(1000).integers(0, 29, (9, 2))
NINE_ROWS = ExampleBatching(examples_per_step=9, max_tokens_per_device=64, pad_to_multiple_of=4)


@CASES
@given(lengths_1d | lengths_2d, batchings(), st.integers(1, 9), st.integers(0, 3), st.integers(0, 3))
@example(TWO_PARTS, NINE_ROWS, 1, 0, 0)
def test_each_row_once_within_the_cap_whatever_the_hardware(lengths, batching, ranks, more, epoch):
    plan = Plan.build(lengths, batching, seed=7)
    assert plan.rows == len(lengths) and plan.dropped == 0
    alone = check_epoch(plan, lengths, epoch, 1, plan.accumulation_steps(1))
    spread = check_epoch(plan, lengths, epoch, ranks, plan.accumulation_steps(ranks) + more)
    assert alone == spread
    assert all(alone)


@FEWER
@given(lengths_1d, batchings(), st.integers(0, 2**40), st.sampled_from([0.0, 0.01]))
def test_epochs_are_pure_and_as_long(lengths, batching, seed, weight):
    plan = Plan.build(lengths, batching, seed=seed, attention_weight=weight)
    again = Plan.build(list(lengths), batching, seed=seed, attention_weight=weight)
    assert plan.fingerprint == again.fingerprint
    order = {}
    for epoch in (0, 3, 1, 0):
        assert len(plan.epoch(epoch)) == plan.steps_per_epoch
        steps = [plan.epoch(epoch).step_rows(step).tolist() for step in range(plan.steps_per_epoch)]
        assert steps == order.setdefault(epoch, steps)
        assert steps == [again.epoch(epoch).step_rows(step).tolist() for step in range(again.steps_per_epoch)]


@settings(max_examples=25, deadline=None)
@given(lengths_1d.map(lambda lengths: lengths[:60]).filter(len), batchings(), st.integers(1, 9))
def test_resume_at_any_step_equals_the_uninterrupted_tail(lengths, batching, ranks):
    """A fresh plan, in a fresh process so to say, deals the rest of the epoch as the first one would have."""
    plan = Plan.build(lengths, batching, seed=3)
    accumulation = plan.accumulation_steps(ranks)

    def tail(of: Plan, first: int) -> list[list[int]]:
        return [
            batch.rows.tolist()
            for step in range(first, of.steps_per_epoch)
            for forward in of.epoch(2).deal(step, ranks, accumulation)
            for batch in forward
        ]

    whole = tail(plan, 0)
    for first in range(plan.steps_per_epoch):
        assert tail(Plan.build(lengths, batching, seed=3), first) == whole[first * ranks * accumulation :]


@FEWER
@given(lengths_1d, batchings(), st.integers(1, 9))
def test_a_rank_gets_its_column(lengths, batching, ranks):
    plan = Plan.build(lengths, batching, seed=0)
    accumulation = plan.accumulation_steps(ranks)
    for step in range(plan.steps_per_epoch):
        dealt = plan.epoch(0).deal(step, ranks, accumulation)
        for rank in range(ranks):
            column = plan.epoch(0).deal_to_rank(step, ranks, accumulation, rank)
            assert [batch.rows.tolist() for batch in column] == [row[rank].rows.tolist() for row in dealt]


def rows(count: int, seed: int = 0, high: int = 100) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, high, count)


def test_two_epochs_and_two_seeds_differ():
    batching = TokenBatching(max_tokens_per_device=1024, tokens_per_step=4096)
    plan = Plan.build(rows(5000), batching, seed=1)
    other = Plan.build(rows(5000), batching, seed=2)
    first = {frozenset(part.tolist()) for s in range(20) for part in plan.epoch(0).planned(s)}
    second = {
        frozenset(part.tolist()) for s in range(plan.steps_per_epoch) for part in plan.epoch(1).planned(s)
    }
    # Not only are the steps others: so are the micro-batches they are made of.
    assert not first & second
    assert not np.array_equal(plan.epoch(0).step_rows(0), other.epoch(0).step_rows(0))


def test_fingerprint_covers_arguments_and_lengths():
    batching = TokenBatching(max_tokens_per_device=1024, tokens_per_step=4096)
    plans = [
        Plan.build(rows(500), batching, seed=1),
        Plan.build(rows(500), batching, seed=2),
        Plan.build(rows(500, seed=1), batching, seed=1),
        Plan.build(rows(500), batching, seed=1, attention_weight=0.001),
        Plan.build(rows(500), batching, seed=1, probe_longest_first=True),
        Plan.build(rows(500), TokenBatching(max_tokens_per_device=1024, tokens_per_step=4097), seed=1),
        Plan.build(rows(500).reshape(250, 2), batching, seed=1),
    ]
    assert len({plan.fingerprint for plan in plans}) == len(plans)
    assert plans[0].fingerprint == Plan.build(rows(500).tolist(), batching, seed=1).fingerprint


@pytest.mark.parametrize("size", [1, 1.4, 1.6, 3, 8])
def test_micro_batches_per_step_is_tokens_per_step_over_the_cap(size):
    plan = Plan.build(
        rows(20000), TokenBatching(max_tokens_per_device=1000, tokens_per_step=int(1000 * size)), seed=0
    )
    assert plan.micro_batches_per_step == round(size)
    held = plan.epoch(0).step_totals()[1][:-1]
    assert held.max() <= 1000 * max(1, size)
    # What is asked for, less what whole rows can't fill.
    assert held.mean() > 0.85 * 1000 * min(size, round(size))


def test_a_step_smaller_than_the_cap_is_kept_small():
    plan = Plan.build(rows(5000), TokenBatching(max_tokens_per_device=4096, tokens_per_step=512), seed=0)
    assert plan.epoch(0).step_totals()[1].max() <= 512


@pytest.mark.parametrize("count", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_fewer_rows_than_ranks(count, ranks):
    for batching in (
        TokenBatching(max_tokens_per_device=512, tokens_per_step=2048),
        ExampleBatching(examples_per_step=8, max_tokens_per_device=None),
    ):
        plan = Plan.build(rows(count), batching, seed=0)
        assert plan.steps_per_epoch == (1 if count else 0)
        check_epoch(plan, rows(count), 0, ranks, plan.accumulation_steps(ranks))
        if count:
            dealt = plan.epoch(0).deal(0, ranks, 1 if ranks > 3 else 4)
            empty = [batch for batch in itertools.chain(*dealt) if batch.empty]
            assert len(empty) == len(dealt) * ranks - min(count, len(dealt) * ranks)
            shortest = int(np.argmin(rows(count)))
            assert all(batch.rows.tolist() == [shortest] for batch in empty)


def test_examples_a_step_and_the_fewest_micro_batches():
    lengths = rows(10_007, high=200)
    plan = Plan.build(lengths, ExampleBatching(examples_per_step=64, max_tokens_per_device=1024), seed=0)
    assert plan.steps_per_epoch == 157
    least = 0
    for epoch in range(6):
        sizes = [len(plan.epoch(epoch).step_rows(step)) for step in range(157)]
        assert sizes[:-1] == [64] * 156 and sizes[-1] == 10_007 - 156 * 64
        for step in range(157):
            # The fewest a step can do with: from the long end, as many as fit, in plain Python.
            waiting = sorted(lengths[plan.epoch(epoch).step_rows(step)].tolist())
            needed = 0
            while waiting:
                needed += 1
                del waiting[-min(len(waiting), 1024 // waiting[-1]) :]
            least = max(least, needed)
    assert plan.micro_batches_per_step == least
    with pytest.raises(ConfigError, match="does not fit"):
        plan.epoch(0).deal(0, 1, 2)


def test_steps_of_examples_are_alike_and_unbiased():
    lengths = rows(6400, high=500)
    plan = Plan.build(lengths, ExampleBatching(examples_per_step=64, max_tokens_per_device=None), seed=0)
    tokens = plan.epoch(0).step_totals()[1]
    random_steps = lengths[np.random.default_rng(0).permutation(6400)].reshape(100, 64).sum(axis=1)
    assert tokens.std() < 0.2 * random_steps.std()
    partners = {row for epoch in range(50) for row in _partners(plan, epoch, 17)}
    # In 50 epochs a row meets 50 x 63 others; of rows drawn evenly it would see 2,480 different ones.
    assert len(partners) > 2000


def _partners(plan: Plan, epoch: int, row: int) -> list[int]:
    for step in range(plan.steps_per_epoch):
        members = plan.epoch(epoch).step_rows(step).tolist()
        if row in members:
            return members
    raise AssertionError("the row is in no step")


def test_too_long_rows():
    lengths = np.array([10, 300, 20, 130, 30, 40])
    tokens = {"max_tokens_per_device": 128, "tokens_per_step": 128}
    with pytest.raises(DataError, match="2 rows are longer than --max_tokens_per_device 128 .row 1 has 300"):
        Plan.build(lengths, TokenBatching(**tokens), seed=0)
    dropped = Plan.build(lengths, TokenBatching(**tokens, too_long="drop"), seed=0)
    assert dropped.dropped == 2 and dropped.rows == 4 and dropped.dropped_rows.tolist() == [1, 3]
    check_epoch(dropped, lengths, 0, 2, dropped.accumulation_steps(2))
    alone = Plan.build(lengths, TokenBatching(**tokens, too_long="alone"), seed=0)
    check_epoch(alone, lengths, 0, 2, alone.accumulation_steps(2))
    parts = [part.tolist() for s in range(alone.steps_per_epoch) for part in alone.epoch(0).planned(s)]
    assert [1] in parts and [3] in parts
    # What counts is the length with its padding.
    with pytest.raises(DataError, match="has 136 tokens with padding"):
        Plan.build([130], TokenBatching(**tokens, pad_to_multiple_of=8), seed=0)


@pytest.mark.parametrize("kind", ["tokens", "examples"])
def test_probe_runs_the_costliest_step_first_in_epoch_0_only(kind):
    lengths = rows(3000)
    lengths[1234] = 900
    batching = (
        TokenBatching(max_tokens_per_device=1024, tokens_per_step=4096)
        if kind == "tokens"
        else ExampleBatching(examples_per_step=32, max_tokens_per_device=1024)
    )
    arguments = {"seed": 0, "attention_weight": 0.01}
    plain = Plan.build(lengths, batching, **arguments)
    probing = Plan.build(lengths, batching, **arguments, probe_longest_first=True)
    assert 1234 in probing.epoch(0).step_rows(0)
    assert 1234 not in plain.epoch(0).step_rows(0)
    check_epoch(probing, lengths, 0, 2, probing.accumulation_steps(2))
    assert plain.epoch(1).step_rows(0).tolist() == probing.epoch(1).step_rows(0).tolist()


def test_probe_in_a_short_last_step():
    """With the costliest micro-batch in a last step of fewer, every seed still has it first."""
    lengths = rows(300)
    lengths[7] = 900
    batching = TokenBatching(max_tokens_per_device=1024, tokens_per_step=8192)
    for seed in range(20):
        plan = Plan.build(lengths, batching, seed=seed, attention_weight=0.01, probe_longest_first=True)
        assert 7 in plan.epoch(0).step_rows(0)
        check_epoch(plan, lengths, 0, 2, plan.accumulation_steps(2))


def test_bad_arguments():
    batching = TokenBatching(max_tokens_per_device=64, tokens_per_step=64)
    with pytest.raises(ConfigError, match="tokens_per_step is 0; it must be at least 1"):
        TokenBatching(max_tokens_per_device=64, tokens_per_step=0)
    with pytest.raises(ConfigError, match="expected error, alone or drop"):
        TokenBatching(max_tokens_per_device=64, tokens_per_step=1, too_long="truncate")
    with pytest.raises(DataError, match="expected whole numbers"):
        Plan.build([1.5, 2.0], batching, seed=0)
    with pytest.raises(DataError, match="a length is -1"):
        Plan.build([3, -1], batching, seed=0)
    with pytest.raises(ConfigError, match="seed is -1"):
        Plan.build([3], batching, seed=-1)
    with pytest.raises(ConfigError, match="attention_weight is nan"):
        Plan.build([3], batching, seed=0, attention_weight=float("nan"))
    plan = Plan.build(rows(1000), TokenBatching(max_tokens_per_device=512, tokens_per_step=2048), seed=0)
    with pytest.raises(ConfigError, match="at least 2 accumulation steps are needed"):
        plan.epoch(0).deal(0, 2, 1)
    with pytest.raises(IndexError, match="step 1000 of an epoch"):
        plan.epoch(0).step_rows(1000)


def test_an_unlucky_shuffle_keeps_the_number_of_micro_batches():
    """Tiny windows make the count differ from shuffle to shuffle; every epoch still has the same steps."""
    lengths = np.where(np.arange(400) % 7 == 0, 60, 3)
    batching = TokenBatching(max_tokens_per_device=64, tokens_per_step=128, window=2)
    plan = Plan.build(lengths, batching, seed=0)
    for epoch in range(20):
        check_epoch(plan, lengths, epoch, 2, plan.accumulation_steps(2))
        parts = sum(len(plan.epoch(epoch).planned(step)) for step in range(plan.steps_per_epoch))
        assert parts == plan.micro_batches_per_epoch
