"""The torch adapter, rank by rank without processes; `tests/distributed` runs it in two."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, prepare_data_loader, skip_first_batches
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from hf_dist.batching.plan import ExampleBatching, Plan, TokenBatching, plan_evaluation
from hf_dist.batching.sampler import (
    BATCH_KEY,
    BatchKey,
    EvaluationBatchSampler,
    PlannedBatchSampler,
    PlannedCollator,
    PlannedDataset,
)

SIZES = (1, 2, 3, 8)


def some_lengths(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 40, count)


def plan_of(count: int, *, micro_batches: int = 3, seed: int = 0) -> Plan:
    batching = TokenBatching(max_tokens_per_device=64, tokens_per_step=64 * micro_batches)
    return Plan.build(some_lengths(count, seed), batching, seed=seed)


class Rows:
    """A data set that remembers which of its rows were read."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> dict[str, Any]:
        self.read.append(row)
        return {"input_ids": [row], "labels": row}


def collate(examples: list[dict[str, Any]], key: BatchKey) -> dict[str, torch.Tensor]:
    return {"labels": torch.tensor([example["labels"] for example in examples])}


def count_rows(batch: dict[str, Any]) -> int:
    return len(batch["labels"])


def loader_of(
    plan: Plan, *, rank: int = 0, size: int = 1, workers: int = 0, rows: Rows | None = None, **options: Any
) -> DataLoader:
    sampler = PlannedBatchSampler(plan, data_parallel_rank=rank, data_parallel_size=size)
    loader = DataLoader(
        PlannedDataset(rows or Rows(plan.rows)),
        batch_sampler=sampler,
        collate_fn=PlannedCollator(collate, count_rows),
        num_workers=workers,
        **options,
    )
    return prepare_data_loader(loader, num_processes=1, process_index=0, put_on_device=True, rng_types=None)


def keys_of(loader: DataLoader) -> list[BatchKey]:
    return [batch[BATCH_KEY] for batch in loader]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1, 2, 5, 97])
def test_an_epoch_holds_each_row_once_and_all_ranks_count_alike(count: int, size: int) -> None:
    plan = plan_of(count)
    ranks = [
        list(PlannedBatchSampler(plan, data_parallel_rank=r, data_parallel_size=size)) for r in range(size)
    ]
    seen = Counter(row for keys in ranks for key in keys if not key.empty for row in key.rows)
    assert seen == Counter(range(count))
    expected = plan.steps_per_epoch * plan.accumulation_steps(size)
    assert [len(keys) for keys in ranks] == [expected] * size
    assert len(PlannedBatchSampler(plan, data_parallel_rank=0, data_parallel_size=size)) == expected
    places = [[(key.step, key.micro_batch) for key in keys] for keys in ranks]
    assert all(place == places[0] for place in places)


def test_steps_hold_the_same_rows_on_any_number_of_ranks() -> None:
    plan = plan_of(97)
    steps: dict[int, list[set[int]]] = {}
    for size in SIZES:
        found: list[set[int]] = [set() for _ in range(plan.steps_per_epoch)]
        for rank in range(size):
            for key in PlannedBatchSampler(plan, data_parallel_rank=rank, data_parallel_size=size):
                if not key.empty:
                    found[key.step].update(key.rows)
        steps[size] = found
    assert all(found == steps[1] for found in steps.values())


def test_empty_micro_batches_say_so_and_count_nothing() -> None:
    plan = plan_of(3, micro_batches=1)
    empty = [key for r in range(8) for key in keys_of(loader_of(plan, rank=r, size=8)) if key.empty]
    assert len(empty) == 8 * plan.steps_per_epoch - 3
    assert {(key.weight, key.items, key.real_tokens) for key in empty} == {(0, 0, 0)}
    real = [key for key in keys_of(loader_of(plan)) if not key.empty]
    assert [key.items for key in real] == [len(key.rows) for key in real]
    assert sum(key.real_tokens for key in real) == some_lengths(3).sum()


def test_no_rows_give_no_batches() -> None:
    plan = Plan.build(
        np.zeros(0, dtype=np.int64), ExampleBatching(examples_per_step=4, max_tokens_per_device=9), seed=0
    )
    assert list(PlannedBatchSampler(plan, data_parallel_rank=1, data_parallel_size=2)) == []


def test_a_rank_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 2 is not one of 2"):
        PlannedBatchSampler(plan_of(4), data_parallel_rank=2, data_parallel_size=2)


@pytest.mark.parametrize("size", [1, 2])
def test_skipping_equals_the_uninterrupted_tail_at_every_step_and_reads_nothing(size: int) -> None:
    plan = plan_of(61)
    accumulation = plan.accumulation_steps(size)
    for epoch in (0, 1):
        whole = loader_of(plan, rank=size - 1, size=size)
        whole.set_epoch(epoch)
        uninterrupted = keys_of(whole)
        for step in range(1, plan.steps_per_epoch):
            rows = Rows(plan.rows)
            skipped = skip_first_batches(
                loader_of(plan, rank=size - 1, size=size, rows=rows), step * accumulation
            )
            skipped.set_epoch(epoch)
            assert keys_of(skipped) == uninterrupted[step * accumulation :]
            read = {row for key in uninterrupted[step * accumulation :] for row in key.rows}
            assert set(rows.read) == read


