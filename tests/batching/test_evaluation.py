"""Evaluation: each row once, longest first, as many forward passes on each rank."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_dist.batching.plan import plan_evaluation


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 60), max_size=150),
    st.integers(16, 400),
    st.sampled_from([1, 8]),
    st.integers(1, 9),
    st.booleans(),
)
def test_each_row_once(lengths, cap, multiple, ranks, parts):
    values = np.array(lengths, dtype=np.int64)
    if parts:
        values = np.stack([values, values[::-1]], axis=1)
    forwards = plan_evaluation(values, cap, multiple, ranks)
    assert all(len(forward) == ranks for forward in forwards)
    rows = [
        row for forward in forwards for batch in forward if not batch.empty for row in batch.rows.tolist()
    ]
    assert sorted(rows) == list(range(len(lengths)))
    for batch in (batch for forward in forwards for batch in forward):
        assert len(batch.rows) > 0
        assert len(batch.rows) == 1 or batch.computed_tokens <= cap
        assert batch.real_tokens == (0 if batch.empty else int(values[batch.rows].sum()))
    if lengths and not parts:
        falling = sorted((-(-max(1, length) // multiple) * multiple for length in lengths), reverse=True)
        needed = 0
        while falling:
            needed += 1
            falling = falling[max(1, cap // falling[0]) :]
        # No more forward passes than rows from the long end, as many as fit, need.
        assert len(forwards) == -(-needed // ranks)


def test_the_longest_row_is_in_the_first_forward_pass():
    lengths = np.random.default_rng(0).integers(1, 500, 2000)
    forwards = plan_evaluation(lengths, 4096, 1, 4)
    first = np.concatenate([batch.rows for batch in forwards[0]])
    assert int(np.argmax(lengths)) in first
    longest = [max(int(lengths[batch.rows].max()) for batch in forward) for forward in forwards]
    assert longest == sorted(longest, reverse=True)


def test_padding_is_small_and_ranks_wait_little():
    lengths = np.maximum(1, np.random.default_rng(0).lognormal(3.5, 0.7, 20_000)).astype(int)
    forwards = plan_evaluation(lengths, 4096, 1, 8)
    batches = [batch for forward in forwards for batch in forward]
    computed = sum(batch.computed_tokens for batch in batches)
    assert sum(batch.real_tokens for batch in batches) / computed > 0.985
    waited = sum(max(batch.computed_tokens for batch in forward) for forward in forwards)
    assert 8 * waited / computed == pytest.approx(1, abs=0.02)
