"""From a task and a config to a trained model: the order of a run.

config -> engine's environment -> data and tokens (no process group yet) -> plan -> TrainingArguments
-> model -> Trainer -> train. TrainingArguments come after the plan, since DeepSpeed keeps the
accumulation it was built with, and before the model, since zero.Init reads a global that they set.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import transformers
import yaml
from filelock import FileLock
from transformers import (
    EarlyStoppingCallback,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainingArguments,
)

from hf_dist.batching.plan import Plan
from hf_dist.batching.report import PlanReport
from hf_dist.batching.steps.cost import attention_weight
from hf_dist.batching.stream import StreamBatches
from hf_dist.config import RunConfig
from hf_dist.errors import ConfigError, DataError, exit_on_error
from hf_dist.tasks.items import TokenItems
from hf_dist.training.adapters import lora
from hf_dist.training.checkpoints.facts import run_facts
from hf_dist.training.engines import lifecycle as engines
from hf_dist.training.engines.conflicts import refuse_conflicts
from hf_dist.training.engines.running import expected_engine
from hf_dist.training.flags.parsing import parse
from hf_dist.training.models.compilation import CountGraphs, compiles, prepare_compilation
from hf_dist.training.models.initial import set_dropout
from hf_dist.training.models.partitioned import whole_numel
from hf_dist.training.ranks.gather import on_main
from hf_dist.training.ranks.stopping import Interrupted
from hf_dist.training.reports.callbacks import TrainingProgress
from hf_dist.training.run import output
from hf_dist.training.run.finished import Continuation, FinishedRun, look_at_folder, starts_afresh
from hf_dist.training.run.recipe import Recipe, RecipeTask
from hf_dist.training.run.start import ModelBuilder, choose_checkpoint
from hf_dist.training.run.trainer import ExactTrainer
from hf_dist.training.steps.plan import (
    make_plan,
    planned_arguments,
    row_lengths,
    total_steps,
    with_logging_steps,
)
from hf_dist.training.steps.spec import PackingTask
from hf_dist.training.steps.stream import check_streaming, make_stream

logger = logging.getLogger("hf_dist")


def _log_on_rank_0() -> None:
    """Our own log goes to stderr from rank 0, and progress bars only to a terminal."""
    logger.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.ERROR)
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    if not sys.stderr.isatty() or os.environ.get("RANK", "0") != "0":
        transformers.utils.logging.disable_progress_bar()
        datasets.disable_progress_bars()


def _resolve(config: RunConfig) -> RunConfig:
    """Fills in the defaults that depend on other settings.

    Without --do_train, --do_eval and --do_predict a recipe trains and evaluates.
    """
    config = lora.with_base(config)
    arguments = dict(config.training_arguments)
    batching = config.batching
    if batching.pad_to_multiple_of is None:
        # Tensor cores want multiples of 8 in half precision, and a compiled model few different lengths;
        # elsewhere rounding up is only padding.
        half = arguments.get("bf16") or arguments.get("fp16")
        rounds = half or compiles(arguments)
        batching = dataclasses.replace(batching, pad_to_multiple_of=8 if rounds else 1)
    if batching.batching == "tokens" and batching.tokens_per_step is None:
        batching = dataclasses.replace(batching, tokens_per_step=batching.max_tokens_per_device)
    if not any(arguments.get(name) for name in ("do_train", "do_eval", "do_predict")):
        arguments.update(do_train=True, do_eval=True)
    if not arguments.get("do_train") and config.model.model_name_or_path is None:
        raise ConfigError(
            "--do_eval and --do_predict alone need a trained model; name it with --model_name_or_path"
        )
    if not arguments.get("do_train"):
        # Nothing is trained, so nothing is evaluated or saved on the way.
        arguments.update(eval_strategy="no", save_strategy="no", load_best_model_at_end=False)
    return dataclasses.replace(config, batching=batching, training_arguments=arguments)


def _make_arguments(config: RunConfig, extra: Mapping[str, Any], best_metric: str) -> TrainingArguments:
    values = {**config.training_arguments, **extra}
    if config.training.early_stopping_patience or values.get("load_best_model_at_end"):
        values.setdefault("metric_for_best_model", best_metric)
    # The folder is chosen once all ranks can talk to each other (`_choose_output_dir`).
    values.setdefault("output_dir", str(output.RUNS_FOLDER))
    values["logging_nan_inf_filter"] = False
    try:
        return TrainingArguments(**values)
    except (ValueError, TypeError, ImportError) as error:
        raise ConfigError(f"TrainingArguments refuse these settings: {error}") from error


def _choose_output_dir(
    config: RunConfig, name: str, arguments: TrainingArguments
) -> tuple[Path, FileLock | None]:
    """Rank 0 claims the folder of the run and tells the others.

    It is the one the user named; or that of an unfinished run with the same settings, which goes on; or the
    next free one.
    """
    locks: list[FileLock] = []

    def claim() -> str:
        named = config.training_arguments.get("output_dir")
        folder = Path(named) if named is not None else None
        if folder is None and arguments.do_train and config.training.resume == "auto":
            folder = output.unfinished_run(name, config)
            if folder is not None:
                logger.info("%s was not finished and has the same settings: it goes on", folder)
        if folder is None:
            folder = output.claim_next_run(name)
        folder.mkdir(parents=True, exist_ok=True)
        locks.append(output.lock(folder))
        return str(folder)

    arguments.output_dir = on_main(claim)
    return Path(arguments.output_dir), (locks[0] if locks else None)


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """What is known before TrainingArguments, model and process group exist."""

    task: RecipeTask
    config: RunConfig
    tokenizer: PreTrainedTokenizerBase
    model_config: PretrainedConfig
    datasets: dict[str, Any]
    plan: Plan | None
    stream: StreamBatches | None
    planned_arguments: dict[str, Any]
    report: PlanReport | None
    world_size: int
    finished: Continuation | None


def _prepare(task_class: type[RecipeTask], config: RunConfig) -> _Prepared | FinishedRun:
    """Checks the settings, loads and tokenises the data and plans the steps.

    Of a run that is finished and has the same settings nothing is loaded.
    """
    _log_on_rank_0()
    for note in config.notes:
        logger.info("%s", note)
    config = _resolve(config)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    finished = look_at_folder(task_class.name, config, world_size)
    if isinstance(finished, FinishedRun):
        return finished
    task = task_class(config.task, pad_to_multiple_of=config.batching.pad_to_multiple_of or 1)
    arguments = config.training_arguments
    task.seed = arguments.get("seed", 42)
    engines.prepare_environment(config.engine.preset)
    if compiles(arguments):
        prepare_compilation()
    streams = config.data.streaming and bool(arguments.get("do_train"))
    if streams:
        check_streaming(task_class, config)
    elif config.data.streaming:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, streaming=False))
    raw = task.load(config.data, config.model)
    for mode, split in (("do_train", "train"), ("do_eval", "validation"), ("do_predict", "test")):
        if arguments.get(mode) and split not in raw:
            raise DataError(f"--{mode} needs {split} data and there is none; name it with --{split}_file")
    tokenizer = task.tokenizer(config.data, config.model)
    model_config = task.model_config(tokenizer, config.model)
    if config.model.dropout is not None:
        set_dropout(model_config, config.model.dropout)
    splits = _encode(task, raw, tokenizer, config)
    plan, stream, report, planned = None, None, None, {}
    if streams:
        stream = make_stream(
            task,
            config,
            tokenizer,
            data_parallel_rank=int(os.environ.get("RANK", "0")),
            data_parallel_size=world_size,
        )
        planned = {
            "gradient_accumulation_steps": stream.accumulation_steps,
            "per_device_train_batch_size": 1,
            # The stream itself goes on where the checkpoint was taken.
            "ignore_data_skip": True,
        }
    elif arguments.get("do_train"):
        plan, report, planned = _plan(task, config, splits, model_config, world_size)
        if finished is not None:
            finished.check_total(total_steps(plan, arguments))
    if plan is not None or stream is not None:
        config = with_logging_steps(config, total_steps(plan, arguments))
    refuse_conflicts(
        config.engine.preset, {**arguments, **planned}, optim_from_json=config.engine.optim_from_json
    )
    return _Prepared(
        task=task,
        config=config,
        tokenizer=tokenizer,
        model_config=model_config,
        datasets=splits,
        plan=plan,
        stream=stream,
        planned_arguments=planned,
        report=report,
        world_size=world_size,
        finished=finished,
    )


def _encode(
    task: RecipeTask, raw: Any, tokenizer: PreTrainedTokenizerBase, config: RunConfig
) -> dict[str, Any]:
    """The tokenised splits; says how many rows were truncated."""
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
    return dict(encoded)


def _plan(
    task: RecipeTask,
    config: RunConfig,
    splits: dict[str, Any],
    model_config: PretrainedConfig,
    world_size: int,
) -> tuple[Plan, PlanReport, dict[str, Any]]:
    """Plans the training rows (packed ones, if the task packs: `splits` is changed); says what came of it."""
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
    planned = planned_arguments(plan, config, world_size)
    report = PlanReport.of(plan, world_size, planned["gradient_accumulation_steps"])
    if not config.training.dry_run:
        logger.info("\n".join(report.lines()))
    return plan, report, planned


def _print_dry_run(prepared: _Prepared) -> None:
    config, plan, world_size = prepared.config, prepared.plan, prepared.world_size
    print(yaml.safe_dump(config.as_dict(), sort_keys=False).rstrip())
    print()
    if plan is not None and prepared.report is not None:
        steps = total_steps(plan, config.training_arguments)
        print(f"steps: {steps} ({plan.steps_per_epoch} an epoch)")
        print("\n".join(prepared.report.lines()))
    print(f"engine: {expected_engine(config.engine.preset).name} ({world_size} process(es))")


def _assemble(prepared: _Prepared) -> Recipe:
    """Builds TrainingArguments, then the model, then the Trainer (see the module's docstring)."""
    task, config, plan = prepared.task, prepared.config, prepared.plan
    extra = dict(prepared.planned_arguments)
    preset = config.engine.preset
    extra.update(
        engines.training_argument_overrides(
            preset, config.training_arguments, optim_from_json=config.engine.optim_from_json
        )
    )
    arguments = _make_arguments(config, extra, task.best_metric)
    engines.start_communication(preset)
    output_dir, lock = _choose_output_dir(config, task.name, arguments)

    facts = {
        **run_facts(prepared.model_config, prepared.tokenizer, prepared.datasets.get("train"), plan),
        "adapter": lora.facts(config.peft),
    }
    checkpoint, copies = None, None
    if arguments.do_train:
        checkpoint, copies = choose_checkpoint(
            config.training,
            output_dir,
            facts,
            arguments.save_total_limit,
            afresh=starts_afresh(config),
            finished=prepared.finished,
        )
    builder = ModelBuilder(
        config=config,
        model_config=prepared.model_config,
        auto_class=task.auto_class,
        tokens=len(prepared.tokenizer),
        seed=arguments.seed,
        trains=arguments.do_train,
    )
    model = builder.build(checkpoint)
    lora.prepare(model, config, output_dir=output_dir, trains=arguments.do_train)
    engines.check_space(preset, sum(map(whole_numel, model.parameters())))
    loop = config.training
    callbacks: list[TrainerCallback] = []
    if loop.early_stopping_patience is not None:
        callbacks.append(EarlyStoppingCallback(loop.early_stopping_patience, loop.early_stopping_threshold))
    trainer = ExactTrainer(
        model=model,
        args=arguments,
        task=task,
        plan=plan,
        stream=prepared.stream,
        # Of a stream these are its first rows, which show what the loss is.
        train_dataset=prepared.datasets["train"] if arguments.do_train else None,
        eval_dataset=prepared.datasets.get("validation"),
        processing_class=prepared.tokenizer,
        max_tokens_per_device=config.batching.max_tokens_per_device,
        pad_to_multiple_of=config.batching.pad_to_multiple_of or 1,
        loss_normalization=loop.loss_normalization,
        dump_batches=config.batching.dump_batches,
        on_nan=loop.on_nan,
        run_facts=facts,
        copies=copies,
        engine_name=expected_engine(preset).name,
        whole_model=builder.build_whole,
        built_from=checkpoint,
        callbacks=callbacks,
    )
    engines.tune_ddp(trainer)
    # Ours replaces both: the Trainer picks one of the two by disable_tqdm (transformers 5.24).
    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(TrainingProgress(trainer.counters))
    if compiles(config.training_arguments):
        trainer.add_callback(CountGraphs())
    return Recipe(
        task=task,
        config=config,
        model=model,
        tokenizer=prepared.tokenizer,
        datasets=prepared.datasets,
        collator=task.collate,
        plan=plan,
        report=prepared.report,
        trainer=trainer,
        output_dir=output_dir,
        lock=lock,
        checkpoint=checkpoint,
        afresh=starts_afresh(config),
    )


def assemble(task: type[RecipeTask], config: RunConfig) -> Recipe | FinishedRun:
    """Builds everything a run needs, up to the Trainer; nothing is trained.

    Where a run of the same settings was finished in the folder nothing is built, and `run` gives its results.

    Raises:
        HfDistError: For bad settings, data or engines, before any of them is half used.
    """
    prepared = _prepare(task, config)
    return prepared if isinstance(prepared, FinishedRun) else _assemble(prepared)


def run_recipe(
    task: type[RecipeTask],
    *,
    description: str,
    defaults: Mapping[str, Any],
    argv: Sequence[str] | None = None,
) -> None:
    """The `main` of a recipe: parse, assemble, run; errors a user can act on become one line."""

    def main() -> None:
        words = sys.argv[1:] if argv is None else argv
        config = parse(
            words,
            recipe=task.name,
            description=description,
            defaults=defaults,
            settings_class=task.settings_class,
        )
        prepared = _prepare(task, config)
        if isinstance(prepared, FinishedRun):
            prepared.run()
            return
        if config.training.dry_run:
            if os.environ.get("RANK", "0") == "0":
                _print_dry_run(prepared)
            return
        try:
            _assemble(prepared).run()
        except Interrupted:
            engines.shutdown()
            raise
        engines.shutdown()

    exit_on_error(main)
