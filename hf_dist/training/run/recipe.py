"""A recipe that is ready to run, and what it leaves in its output folder."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from datasets import Dataset, DatasetDict
from filelock import FileLock
from rich.console import Console
from rich.table import Table
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_dist.batching.plan import Plan
from hf_dist.batching.report import PlanReport
from hf_dist.config import DataConfig, ModelConfig, RunConfig
from hf_dist.training.engines.running import Engine, check_engine, read_engine
from hf_dist.training.models.compilation import compiled_graphs, compiles
from hf_dist.training.ranks.gather import on_main
from hf_dist.training.ranks.stopping import Interrupted
from hf_dist.training.ranks.watch import Progress, watching
from hf_dist.training.reports.callbacks import BeforeFirstStep
from hf_dist.training.run import output
from hf_dist.training.run.model_card import CARD_FILE, model_card
from hf_dist.training.run.trainer import ExactTrainer
from hf_dist.training.steps.spec import TaskSpec

logger = logging.getLogger("hf_dist")


class RecipeTask(TaskSpec, Protocol):
    """What a task adds to the Trainer's view of it: where its data, tokenizer and model come from."""

    name: ClassVar[str]
    auto_class: ClassVar[Any]
    settings_class: ClassVar[type]
    seed: int

    def __init__(self, settings: Any, *, pad_to_multiple_of: int) -> None:
        """Makes the task; `collate` pads rows to a multiple of so many tokens."""

    def load(self, data: DataConfig, model: ModelConfig) -> DatasetDict:
        """Loads and checks the raw splits."""

    def tokenizer(self, data: DataConfig, model: ModelConfig) -> PreTrainedTokenizerBase:
        """Loads or trains the tokenizer."""

    def model_config(self, tokenizer: PreTrainedTokenizerBase, model: ModelConfig) -> PretrainedConfig:
        """Makes the model's config; `load` has run."""

    def encode(
        self, raw: DatasetDict, tokenizer: PreTrainedTokenizerBase, data: DataConfig
    ) -> tuple[DatasetDict, dict[str, int]]:
        """Tokenises; returns the data sets and how many rows of each split were truncated."""

    def records(self, predictions: Sequence[Any], dataset: Any) -> Iterable[dict[str, Any]]:
        """What predictions.jsonl holds: one record an input example, in the order of the input."""

    def usage(self) -> str:
        """Lines of Python that load the saved model from the folder `FOLDER` and run it on an input."""


