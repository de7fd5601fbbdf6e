"""Streams: equal counts, the cap, resume without reading again, and nobody waiting for ever."""

from __future__ import annotations

import itertools
import pickle

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from hf_dist.batching.plan import TokenBatching
from hf_dist.batching.stream import StreamBatches, best_run
from hf_dist.errors import CheckpointError, ConfigError, DataError

ROWS = 3000


def data(rows: int = ROWS, shards: int = 4, high: int = 120) -> datasets.IterableDataset:
    lengths = np.random.default_rng(0).integers(1, high, rows)
    table = datasets.Dataset.from_dict(
        {"input_ids": [[row] * int(length) for row, length in enumerate(lengths)]}
    )
    return table.to_iterable_dataset(num_shards=shards)


def budget(**others) -> TokenBatching:
    return TokenBatching(**{"max_tokens_per_device": 1024, "tokens_per_step": 4096, "window": 200, **others})


def rows_of(batch) -> list[int]:
    return [example["input_ids"][0] for example in batch.examples]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_all_ranks_run_as_many_and_share_the_rows(size):
    """3 and 8 do not divide the 4 shards: then rows are dealt in turn, by datasets itself."""
    seen: list[list[int]] = []
    for rank in range(size):
        batches = StreamBatches(
            data(), budget(), max_steps=3, data_parallel_rank=rank, data_parallel_size=size
        )
        found = list(batches)
        assert len(found) == len(batches) == 3 * -(-4 // size)
        for batch in found:
            assert not batch.key.empty
            longest = max(len(example["input_ids"]) for example in batch.examples)
            assert batch.key.computed_tokens == longest * len(batch.examples) <= 1024
            assert batch.key.real_tokens == sum(len(example["input_ids"]) for example in batch.examples)
        assert [batch.key.step for batch in found] == sorted(batch.key.step for batch in found)
        seen.append([row for batch in found for row in rows_of(batch)])
    together = list(itertools.chain(*seen))
    # Within one pass no row comes twice, on any rank.
    assert len(together) == len(set(together))


def test_two_passes_show_each_row_twice():
    batches = StreamBatches(data(500), budget(), max_steps=40)
    counts = np.zeros(500, dtype=int)
    tokens = sum(len(example["input_ids"]) for example in data(500))
    shown = 0
    for batch in batches:
        np.add.at(counts, rows_of(batch), 1)
        shown += batch.key.real_tokens
    assert shown > 2 * tokens
    # What is still in the buffer (200 rows) may be behind by one.
    assert counts.max() - counts.min() <= 2
    assert counts.min() >= 2


def test_micro_batches_are_full_and_hardly_padded():
    found = list(StreamBatches(data(), budget(window=1000), max_steps=20))
    real = sum(batch.key.real_tokens for batch in found)
    computed = sum(batch.key.computed_tokens for batch in found)
    assert real / computed > 0.97
    costs = np.array([batch.key.computed_tokens for batch in found])
    assert costs.mean() > 0.93 * 1024


def test_a_row_waits_for_at_most_as_many_micro_batches_as_the_buffer_has_rows():
    window, taken = 20, 0
    came: dict[int, int] = {}
    left: dict[int, int] = {}
    for done, batch in enumerate(StreamBatches(data(), budget(window=window), max_steps=60)):
        # The buffer is full whenever a micro-batch is taken, so this is how far the rows have come.
        came.update({row: done for row in range(len(came), taken + window)})
        taken += len(batch.key.rows)
        left.update({row: done for row in batch.key.rows})
    waited = [left[row] - came[row] for row in left]
    assert min(waited) >= 0 and 1 < max(waited) <= window


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 39), st.integers(1, 3), st.booleans())
def test_resume_at_any_micro_batch_is_as_if_nothing_happened(stop, size, shuffled):
    def build() -> StreamBatches:
        stream = data(300)
        if shuffled:
            stream = stream.shuffle(seed=5, buffer_size=50)
        return StreamBatches(
            stream,
            budget(window=40),
            max_steps=40 // -(-4 // size),
            data_parallel_rank=size - 1,
            data_parallel_size=size,
        )

    whole = [(batch.key, rows_of(batch)) for batch in build()]
    if shuffled:
        # datasets does not save the rows in its shuffle buffer, so it reads on behind them: same counts.
        whole = [(key, []) for key, _ in whole]
    stop = min(stop, len(whole))
    first = build()
    for _ in itertools.islice(iter(first), stop):
        pass
    state = pickle.loads(pickle.dumps(first.state_dict()))
    second = build()
    second.load_state_dict(state)
    rest = [(batch.key, rows_of(batch)) for batch in second]
    assert len(rest) == len(whole) - stop
    assert [key.step for key, _ in rest] == [key.step for key, _ in whole[stop:]]
    if not shuffled:
        assert rest == whole[stop:]


