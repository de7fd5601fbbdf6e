"""The data of a run, and the steps that are made of it: rows are read and tokenised, then planned.

No process group exists yet; each rank does the same (the cache is behind a file lock).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from hf_dist.batching.plan import Plan
from hf_dist.batching.report import PlanReport
from hf_dist.batching.steps.cost import attention_weight
from hf_dist.batching.stream import StreamBatches
from hf_dist.config import RunConfig
from hf_dist.errors import DataError
from hf_dist.tasks.items import TokenItems
from hf_dist.training.models.initial import set_dropout
from hf_dist.training.run.finished import Continuation
from hf_dist.training.steps.plan import make_plan, planned_arguments, row_lengths, total_steps
from hf_dist.training.steps.spec import PackingTask, RecipeTask
from hf_dist.training.steps.stream import check_streaming, make_stream

logger = logging.getLogger("hf_dist")


@dataclass(frozen=True, kw_only=True)
class RunData:
    """What the model is given.

    Attributes:
        tokenizer: The one that made the tokens.
        model_config: Of the model that takes them (its classes are those of the data).
        splits: Tokenised rows by split; of a stream that is trained on, the first rows.
    """

    tokenizer: PreTrainedTokenizerBase
    model_config: PretrainedConfig
    splits: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RunSteps:
    """The optimizer steps of a training: planned, cut from a stream as they come, or none at all.

    Attributes:
        plan: Of a training on rows that are all known.
        stream: Of a training on rows that come one by one.
        report: What the plan is like.
        arguments: What it makes of TrainingArguments.
    """

    plan: Plan | None = None
    stream: StreamBatches | None = None
    report: PlanReport | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


def load_data(task: RecipeTask, config: RunConfig) -> RunData:
    """Reads, checks and tokenises what the config names.

    Raises:
        DataError: If it can't be read, or a split that is asked for isn't there.
        ConfigError: If it is to be streamed and can't be.
    """
    if config.data.streaming:
        check_streaming(type(task), config)
    raw = task.load(config.data, config.model)
    for mode, split in (("do_train", "train"), ("do_eval", "validation"), ("do_predict", "test")):
        if config.training_arguments.get(mode) and split not in raw:
            raise DataError(f"--{mode} needs {split} data and there is none; name it with --{split}_file")
    tokenizer = task.tokenizer(config.data, config.model)
    model_config = task.model_config(tokenizer, config.model)
    if config.model.dropout is not None:
        set_dropout(model_config, config.model.dropout)
    encoded, truncated = task.encode(raw, tokenizer, config.data)
    for split, count in truncated.items():
        if count:
            logger.info(
                "%s: %d of %d examples truncated to --max_length %d tokens",
                split,
                count,
                len(encoded[split]),
                config.data.max_length,
            )
    return RunData(tokenizer=tokenizer, model_config=model_config, splits=dict(encoded))


def plan_steps(
    task: RecipeTask, config: RunConfig, data: RunData, *, world_size: int, goes_on: Continuation | None
) -> RunSteps:
    """Plans the training, if there is one; a task that packs puts its packs in place of the rows.

    Raises:
        ConfigError: If the steps can't be cut as the settings ask.
        CheckpointError: If the run that goes on has trained them all.
    """
    if not config.training_arguments.get("do_train"):
        return RunSteps()
    if config.data.streaming:
        return _streamed(task, config, data, world_size)
    steps = _planned(task, config, data, world_size)
    if goes_on is not None:
        goes_on.check_total(total_steps(steps.plan, config.training_arguments))
    return steps


def _streamed(task: RecipeTask, config: RunConfig, data: RunData, world_size: int) -> RunSteps:
    stream = make_stream(
        task,
        config,
        data.tokenizer,
        data_parallel_rank=int(os.environ.get("RANK", "0")),
        data_parallel_size=world_size,
    )
    arguments = {
        "gradient_accumulation_steps": stream.accumulation_steps,
        "per_device_train_batch_size": 1,
        # The stream itself goes on where the checkpoint was taken.
        "ignore_data_skip": True,
    }
    return RunSteps(stream=stream, arguments=arguments)


def _planned(task: RecipeTask, config: RunConfig, data: RunData, world_size: int) -> RunSteps:
    splits, model_config = data.splits, data.model_config
    if isinstance(task, PackingTask):
        splits["train"] = task.pack(splits["train"], config.batching, seed=task.seed) or splits["train"]
    both = getattr(model_config, "is_encoder_decoder", False) and isinstance(task.items, TokenItems)
    plan = make_plan(
        config,
        row_lengths(splits["train"], with_labels=both),
        data_parallel_size=world_size,
        attention_weight=attention_weight(model_config),
    )
    if plan.dropped:
        logger.info("%d training examples are longer than the cap and were dropped", plan.dropped)
    arguments = planned_arguments(plan, config, world_size)
    report = PlanReport.of(plan, world_size, arguments["gradient_accumulation_steps"])
    if not config.training.dry_run:
        logger.info("\n".join(report.lines()))
    return RunSteps(plan=plan, report=report, arguments=arguments)
