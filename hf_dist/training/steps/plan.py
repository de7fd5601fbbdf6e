"""From settings and lengths to the plan, and from the plan to the Trainer's own words."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import datasets
import numpy as np

from hf_dist.batching.lengths import lengths_of
from hf_dist.batching.plan import ExampleBatching, Plan, TokenBatching
from hf_dist.config import BatchingConfig, RunConfig
from hf_dist.errors import ConfigError, DataError

# TrainingArguments' own defaults (transformers 5.24), spelled out since they decide examples_per_step.
_DEFAULT_BATCH_SIZE = 8
_DEFAULT_ACCUMULATION = 1
# A run logs at most so often by default, and at least 20 times (or every step).
_MOST_LOGGED = 50


def _batching(
    config: BatchingConfig, arguments: Mapping[str, Any], data_parallel_size: int
) -> TokenBatching | ExampleBatching:
    if config.batching == "tokens":
        return TokenBatching(
            max_tokens_per_device=config.max_tokens_per_device,
            tokens_per_step=config.tokens_per_step or config.max_tokens_per_device,
            pad_to_multiple_of=config.pad_to_multiple_of or 1,
            window=config.window,
            too_long=config.too_long,
        )
    examples_per_step = (
        arguments.get("per_device_train_batch_size", _DEFAULT_BATCH_SIZE)
        * arguments.get("gradient_accumulation_steps", _DEFAULT_ACCUMULATION)
        * data_parallel_size
    )
    return ExampleBatching(
        examples_per_step=examples_per_step,
        max_tokens_per_device=config.max_tokens_per_device,
        pad_to_multiple_of=config.pad_to_multiple_of or 1,
        window=config.window,
        too_long=config.too_long,
    )


def row_lengths(dataset: Any, *, with_labels: bool) -> np.ndarray:
    """Tokens of each row, shape (rows,), or (rows, 2) for encoder and decoder.

    Args:
        dataset: Rows with `input_ids`, or a data set that knows its `lengths` (packs).
        with_labels: Whether the labels are a sequence of their own, which a decoder runs over.

    Raises:
        DataError: If the rows are not tokenised.
    """
    known = getattr(dataset, "lengths", None)
    if known is not None:
        return np.asarray(known)
    columns = ["input_ids", "labels"] if with_labels else ["input_ids"]
    if isinstance(dataset, datasets.Dataset):
        found = [lengths_of(dataset, name) for name in columns if name in dataset.column_names]
    else:
        found = [
            np.array([len(dataset[row][name]) for row in range(len(dataset))], dtype=np.int64)
            for name in columns
            if len(dataset) and name in dataset[0]
        ]
    if not found:
        raise DataError(f"the data set has no column {columns[0]} (or no rows); tokenise it first")
    return found[0] if len(found) == 1 else np.stack(found, axis=1)


def make_plan(
    config: RunConfig, lengths: np.ndarray, *, data_parallel_size: int, attention_weight: float
) -> Plan:
    """Builds the plan of a run.

    Args:
        config: The run's config.
        lengths: Tokens of each training row, shape (rows,) or (rows, 2) for encoder and decoder.
        data_parallel_size: Ranks that see different data; only `--batching examples` depends on it.
        attention_weight: Weight of the quadratic term of a row's cost.

    Raises:
        DataError: If there is no row to train on, or one is longer than the cap.
        ConfigError: If the budgets exclude each other.
    """
    if len(lengths) == 0:
        raise DataError("the training data holds no rows; give a data set with at least one")
    arguments = config.training_arguments
    seed = arguments.get("data_seed")
    return Plan.build(
        lengths,
        _batching(config.batching, arguments, data_parallel_size),
        seed=arguments.get("seed", 42) if seed is None else seed,
        attention_weight=attention_weight,
        probe_longest_first=config.batching.probe_longest_first,
    )


def accumulation_steps(plan: Plan, config: RunConfig, data_parallel_size: int) -> int:
    """Forward passes of a rank in a step: as few as the plan allows, or as many as the user asks for.

    Raises:
        ConfigError: If that is fewer than the cap allows.
    """
    least = plan.accumulation_steps(data_parallel_size)
    asked = config.batching.micro_batches_per_rank
    if asked is not None and asked < least:
        raise ConfigError(
            f"--micro_batches_per_rank is {asked}; a step of this plan needs {least} on {data_parallel_size} "
            "ranks to stay under --max_tokens_per_device"
        )
    return asked or least


def planned_arguments(plan: Plan, config: RunConfig, data_parallel_size: int) -> dict[str, Any]:
    """The TrainingArguments that follow from the plan.

    `per_device_train_batch_size` does not size any batch here; it is the mean number of rows of a
    micro-batch, so that what the Trainer, DeepSpeed and trackers report of it is right.
    """
    accumulation = accumulation_steps(plan, config, data_parallel_size)
    rows = max(1, round(plan.mean_rows_per_step / (accumulation * data_parallel_size)))
    return {"gradient_accumulation_steps": accumulation, "per_device_train_batch_size": rows}


def total_steps(plan: Plan | None, arguments: Mapping[str, Any], default_epochs: float = 3.0) -> int:
    """Optimizer steps of the whole run, as the Trainer counts them (a stream, without a plan, needs a count).

    Raises:
        ConfigError: If there are to be none.
    """
    max_steps = int(arguments.get("max_steps", -1))
    if max_steps > 0:
        return max_steps
    epochs = float(arguments.get("num_train_epochs", default_epochs))
    if epochs <= 0:
        raise ConfigError(f"--num_train_epochs is {epochs}; it must be positive")
    if plan is None:
        raise ConfigError("a stream has no length, so a run needs --max_steps")
    return int(np.ceil(epochs * plan.steps_per_epoch))


def default_logging_steps(steps: int) -> int:
    """Steps between two logged ones: the least of 1, 2, 5, 10, 20, 50 ... that logs at most 50 times."""
    unit = 1
    while True:
        for digit in (1, 2, 5):
            if digit * unit * _MOST_LOGGED >= steps:
                return digit * unit
        unit *= 10


def with_logging_steps(config: RunConfig, steps: int) -> RunConfig:
    """The config with its `logging_steps`: the user's, or a default that follows from the run's length.

    Args:
        config: The run's config.
        steps: Optimizer steps of the whole run.
    """
    arguments = config.training_arguments
    by_steps = arguments.get("logging_strategy", "steps") == "steps"
    if arguments.get("logging_steps") is not None or not by_steps:
        return config
    chosen = {**arguments, "logging_steps": default_logging_steps(steps)}
    paces = [chosen.get(name) for name in ("eval_strategy", "save_strategy")]
    if (
        chosen.get("load_best_model_at_end")
        and paces == ["steps", "steps"]
        and not {"eval_steps", "save_steps"} & chosen.keys()
    ):
        # Evaluations come with the log then, and only what was evaluated can be the best: transformers wants
        # a multiple, as near its own 500 as there is one.
        chosen["save_steps"] = -(-500 // chosen["logging_steps"]) * chosen["logging_steps"]
    return dataclasses.replace(config, training_arguments=chosen)
