"""The torch adapter of a plan: batch sampler, dataset and collator that carry a plan's batches.

A key travels with each batch from the sampler through the workers to the model, so that the Trainer
knows which rows it holds, whether it is empty and what it costs, however many wrappers lie between.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import Dataset, Sampler

from hf_dist.batching.plan import MicroBatch

BATCH_KEY = "batch_key"
"""Name under which the collator puts the `BatchKey` into the batch; popped before the model sees it."""


@dataclass(frozen=True)
class BatchKey:
    """Names one micro-batch of one rank.

    Attributes:
        epoch: Epoch of the plan (0 in evaluation).
        step: Optimizer step within the epoch (0 in evaluation).
        micro_batch: Accumulation index within the step (index of the forward pass in evaluation).
        rows: Row numbers of the data set.
        empty: True where the rank has no rows of its own: the rows only keep it in step with the others
            and must count nowhere.
        computed_tokens: Rows x longest row, padded.
        real_tokens: Tokens without padding; 0 for an empty one.
        items: Items of the loss that the batch holds (see `hf_dist.tasks.items`), 0 for an empty one; known
            once the batch is collated.
    """

    epoch: int
    step: int
    micro_batch: int
    rows: tuple[int, ...]
    empty: bool
    computed_tokens: int
    real_tokens: int
    items: int = 0

    @property
    def weight(self) -> int:
        """Weight of each of the batch's items: 0 for an empty one, else 1."""
        return 0 if self.empty else 1


def make_key(epoch: int, step: int, micro_batch: int, batch: MicroBatch) -> BatchKey:
    """The key of a plan's micro-batch."""
    return BatchKey(
        epoch=epoch,
        step=step,
        micro_batch=micro_batch,
        rows=tuple(int(row) for row in batch.rows),
        empty=bool(batch.empty),
        computed_tokens=int(batch.computed_tokens),
        real_tokens=0 if batch.empty else int(batch.real_tokens),
    )


@dataclass(frozen=True)
class PlannedBatch:
    """What the dataset wrapper hands to the collator wrapper."""

    key: BatchKey
    examples: list[dict[str, Any]]


class _Epoch(Protocol):
    def deal_to_rank(
        self, step: int, data_parallel_size: int, accumulation_steps: int, rank: int
    ) -> Sequence[MicroBatch]: ...


class _Plan(Protocol):
    @property
    def steps_per_epoch(self) -> int: ...

    def accumulation_steps(self, data_parallel_size: int) -> int: ...

    def epoch(self, epoch: int) -> _Epoch: ...


class PlannedBatchSampler(Sampler[BatchKey]):
    """Yields the keys of one rank's micro-batches of one epoch, in the order they are trained.

    It has no `batch_size`: accelerate's BatchSamplerShard would drop batches that are smaller than it.
    It exposes itself as `.sampler`, the one place where accelerate looks for `set_epoch` once the sampler
    sits inside its wrappers (a resumed run).

    Args:
        plan: The plan of the run, the same on all ranks.
        data_parallel_rank: This rank's place among those that see different data.
        data_parallel_size: Number of such ranks: world size / (tensor x sequence x context parallel).
        accumulation_steps: Forward passes of a rank in a step; default: as few as the plan allows.

    Raises:
        ValueError: If the rank does not lie in [0, size).
    """

    def __init__(
        self,
        plan: _Plan,
        *,
        data_parallel_rank: int,
        data_parallel_size: int,
        accumulation_steps: int | None = None,
    ) -> None:
        if not 0 <= data_parallel_rank < data_parallel_size:
            raise ValueError(f"rank {data_parallel_rank} is not one of {data_parallel_size} ranks")
        self._plan = plan
        self._rank = data_parallel_rank
        self._size = data_parallel_size
        self._accumulation = accumulation_steps or plan.accumulation_steps(data_parallel_size)
        self._epoch = 0
        self._forward_epoch, self._forward_steps = 0, 0

    @property
    def sampler(self) -> PlannedBatchSampler:
        """The sampler itself, for accelerate's sake."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch that the next iteration yields."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Micro-batches an epoch: the same for every epoch and every rank."""
        return self._plan.steps_per_epoch * self._accumulation

    def fast_forward(self, epoch: int, steps: int) -> None:
        """Doesn't build the first `steps` steps of `epoch`, which a resumed run is about to skip.

        accelerate's `skip_first_batches` draws every skipped key. Those of whole steps needn't be built:
        they come without rows, and the data set refuses them should they ever reach it.
        """
        self._forward_epoch, self._forward_steps = epoch, steps

    def __iter__(self) -> Iterator[BatchKey]:
        number = self._epoch
        epoch = self._plan.epoch(number)
        unbuilt = self._forward_steps if number == self._forward_epoch else 0
        for step in range(self._plan.steps_per_epoch):
            if step < unbuilt:
                yield from (_skipped(number, step, index) for index in range(self._accumulation))
                continue
            batches = epoch.deal_to_rank(step, self._size, self._accumulation, self._rank)
            for index, batch in enumerate(batches):
                yield make_key(number, step, index, batch)


def _skipped(epoch: int, step: int, micro_batch: int) -> BatchKey:
    return BatchKey(epoch, step, micro_batch, rows=(), empty=True, computed_tokens=0, real_tokens=0)


class EvaluationBatchSampler(Sampler[BatchKey]):
    """Yields the keys of one rank's forward passes of an evaluation.

    Args:
        forwards: What `plan_evaluation` returned: one list a forward pass with one batch a rank.
        data_parallel_rank: This rank's place in those lists.
    """

    def __init__(self, forwards: Sequence[Sequence[MicroBatch]], *, data_parallel_rank: int) -> None:
        self._batches = [forward[data_parallel_rank] for forward in forwards]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[BatchKey]:
        for index, batch in enumerate(self._batches):
            yield make_key(0, 0, index, batch)


class PlannedDataset(Dataset[Any]):
    """A map-style data set that answers a `BatchKey` with the examples of its rows.

    `__len__` is that of the data set, so that what counts examples still does.
    """

    def __init__(self, dataset: Any, source: Any = None) -> None:
        """`source` is the data set with all its columns, where `dataset` has lost some."""
        self.dataset = dataset
        self.source = dataset if source is None else source

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> Any:
        return self.dataset[row]

    def __getitems__(self, key: BatchKey) -> PlannedBatch:
        rows = list(key.rows)
        if not rows:
            raise RuntimeError(f"step {key.step} of epoch {key.epoch} was to be skipped, and is read")
        fetch = getattr(self.dataset, "__getitems__", None)
        examples = fetch(rows) if callable(fetch) else [self.dataset[row] for row in rows]
        return PlannedBatch(key, examples)


class PlannedCollator:
    """Calls the task's collator, counts the batch's items and puts the key into the batch.

    Counting here costs the workers nothing and keeps the counts on the CPU, where a step's denominator
    is known without waiting for an accelerator.
    """

    def __init__(
        self,
        collate: Callable[[list[dict[str, Any]], BatchKey], dict[str, Any]],
        count: Callable[[dict[str, Any]], int],
    ) -> None:
        """`count` gives the items of a collated batch (0 where it has no labels)."""
        self._collate = collate
        self._count = count

    def __call__(self, batch: PlannedBatch) -> dict[str, Any]:
        """Collates a planned batch."""
        key = batch.key
        collated = dict(self._collate(batch.examples, key))
        if not key.empty:
            key = dataclasses.replace(key, items=self._count(collated))
        return {**collated, BATCH_KEY: key}
