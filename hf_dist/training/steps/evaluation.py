"""Evaluation in bucketed batches: every row once, losses weighed by items, on any number of ranks.

The stock loop repeats a batch's mean loss by a constant batch size and gathers padded logits, which is
wrong for batches of different sizes and fails on uneven ones (transformers 5.24).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.integrations.deepspeed import deepspeed_init
from transformers.trainer_utils import EvalLoopOutput

from hf_dist.batching.plan import plan_evaluation
from hf_dist.batching.sampler import (
    BATCH_KEY,
    BatchKey,
    EvaluationBatchSampler,
    PlannedDataset,
)
from hf_dist.data.progress import life_signs
from hf_dist.errors import DataError
from hf_dist.training.ranks.gather import gather_rows, on_main
from hf_dist.training.steps.loss import has_labels
from hf_dist.training.steps.planned import PlannedTrainer, require_rows
from hf_dist.training.steps.spec import GeneratingTask


class EvaluatingTrainer(PlannedTrainer):
    """A Trainer that evaluates and predicts in bucketed batches; `ExactTrainer` adds the training."""

    def __init__(self, **arguments: Any) -> None:
        """Takes what `PlannedTrainer` takes."""
        self._eval_loaders: dict[int, DataLoader] = {}
        self._forwards = 0
        super().__init__(**arguments)

    # ---- Batches ----

    def _evaluation_loader(self, dataset: Any, description: str) -> DataLoader:
        known = self._eval_loaders.get(id(dataset))
        if known is not None:
            return known
        require_rows(dataset, description.lower())
        forwards = plan_evaluation(
            self._lengths(dataset),
            self._max_tokens_per_device,
            self._pad_to_multiple_of,
            self.data_parallel_size,
        )
        sampler = EvaluationBatchSampler(forwards, data_parallel_rank=self.data_parallel_rank)
        loader = self._make_loader(dataset, sampler, description)
        if self.args.dataloader_persistent_workers:
            # The loader holds its data set, so the id stays taken as long as the entry lives.
            self._eval_loaders[id(dataset)] = loader
        return loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """The planned batches of a data set (or of the one of that name)."""
        chosen: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(eval_dataset, str) and isinstance(self.eval_dataset, dict):
            chosen = self.eval_dataset[eval_dataset]
        if chosen is None:
            raise DataError("there is no data to evaluate on; give an eval_dataset")
        return self._evaluation_loader(chosen, "Evaluation")

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """The planned batches of a data set to predict."""
        return self._evaluation_loader(test_dataset, "Prediction")

    # ---- Evaluation ----

    def _prepare_evaluation_model(self) -> nn.Module:
        """Readies the model where nothing was trained before; gives the one that runs."""
        if self.is_deepspeed_enabled and self.deepspeed is None:
            if self._partitioned:
                deepspeed_init(self, num_training_steps=0, inference=True)
                self.model_wrapped = self.deepspeed = self.accelerator.prepare(self.model)
            else:
                # Up to ZeRO-2 every rank holds the whole model: it can run without an engine.
                self._network.to(self.args.device)
            return self._network
        model = self._wrap_model(self._network, training=False)
        if not self.is_deepspeed_enabled and not self.accelerator._models and model is self.model:
            if self.is_fsdp_enabled:
                self.model = self.model_wrapped = model = self.accelerator.prepare(model)
            else:
                model = self.accelerator.prepare_model(model, evaluation_mode=True)
        return model

    def _forget_evaluation_model(self) -> None:
        """Undoes `_prepare_evaluation_model` before a training.

        accelerate 1.15 marks the model it readied for evaluation as prepared, and then doesn't wrap it
        in DDP: every rank would train on its own batches only. Under ZeRO-3 the evaluation left an engine
        without an optimizer.
        """
        network = self._network
        if self.deepspeed is not None and self.optimizer is None:
            self.deepspeed = None
            self.model_wrapped = network
        elif getattr(network, "_is_accelerate_prepared", False) and self.model_wrapped is network:
            self.accelerator.unwrap_model(network, keep_fp32_wrapper=False)
            del network._is_accelerate_prepared

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Runs the model over planned batches.

        Args:
            dataloader: From `get_eval_dataloader` or `get_test_dataloader`.
            description: "Prediction" brings the predictions to all ranks; else only the scores travel.
            prediction_loss_only: Ignored: `args.prediction_loss_only` decides.
            ignore_keys: Ignored: the task picks what it needs from the outputs.
            metric_key_prefix: Put before the names of the metrics.

        Returns:
            Predictions in row order (or None), the scores, and the number of rows.
        """
        planned = dataloader.dataset
        if not isinstance(planned, PlannedDataset):
            raise TypeError("the loader does not come from get_eval_dataloader or get_test_dataloader")
        model = self._model_to_evaluate(planned.source)
        self.callback_handler.eval_dataloader = dataloader

        predicts = not self.args.prediction_loss_only
        predictions: list[tuple[int, Any]] = []
        # Sum of the items' losses, items, and batches without labels.
        sums = torch.zeros(3, dtype=torch.float64, device=self.args.device)
        self._forwards = 0
        rows = len(planned)

        def describe() -> str:
            done = f"{self._forwards:,} of {len(dataloader):,} forward passes"
            return f"{description.lower()} of {rows:,} rows: {done}"

        with life_signs(describe):
            for inputs in dataloader:
                batch: dict[str, Any] = self._prepare_inputs(inputs)
                key: BatchKey = batch.pop(BATCH_KEY)
                mean, outputs = self._evaluate_batch(model, batch, key)
                if mean is None:
                    sums[2] += 1
                elif key.items:
                    sums += torch.stack(
                        [mean.double() * key.items, sums.new_full((), key.items), sums.new_zeros(())]
                    )
                if predicts and (predicted := self._predict_batch(outputs, batch, key)) is not None:
                    predictions += zip(key.rows, predicted, strict=True)
                self._forwards += 1
                self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)

        in_order: Any = None
        if predicts:
            in_order = gather_rows(predictions, rows, everywhere=description == "Prediction")
        metrics = self._scores(sums, in_order, planned.source, predicts=predicts)
        named = {f"{metric_key_prefix}_{name}": float(value) for name, value in metrics.items()}
        return EvalLoopOutput(predictions=in_order, label_ids=None, metrics=named, num_samples=rows)

    def _model_to_evaluate(self, source: Any) -> nn.Module:
        """The model, in the state and the precision that it is evaluated in."""
        model = self._prepare_evaluation_model()
        self._probe_loss(source)
        if not self.is_in_train and (self.args.fp16_full_eval or self.args.bf16_full_eval):
            dtype = torch.float16 if self.args.fp16_full_eval else torch.bfloat16
            model = model.to(dtype=dtype, device=self.args.device)
        model.eval()
        # Schedule-free optimizers evaluate at averaged weights.
        if callable(switch := getattr(self.optimizer, "eval", None)):
            switch()
        return model

    def _scores(
        self, sums: Tensor, in_order: list[Any] | None, source: Any, *, predicts: bool
    ) -> dict[str, float]:
        """Scores and mean loss over all ranks; rank 0 alone needs the predictions.

        Args:
            sums: This rank's, shape (3,): of the items' losses, of items, of batches without labels.
            in_order: The predictions of all rows, in their order.
            source: The rows.
            predicts: Whether there are predictions to score.
        """
        loss_sum, items, unlabelled = self.accelerator.reduce(sums, "sum").tolist()
        metrics: dict[str, float] = {}
        if predicts and not unlabelled:
            metrics = dict(on_main(lambda: self.task.score(in_order or [], source)))
        if items:
            metrics["loss"] = loss_sum / items
        return metrics

    @torch.no_grad()
    def _evaluate_batch(
        self, model: nn.Module, batch: Mapping[str, Any], key: BatchKey
    ) -> tuple[Tensor | None, Any]:
        with self.compute_loss_context_manager():
            if not has_labels(self.task.items, batch):
                # A decoder needs labels to run; without them there is only what it generates.
                return None, None if self._generator(batch) else model(**batch)
            return self.step_loss.mean(model, batch, key.items, keep_labels=self._keep_labels)

    @torch.no_grad()
    def _predict_batch(self, outputs: Any, batch: Mapping[str, Any], key: BatchKey) -> list[Any] | None:
        """The rows' predictions; None for an empty micro-batch."""
        if (generator := self._generator(batch)) is not None:
            with self.compute_loss_context_manager():
                generated = generator.generate(self._network, batch, synced=self._partitioned)
            return None if key.empty else generated
        return None if key.empty else self.task.predict(outputs, batch)

    def _generator(self, batch: Mapping[str, Any]) -> GeneratingTask | None:
        """The task, if it generates what it predicts of this batch."""
        task = self.task
        return task if isinstance(task, GeneratingTask) and task.generates(batch) else None

    @property
    def _partitioned(self) -> bool:
        """Whether each rank holds only a part of the parameters, so that all must run together."""
        return self.is_deepspeed_enabled and self.accelerator.state.deepspeed_plugin.zero_stage == 3

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs; the steps a second of an evaluation are its forward passes, not a constant batch size's."""
        for name in [name for name in logs if name.endswith("_steps_per_second")]:
            prefix = name.removesuffix("_steps_per_second")
            if prefix != "train" and f"{prefix}_runtime" in logs:
                logs[name] = round(self._forwards / max(logs[f"{prefix}_runtime"], 1e-9), 3)
        super().log(logs, start_time)
