"""Token-budget batches from a stream, whose lengths are known only as its rows come.

A buffer of rows replaces the plan: a micro-batch is taken from it around the row that has waited longest,
with the neighbours in length that fill the cap best. So a row waits for at most as many micro-batches as
the buffer has rows, and every rank's micro-batches cost nearly the cap.

What differs from a plan: each rank reads its own share of the stream, and a share that ends starts again;
so all ranks run exactly `max_steps` steps without asking each other, and the steps hold other rows on
another number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from datasets import IterableDataset as StreamedDataset
from datasets.distributed import split_dataset_by_node
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from hf_dist.batching.sampler import BatchKey, PlannedBatch
from hf_dist.batching.steps.budget import TokenBatching
from hf_dist.batching.steps.cost import padded
from hf_dist.errors import CheckpointError, ConfigError, DataError

BUFFER_ROWS = 4096
# Steps whose beginning can be returned to.
_REMEMBERED = 3


def _tokens(example: Mapping[str, Any]) -> int:
    return len(example["input_ids"])


class StreamBatches(IterableDataset[PlannedBatch]):
    """The micro-batches of one rank: `max_steps` x `accumulation_steps` of them, no more and no fewer.

    Give it to a DataLoader with `batch_size=None` and no workers, and a `PlannedCollator`. A key's `rows`
    count the rows of this rank in the order they came; its `epoch` is the pass over the stream that the
    newest row in the buffer is from.

    Args:
        stream: rows with `input_ids`; not yet split by rank. Shuffle it (`stream.shuffle`) beforehand; each
            pass is shuffled anew.
        batching: the budget; `window` is the number of rows in the buffer (default: 4,096), held in memory.
        max_steps: optimizer steps of the run.
        data_parallel_rank: this rank among those that see different rows.
        data_parallel_size: number of such ranks.
        length: tokens of a row.

    Attributes:
        accumulation_steps: micro-batches of a rank in a step.
        dropped: rows left out so far by `too_long="drop"`.

    Raises:
        ConfigError: there is no `max_steps`.
        DataError: it is no stream; while iterating: this rank's share holds no row, or a row is too long.
    """

    def __init__(
        self,
        stream: StreamedDataset,
        batching: TokenBatching,
        *,
        max_steps: int | None,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        length: Callable[[Mapping[str, Any]], int] = _tokens,
    ) -> None:
        if max_steps is None or max_steps < 1:
            raise ConfigError(
                f"--max_steps is {max_steps}; a stream has no length, so a run needs it: give at least 1"
            )
        if not isinstance(stream, StreamedDataset):
            raise DataError(
                f"a {type(stream).__name__} is no stream; expected a datasets.IterableDataset (load_dataset "
                "with streaming=True, or Dataset.to_iterable_dataset), whose position can be saved"
            )
        self._whole = stream
        self._batching = batching
        self._max_steps = max_steps
        self._rank = data_parallel_rank
        self._size = data_parallel_size
        self._length = length
        self._buffer_rows = batching.window or BUFFER_ROWS
        self.accumulation_steps = max(1, -(-batching.micro_batches_per_step // data_parallel_size))
        self.dropped = 0
        self._stream = split_dataset_by_node(stream, data_parallel_rank, data_parallel_size)
        self._done = 0
        self._pass = 0
        self._arrived = 0
        self._arrived_before_pass = 0
        self._buffer: list[tuple[int, int, Any]] = []
        self._before_step: dict[int, dict[str, Any]] = {}

    def __len__(self) -> int:
        """Micro-batches of the whole run."""
        return self._max_steps * self.accumulation_steps

    def __iter__(self) -> Iterator[PlannedBatch]:
        if get_worker_info() is not None:
            raise ConfigError(
                "a stream is read by the training process; workers would run ahead of what is trained, and a "
                "checkpoint would lose rows: set --dataloader_num_workers 0"
            )
        rows = self._rows()
        while self._done < len(self):
            while len(self._buffer) < self._buffer_rows:
                self._buffer.append(next(rows))
            if self._done % self.accumulation_steps == 0:
                self._remember(self._done // self.accumulation_steps)
            batch = self._take()
            # Counted before it is handed out: the state is that after this micro-batch.
            self._done += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on after the last micro-batch handed out, the buffered rows included."""
        return {
            "stream": self._stream.state_dict() if self._arrived else None,
            "buffer": list(self._buffer),
            "done": self._done,
            "pass": self._pass,
            "arrived": self._arrived,
            "arrived_before_pass": self._arrived_before_pass,
            "dropped": self.dropped,
            "rank": self._rank,
            "size": self._size,
        }

    @property
    def position(self) -> tuple[int, int]:
        """(pass over the stream, optimizer step) of the next micro-batch."""
        return self._pass, self._done // self.accumulation_steps

    def _remember(self, step: int) -> None:
        self._before_step[step] = self.state_dict()
        for old in [known for known in self._before_step if known <= step - _REMEMBERED]:
            del self._before_step[old]

    def state_at(self, step: int) -> dict[str, Any]:
        """The state before the first micro-batch of optimizer step `step`, one of the last few.

        A loader reads ahead of what is trained (accelerate 1.15: one batch), so a checkpoint must not take
        the newest state.
        """
        if self._done == step * self.accumulation_steps:
            return self.state_dict()
        return self._before_step[step]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was taken; the stream is not read again from its start.

        Raises:
            CheckpointError: the state is of another rank or number of ranks.
        """
        if (state["rank"], state["size"]) != (self._rank, self._size):
            raise CheckpointError(
                f"the stream's state is of rank {state['rank']} of {state['size']}, this is rank "
                f"{self._rank} of {self._size}; a stream resumes on as many ranks as before: start so "
                "many, or start afresh"
            )
        self._stream = split_dataset_by_node(self._whole, self._rank, self._size)
        self._stream.set_epoch(state["pass"])
        if state["stream"] is not None:
            self._stream.load_state_dict(state["stream"])
        self._buffer = list(state["buffer"])
        self._done = state["done"]
        self._pass = state["pass"]
        self._arrived = state["arrived"]
        self._arrived_before_pass = state["arrived_before_pass"]
        self.dropped = state["dropped"]

    def _rows(self) -> Iterator[tuple[int, int, Any]]:
        """(number, tokens, row) of this rank's rows, pass after pass."""
        cap = self._batching.max_tokens_per_device
        while True:
            self._stream.set_epoch(self._pass)
            for example in self._stream:
                number = self._arrived
                self._arrived += 1
                tokens = self._length(example)
                if self._padded(tokens) > cap and self._batching.too_long != "alone":
                    if self._batching.too_long == "error":
                        raise DataError(
                            f"row {number} of rank {self._rank} has {tokens} tokens, more than "
                            f"--max_tokens_per_device {cap}; raise it, truncate (--max_length), or say "
                            "--too_long alone or drop"
                        )
                    self.dropped += 1
                    continue
                yield number, tokens, example
            if self._arrived - self._arrived_before_pass == 0 or self._arrived == self.dropped:
                raise DataError(
                    f"rank {self._rank} of {self._size} gets no row of the stream; give a stream with more "
                    "rows, or start fewer processes"
                )
            self._pass += 1
            self._arrived_before_pass = self._arrived

    def _padded(self, tokens: int) -> int:
        return int(padded(np.array([tokens]), self._batching.pad_to_multiple_of)[0])

    def _take(self) -> PlannedBatch:
        """Takes the micro-batch around the row that has waited longest out of the buffer."""
        tokens = np.array([tokens for _, tokens, _ in self._buffer])
        lengths = padded(tokens, self._batching.pad_to_multiple_of).astype(np.int64)
        order = np.argsort(-lengths, kind="stable")
        oldest = int(np.flatnonzero(order == 0)[0])
        first, rows = best_run(lengths[order], oldest, self._batching.tokens_per_micro_batch)
        chosen = order[first : first + rows]
        step, index = divmod(self._done, self.accumulation_steps)
        key = BatchKey(
            epoch=self._pass,
            step=step,
            micro_batch=index,
            rows=tuple(self._buffer[place][0] for place in chosen),
            empty=False,
            computed_tokens=rows * int(lengths[order[first]]),
            real_tokens=int(tokens[chosen].sum()),
        )
        examples = [self._buffer[place][2] for place in chosen]
        gone = set(chosen.tolist())
        self._buffer = [row for place, row in enumerate(self._buffer) if place not in gone]
        return PlannedBatch(key, examples)


def best_run(falling: NDArray[np.int64], wanted: int, cap: int) -> tuple[int, int]:
    """The run of neighbours that holds a wanted row and the most tokens under a cap.

    Args:
        falling: padded lengths in falling order.
        wanted: place of the row that must be in the run.
        cap: most rows x longest row; a row that exceeds it alone is a run of its own.

    Returns:
        (first place, rows).
    """
    firsts = np.arange(wanted + 1)
    rows = np.minimum(cap // falling[: wanted + 1], len(falling) - firsts)
    holds = firsts + rows > wanted
    if not holds.any():
        return wanted, 1
    firsts, rows = firsts[holds], rows[holds]
    sums = np.concatenate([[0], np.cumsum(falling)])
    # Of equals the last: it starts nearest to the wanted row, where lengths are most alike.
    best = len(firsts) - 1 - int(np.argmax((sums[firsts + rows] - sums[firsts])[::-1]))
    return int(firsts[best]), int(rows[best])