def test_resume_reads_only_what_comes_after():
    read: list[int] = []

    def rows(shards):
        for shard in shards:
            for row in range(100):
                read.append(row)
                yield {"input_ids": [1] * (1 + (row * 7 + shard) % 50)}

    def build() -> StreamBatches:
        stream = datasets.IterableDataset.from_generator(rows, gen_kwargs={"shards": list(range(20))})
        return StreamBatches(stream, budget(window=100), max_steps=10)

    first = build()
    for _ in itertools.islice(iter(first), 20):
        pass
    before, state = len(read), first.state_dict()
    read.clear()
    second = build()
    second.load_state_dict(state)
    next(iter(second))
    # At most the shard it was in is read again, by datasets itself; the 5 or more before it are not.
    assert before > 500
    assert len(read) < 200


def test_through_a_data_loader():
    batches = StreamBatches(data(), budget(), max_steps=2)
    loader = DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch)
    assert len(list(loader)) == len(loader) == 8
    with pytest.raises(ConfigError, match="dataloader_num_workers 0"):
        list(DataLoader(StreamBatches(data(), budget(), max_steps=2), batch_size=None, num_workers=1))


def test_too_long_rows():
    stream = datasets.Dataset.from_dict({"input_ids": [[1] * 10, [1] * 90, [1] * 20]}).to_iterable_dataset()
    tight = {"max_tokens_per_device": 64, "tokens_per_step": 64, "window": 2}
    with pytest.raises(DataError, match="row 1 of rank 0 has 90 tokens"):
        list(StreamBatches(stream, TokenBatching(**tight), max_steps=1))
    dropping = StreamBatches(stream, TokenBatching(**tight, too_long="drop"), max_steps=4)
    assert all(len(example["input_ids"]) < 90 for batch in dropping for example in batch.examples)
    assert dropping.dropped >= 1
    alone = [batch for batch in StreamBatches(stream, TokenBatching(**tight, too_long="alone"), max_steps=9)]
    assert {len(b.examples) for b in alone if any(len(e["input_ids"]) == 90 for e in b.examples)} == {1}


def test_errors():
    for steps in (None, 0, -1):
        with pytest.raises(ConfigError, match="a stream has no length"):
            StreamBatches(data(), budget(), max_steps=steps)
    with pytest.raises(DataError, match="a list is no stream"):
        StreamBatches([{"input_ids": [1]}], budget(), max_steps=1)
    two = StreamBatches(data(), budget(), max_steps=1, data_parallel_rank=1, data_parallel_size=2)
    with pytest.raises(CheckpointError, match="is of rank 1 of 2, this is rank 0 of 1"):
        StreamBatches(data(), budget(), max_steps=1).load_state_dict(two.state_dict())
    single = datasets.Dataset.from_dict({"input_ids": [[1]]}).to_iterable_dataset()
    starved = StreamBatches(single, budget(), max_steps=1, data_parallel_rank=1, data_parallel_size=2)
    with pytest.raises(DataError, match="rank 1 of 2 gets no row"):
        list(starved)
    everything_dropped = TokenBatching(max_tokens_per_device=1, tokens_per_step=1, too_long="drop")
    long = datasets.Dataset.from_dict({"input_ids": [[1, 2]] * 3}).to_iterable_dataset()
    with pytest.raises(DataError, match="gets no row"):
        list(StreamBatches(long, everything_dropped, max_steps=1))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 200), st.data())
def test_best_run_against_all_runs(lengths, cap, data):
    falling = np.sort(np.array(lengths))[::-1].copy()
    wanted = data.draw(st.integers(0, len(falling) - 1))
    possible = [
        int(falling[first : first + rows].sum())
        for first in range(wanted + 1)
        for rows in range(wanted - first + 1, len(falling) - first + 1)
        if rows * falling[first] <= cap
    ]
    first, rows = best_run(falling, wanted, cap)
    assert first <= wanted < first + rows
    if possible:
        assert rows * falling[first] <= cap
        assert int(falling[first : first + rows].sum()) == max(possible)
    else:
        assert (first, rows) == (wanted, 1)
