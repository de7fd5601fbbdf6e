"""Training rows that are read, converted and tokenised while the run trains."""

from __future__ import annotations

import copy
import logging
from typing import Any

from datasets import Dataset, DatasetDict, IterableDataset

from hf_dist.batching.plan import TokenBatching
from hf_dist.batching.stream import StreamBatches
from hf_dist.config import DataConfig, RunConfig
from hf_dist.data.loading.streams import load_stream
from hf_dist.data.tokenizing import in_memory
from hf_dist.errors import ConfigError

logger = logging.getLogger("hf_dist")

_CHUNK = 256


class _Encode:
    """The function of `IterableDataset.map`: a chunk of raw rows -> encoded rows."""

    def __init__(self, task: Any, tokenizer: Any, data: DataConfig, features: Any) -> None:
        # What the task knows of the run (its baseline) is made from the first rows, not from each chunk.
        self._task = copy.copy(task)
        self._tokenizer = tokenizer
        self._data = data
        self._features = features

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        rows = self._task.convert(Dataset.from_dict(batch, features=self._features), "train")
        with in_memory():
            encoded, _ = self._task.encode(DatasetDict(train=rows), self._tokenizer, self._data)
        return encoded["train"][:]


def encoded_stream(task: Any, tokenizer: Any, data: DataConfig) -> IterableDataset:
    """The stream of encoded training rows; `task` has loaded and encoded its first rows."""
    stream, _ = load_stream(data, task.builtin_splits, train_only=True, json_columns=task.json_columns)
    return stream.map(
        _Encode(task, tokenizer, data, stream.features),
        batched=True,
        batch_size=_CHUNK,
        remove_columns=stream.column_names,
    )


def check_streaming(task: type[Any], config: RunConfig) -> None:
    """Refuses what a stream can't do, before anything is read.

    Raises:
        ConfigError: If so.
    """
    arguments = config.training_arguments
    if not hasattr(task, "convert"):
        raise ConfigError(f"--streaming: {task.name} needs its data as a whole; leave the flag out")
    if int(arguments.get("max_steps", -1)) < 1:
        raise ConfigError("--streaming: a stream has no length, so a run needs --max_steps")
    if config.batching.batching != "tokens":
        raise ConfigError("--streaming conflicts with --batching examples; drop one of them")
    if arguments.get("dataloader_num_workers"):
        raise ConfigError(
            "--streaming conflicts with --dataloader_num_workers: workers would run ahead of what is trained "
            "and a checkpoint would lose rows; drop it"
        )
    if getattr(config.task, "packing", False):
        raise ConfigError("--streaming conflicts with --packing, which needs all lengths; drop one of them")
    if config.batching.micro_batches_per_rank or config.batching.probe_longest_first:
        raise ConfigError(
            "--streaming conflicts with --micro_batches_per_rank and --probe_longest_first, which need a "
            "plan; drop them"
        )


def make_stream(
    task: Any, config: RunConfig, tokenizer: Any, *, data_parallel_rank: int, data_parallel_size: int
) -> StreamBatches:
    """The micro-batches of one rank.

    Raises:
        HfDistError: For data that can't be read, or a budget that makes no sense.
    """
    batching = config.batching
    stream = StreamBatches(
        encoded_stream(task, tokenizer, config.data),
        TokenBatching(
            max_tokens_per_device=batching.max_tokens_per_device,
            tokens_per_step=batching.tokens_per_step or batching.max_tokens_per_device,
            pad_to_multiple_of=batching.pad_to_multiple_of or 1,
            window=batching.window,
            too_long=batching.too_long,
        ),
        max_steps=int(config.training_arguments["max_steps"]),
        data_parallel_rank=data_parallel_rank,
        data_parallel_size=data_parallel_size,
    )
    logger.info(
        "stream: %d steps of %d micro-batches on each of %d ranks; rows come in the order of the data",
        int(config.training_arguments["max_steps"]),
        stream.accumulation_steps,
        data_parallel_size,
    )
    return stream
