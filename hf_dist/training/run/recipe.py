"""A recipe that is ready to run: what it is made of, and training, evaluation and prediction in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from filelock import FileLock
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_dist.batching.plan import Plan
from hf_dist.batching.report import PlanReport
from hf_dist.config import RunConfig
from hf_dist.training.engines.running import Engine, check_engine, read_engine
from hf_dist.training.models.compilation import compiled_graphs, compiles
from hf_dist.training.ranks.gather import on_main
from hf_dist.training.ranks.stopping import Interrupted
from hf_dist.training.ranks.watch import Progress, watching
from hf_dist.training.reports.callbacks import BeforeFirstStep
from hf_dist.training.run import output
from hf_dist.training.run.results import write_predictions, write_results
from hf_dist.training.run.trainer import ExactTrainer
from hf_dist.training.steps.spec import RecipeTask


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
            results.update(self._evaluate())
        if arguments.do_predict:
            results.update(self._predict())
        if not arguments.do_train:
            self._check_engine()
        results.update(self._facts())
        if self.trainer.is_world_process_zero():
            write_results(
                self.task,
                self.config,
                results,
                datasets=self.datasets,
                output_dir=self.output_dir,
                seed=arguments.seed,
                trained=arguments.do_train,
            )
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

    def _evaluate(self) -> dict[str, float]:
        metrics = self._last_evaluation() or self.trainer.evaluate(self._split("validation"))
        self.trainer.save_metrics("eval", metrics, combined=False)
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
            write_predictions(self.task, list(predicted.predictions), self._split("test"), self.output_dir)
        return metrics

    def _facts(self) -> dict[str, Any]:
        engine = read_engine(self.trainer)
        return {"world_size": engine.world_size, "engine": engine.name}
