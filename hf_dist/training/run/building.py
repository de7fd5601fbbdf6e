"""TrainingArguments and the Trainer of a run, made of its settings, its data and its steps."""

from __future__ import annotations

from typing import Any

from transformers import (
    EarlyStoppingCallback,
    PreTrainedModel,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainingArguments,
)

from hf_dist.config import RunConfig
from hf_dist.errors import ConfigError
from hf_dist.training.engines import lifecycle as engines
from hf_dist.training.engines.running import expected_engine
from hf_dist.training.models.compilation import CountGraphs, compiles
from hf_dist.training.reports.callbacks import TrainingProgress
from hf_dist.training.run import output
from hf_dist.training.run.data import RunData, RunSteps
from hf_dist.training.run.start import Start
from hf_dist.training.run.trainer import ExactTrainer
from hf_dist.training.steps.spec import RecipeTask


def make_task(task_class: type[RecipeTask], config: RunConfig) -> RecipeTask:
    """The task, with its settings and the seed of the run."""
    task = task_class(config.task, pad_to_multiple_of=config.batching.pad_to_multiple_of or 1)
    task.seed = config.training_arguments.get("seed", 42)
    return task


def make_arguments(task: RecipeTask, config: RunConfig, steps: RunSteps) -> TrainingArguments:
    """TrainingArguments as the user, the plan and the engine want them, and the engine's process group.

    DeepSpeed keeps the accumulation that they hold, and zero.Init reads a global that they set: they come
    after the plan and before the model.

    Raises:
        ConfigError: If TrainingArguments refuse them.
    """
    own = engines.training_argument_overrides(
        config.engine.preset, config.training_arguments, optim_from_json=config.engine.optim_from_json
    )
    values = {**config.training_arguments, **steps.arguments, **own}
    if config.training.early_stopping_patience or values.get("load_best_model_at_end"):
        values.setdefault("metric_for_best_model", task.best_metric)
    # The folder is chosen once all ranks can talk to each other (`output.choose`).
    values.setdefault("output_dir", str(output.RUNS_FOLDER))
    values["logging_nan_inf_filter"] = False
    try:
        arguments = TrainingArguments(**values)
    except (ValueError, TypeError, ImportError) as error:
        raise ConfigError(f"TrainingArguments refuse these settings: {error}") from error
    engines.start_communication(config.engine.preset)
    return arguments


def make_trainer(
    task: RecipeTask,
    config: RunConfig,
    data: RunData,
    steps: RunSteps,
    arguments: TrainingArguments,
    *,
    start: Start,
    model: PreTrainedModel,
) -> ExactTrainer:
    """The Trainer, on the engine that the preset names.

    Raises:
        HfDistError: If it can't train so.
    """
    loop, batching = config.training, config.batching
    trainer = ExactTrainer(
        model=model,
        args=arguments,
        task=task,
        plan=steps.plan,
        stream=steps.stream,
        # Of a stream these are its first rows, which show what the loss is.
        train_dataset=data.splits["train"] if arguments.do_train else None,
        eval_dataset=data.splits.get("validation"),
        processing_class=data.tokenizer,
        max_tokens_per_device=batching.max_tokens_per_device,
        pad_to_multiple_of=batching.pad_to_multiple_of or 1,
        loss_normalization=loop.loss_normalization,
        dump_batches=batching.dump_batches,
        on_nan=loop.on_nan,
        run_facts=start.facts,
        copies=start.copies,
        engine_name=expected_engine(config.engine.preset).name,
        whole_model=start.builder.build_whole,
        built_from=start.checkpoint,
        callbacks=_stopping(config),
    )
    engines.tune_ddp(trainer)
    _report_progress(trainer, config.training_arguments)
    return trainer


def _stopping(config: RunConfig) -> list[TrainerCallback]:
    loop = config.training
    if loop.early_stopping_patience is None:
        return []
    return [EarlyStoppingCallback(loop.early_stopping_patience, loop.early_stopping_threshold)]


def _report_progress(trainer: ExactTrainer, arguments: Any) -> None:
    # Ours replaces both: the Trainer picks one of the two by disable_tqdm (transformers 5.24).
    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(TrainingProgress(trainer.counters))
    if compiles(arguments):
        trainer.add_callback(CountGraphs())