def test_a_resumed_run_does_not_even_deal_what_it_skips() -> None:
    plan = plan_of(61)
    accumulation, step = plan.accumulation_steps(2), plan.steps_per_epoch - 1
    loader = loader_of(plan, rank=1, size=2)
    loader.set_epoch(1)
    uninterrupted = keys_of(loader)
    loader.batch_sampler.fast_forward(1, step)
    epoch, dealt = plan.epoch(1), []
    deal = epoch.deal_to_rank
    epoch.deal_to_rank = lambda step, *hardware: dealt.append(step) or deal(step, *hardware)
    skipped = skip_first_batches(loader, step * accumulation)
    skipped.set_epoch(1)
    assert keys_of(skipped) == uninterrupted[step * accumulation :]
    assert dealt == [step]
    loader.set_epoch(1)
    with pytest.raises(RuntimeError, match="step 0 of epoch 1 was to be skipped, and is read"):
        keys_of(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_differ_repeat_and_reach_persistent_workers(workers: int) -> None:
    plan = plan_of(61)
    loader = loader_of(plan, workers=workers, persistent_workers=workers > 0)
    epochs = []
    for epoch in (0, 1, 0):
        loader.set_epoch(epoch)
        epochs.append(keys_of(loader))
    assert {key.epoch for key in epochs[1]} == {1}
    assert epochs[0] == epochs[2]
    assert [key.rows for key in epochs[0]] != [key.rows for key in epochs[1]]


def test_workers_bring_the_rows_that_the_keys_name() -> None:
    plan = plan_of(40)
    batches = list(loader_of(plan, workers=2))
    assert all(batch["labels"].tolist() == list(batch[BATCH_KEY].rows) for batch in batches)
    assert Counter(row for batch in batches for row in batch["labels"].tolist()) == Counter(range(40))


@pytest.mark.parametrize("size", SIZES)
def test_evaluation_holds_each_row_once_with_equal_forward_counts(size: int) -> None:
    forwards = plan_evaluation(some_lengths(29), 64, 1, size)
    ranks = [list(EvaluationBatchSampler(forwards, data_parallel_rank=rank)) for rank in range(size)]
    assert {len(keys) for keys in ranks} == {len(forwards)}
    seen = Counter(row for keys in ranks for key in keys if not key.empty for row in key.rows)
    assert seen == Counter(range(29))


def test_upstream_prepare_still_shards_a_batch_sampler_that_is_sharded_already() -> None:
    """Accelerate 1.15; when this fails, `_make_loader` can use `accelerator.prepare`."""
    plan = plan_of(61)
    sampler = PlannedBatchSampler(plan, data_parallel_rank=0, data_parallel_size=2)
    loader = DataLoader(
        PlannedDataset(Rows(61)), batch_sampler=sampler, collate_fn=PlannedCollator(collate, count_rows)
    )
    sharded = prepare_data_loader(loader, num_processes=2, process_index=0, put_on_device=True)
    assert len(keys_of(sharded)) < len(sampler)


def test_upstream_shards_still_lose_batches_smaller_than_a_batch_size() -> None:
    """Accelerate 1.15; when this fails, the sampler may have a `batch_size`."""
    ten = BatchSampler(SequentialSampler(range(10)), batch_size=4, drop_last=False)
    shards = [list(BatchSamplerShard(ten, 2, rank, even_batches=False)) for rank in range(2)]
    assert sorted(row for shard in shards for batch in shard for row in batch) == list(range(10))

    class Uneven(BatchSampler):
        def __iter__(self) -> Any:
            yield from ([0], [1, 2], [3], [4, 5, 6, 7])

    uneven = Uneven(SequentialSampler(range(8)), batch_size=4, drop_last=False)
    shards = [list(BatchSamplerShard(uneven, 2, rank, even_batches=False)) for rank in range(2)]
    assert sorted(row for shard in shards for batch in shard for row in batch) != list(range(8))


def test_upstream_set_epoch_still_reaches_a_skipped_sampler_only_by_its_sampler_attribute() -> None:
    """Accelerate 1.15; when this fails, `PlannedBatchSampler.sampler` is not needed any more."""
    plan = plan_of(30)

    class Hidden(PlannedBatchSampler):
        sampler = None  # type: ignore[assignment]

    for kind, expected in ((PlannedBatchSampler, 3), (Hidden, 0)):
        sampler = kind(plan, data_parallel_rank=0, data_parallel_size=1)
        loader = DataLoader(
            PlannedDataset(Rows(30)), batch_sampler=sampler, collate_fn=PlannedCollator(collate, count_rows)
        )
        shard = prepare_data_loader(loader, num_processes=1, process_index=0, put_on_device=True)
        resumed = skip_first_batches(shard, 1)
        resumed.set_epoch(3)
        assert {key.epoch for key in keys_of(resumed)} == {expected}