@dataclass(kw_only=True)
class Recipe:
    """Everything that a run is made of; `run` does what the config says.

    `lock` (rank 0) keeps other runs out of `output_dir` as long as this object lives, or until `run` is done.
    `checkpoint` is the one that training goes on from. `afresh` says that what an earlier run left in the
    folder is removed before the first step.
    """

    task: RecipeTask
    config: RunConfig
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    datasets: dict[str, Any]
    collator: Callable[[list[dict[str, Any]]], dict[str, Any]]
    plan: Plan | None
    report: PlanReport | None
    trainer: ExactTrainer
    output_dir: Path
    lock: FileLock | None = None
    checkpoint: Path | None = None
    afresh: bool = False

    def run(self) -> dict[str, Any]:
        """Trains, evaluates and predicts as the config says; returns what all_results.json holds.

        Raises:
            EngineError: If another engine runs than the one that was asked for.
        """
        loop = self.config.training
        progress = Progress()
        self.trainer.add_callback(progress)
        with watching(
            progress, rank_timeout=loop.rank_timeout_seconds, hang_timeout=loop.hang_timeout_seconds
        ):
            results = self._run()
        if self.lock is not None:
            self.lock.release()
        return results

    def _run(self) -> dict[str, Any]:
        arguments = self.trainer.args
        results: dict[str, Any] = {}
        if arguments.do_train:
            results.update(self._train())
        if arguments.do_eval:
            metrics = self._last_evaluation() or self.trainer.evaluate(self._split("validation"))
            self.trainer.save_metrics("eval", metrics, combined=False)
            results.update(metrics)
        if arguments.do_predict:
            results.update(self._predict())
        if not arguments.do_train:
            self._check_engine()
        results.update(self._facts())
        if self.trainer.is_world_process_zero():
            self._write_results(results)
        if arguments.push_to_hub:
            self.trainer.push_to_hub()
        return results

    def _split(self, name: str) -> Dataset:
        return self.datasets[name]

    def _check_engine(self) -> Engine:
        engine = read_engine(self.trainer)
        check_engine(self.config.engine.preset, engine, training_arguments=self.config.training_arguments)
        return engine

    def _train(self) -> dict[str, float]:
        trainer = self.trainer
        on_main(
            lambda: output.begin(
                self.output_dir,
                afresh=self.afresh,
                recipe=self.task.name,
                config=self.config,
                seed=trainer.args.seed,
            )
        )
        trainer.add_callback(BeforeFirstStep(self._check_engine))
        with trainer.stopping.listening():
            output_of_training = trainer.train(
                resume_from_checkpoint=None if self.checkpoint is None else str(self.checkpoint)
            )
        if trainer.stopping.signal is not None:
            if trainer.copies is not None:
                trainer.copies.finish()
            raise Interrupted(trainer.stopping.signal, trainer.state.global_step, self.output_dir)
        trainer.save_model()
        trainer.save_state()
        if trainer.copies is not None:
            trainer.copies.finish()
        planned = self.report.metrics() if self.report is not None else {}
        metrics = {**output_of_training.metrics, **trainer.throughput_metrics(), **planned}
        if compiles(self.config.training_arguments):
            metrics["compiled_graphs"] = compiled_graphs()
        trainer.save_metrics("train", metrics, combined=False)
        return metrics

    def _last_evaluation(self) -> dict[str, float] | None:
        """Scores of an evaluation that the training ended with, if the model is still the same."""
        if self.trainer.args.load_best_model_at_end:
            return None
        state = self.trainer.state
        for entry in reversed(state.log_history):
            if "eval_runtime" in entry and entry["step"] == state.global_step:
                return {name: value for name, value in entry.items() if name != "step"}
        return None

    def _predict(self) -> dict[str, float]:
        predicted = self.trainer.predict(self._split("test"))
        metrics = dict(predicted.metrics or {})
        self.trainer.save_metrics("predict", metrics, combined=False)
        if self.trainer.is_world_process_zero():
            path = self.output_dir / "predictions.jsonl"
            with path.open("w", encoding="utf-8") as lines:
                records = self.task.records(list(predicted.predictions), self._split("test"))
                for row, record in enumerate(records):
                    lines.write(json.dumps({"row": row, **record}, ensure_ascii=False) + "\n")
            logger.info("predictions: %s", path)
        return metrics

    def _write_card(self, results: dict[str, Any]) -> None:
        card = model_card(
            task=self.task.name,
            usage=self.task.usage(),
            config=self.config,
            rows={split: len(rows) for split, rows in self.datasets.items() if hasattr(rows, "__len__")},
            results=results,
            classes=getattr(self.task, "classes", ()),
            auto_class=self.task.auto_class.__name__,
        )
        (self.output_dir / CARD_FILE).write_text(card, encoding="utf-8")

    def _facts(self) -> dict[str, Any]:
        engine = read_engine(self.trainer)
        return {"world_size": engine.world_size, "engine": engine.name}

    def _write_results(self, results: dict[str, Any]) -> None:
        output.write_run_file(
            self.output_dir,
            recipe=self.task.name,
            config=self.config,
            seed=self.trainer.args.seed,
            engine=results["engine"],
            world_size=results["world_size"],
        )
        if self.trainer.args.do_train:
            self._write_card(results)
        output.write_json(self.output_dir / output.FINISHED_FILE, results)
        table = Table(show_header=False, box=None)
        for name in sorted(name for name in results if not name.startswith("plan_")):
            value = results[name]
            table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
        console = Console()
        console.print(table)
        console.print(f"results: {self.output_dir}", soft_wrap=True)
