"""Evaluation in bucketed batches: every row once, losses weighed by items, on any number of ranks.

The stock loop repeats a batch's mean loss by a constant batch size and gathers padded logits, which is
wrong for batches of different sizes and fails on uneven ones (transformers 5.24).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

import datasets
import numpy as np
import torch
from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainingArguments
from transformers.integrations.deepspeed import deepspeed_init
from transformers.trainer_utils import EvalLoopOutput, seed_worker

from hf_dist.batching.lengths import lengths_of
from hf_dist.batching.plan import plan_evaluation
from hf_dist.batching.sampler import (
    BATCH_KEY,
    BatchKey,
    EvaluationBatchSampler,
    PlannedBatchSampler,
    PlannedCollator,
    PlannedDataset,
)
from hf_dist.errors import ConfigError, DataError, EngineError
from hf_dist.tasks.items import TokenItems
from hf_dist.training.gather import gather_rows, on_main
from hf_dist.training.loss import (
    Probe,
    Reshaping,
    StepLoss,
    class_weight_tuple,
    count_or_zero,
    has_labels,
    without_padding,
)
from hf_dist.training.spec import TaskSpec

logger = logging.getLogger("hf_dist")

_PROBED_ROWS = 64


class EvaluatingTrainer(Trainer):
    """A Trainer that evaluates and predicts in bucketed batches; `ExactTrainer` adds the training.

    Args:
        model: The model.
        args: Arguments; the ones about batch sizes of evaluation have no effect.
        task: What is trained.
        max_tokens_per_device: Hard cap on the computed tokens of a forward pass in evaluation.
        pad_to_multiple_of: Rows are padded to a multiple of this many tokens (by the task's collator).
        class_weights: Factor of an item's loss by its class.
        others: What `Trainer` takes by the same names: data sets, tokenizer, callbacks, optimizers.

    Raises:
        ConfigError: For arguments that would undo what is promised here.
        EngineError: For parallelism that splits sequences, or several GPUs in one process.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        args: TrainingArguments,
        task: TaskSpec,
        max_tokens_per_device: int,
        pad_to_multiple_of: int = 1,
        class_weights: tuple[float, ...] | None = None,
        **others: Any,
    ) -> None:
        self.task = task
        self._max_tokens_per_device = max_tokens_per_device
        self._pad_to_multiple_of = pad_to_multiple_of
        self.step_loss = StepLoss(
            task.items,
            Reshaping(
                label_smoothing=args.label_smoothing_factor, class_weights=class_weight_tuple(class_weights)
            ),
        )
        self._eval_loaders: dict[int, DataLoader] = {}
        self._forwards = 0
        super().__init__(model=model, args=args, data_collator=task.collate, **others)
        _check_arguments(args)
        if getattr(self._base_config, "return_dict", True) is False:
            raise ConfigError("the model's config says return_dict=False; set it to True")
        if self.args.n_gpu > 1:
            raise EngineError(
                f"one process sees {self.args.n_gpu} GPUs; start one process a GPU "
                f"(torchrun --nproc_per_node {self.args.n_gpu} ...) or set CUDA_VISIBLE_DEVICES to one"
            )
        if self.get_sp_size() * self.get_cp_size() > 1:
            raise EngineError("sequence and context parallelism are not supported; set their sizes to 1")

    # ---- Facts ----

    @property
    def _network(self) -> nn.Module:
        assert self.model is not None
        return self.model

    @property
    def _base_config(self) -> Any:
        return getattr(self.model, "config", None)

    @property
    def _keep_labels(self) -> bool:
        """An encoder-decoder makes its decoder's input of the labels."""
        return bool(getattr(self._base_config, "is_encoder_decoder", False))

    @property
    def _replicas(self) -> int:
        """Ranks that see the same data."""
        return self.get_tp_size() * self.get_sp_size() * self.get_cp_size()

    @property
    def data_parallel_size(self) -> int:
        """Ranks that see different data: world size / (tensor x sequence x context parallel)."""
        return max(1, self.args.world_size // self._replicas)

    @property
    def data_parallel_rank(self) -> int:
        """This process's place among them (tensor-parallel ranks are neighbours)."""
        return self.args.process_index // self._replicas

    # ---- Batches ----

    def _make_loader(
        self,
        dataset: Any,
        sampler: PlannedBatchSampler | EvaluationBatchSampler,
        description: str,
        *,
        training: bool = False,
    ) -> DataLoader:
        if isinstance(dataset, (IterableDataset, datasets.IterableDataset)):
            raise DataError(f"the {description.lower()} data is a stream; expected a data set with a length")
        collate: Any = self.task.collate
        kept = dataset
        if isinstance(dataset, datasets.Dataset):
            kept = self._remove_unused_columns(dataset, description=description)
        else:
            collate = self._get_collator_with_removed_columns(collate, description=description)
        seeds = functools.partial(
            seed_worker, num_workers=self.args.dataloader_num_workers, rank=self.args.process_index
        )
        loader: DataLoader = DataLoader(
            PlannedDataset(kept, source=dataset),
            # torch types a batch as a list of indices; ours is the key that the data set answers to.
            batch_sampler=sampler,  # type: ignore[arg-type]
            collate_fn=PlannedCollator(collate, functools.partial(count_or_zero, self.task.items)),  # type: ignore[arg-type]
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
            persistent_workers=self.args.dataloader_persistent_workers,
            multiprocessing_context=self.args.dataloader_multiprocessing_context,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            in_order=self.args.dataloader_in_order,
            worker_init_fn=seeds if training else None,
        )
        # `accelerator.prepare` would shard the batches among the ranks once more (accelerate 1.15); as
        # the one process of one it leaves them alone.
        return prepare_data_loader(
            loader,
            device=self.accelerator.device,
            num_processes=1,
            process_index=0,
            put_on_device=True,
            rng_types=None,
            non_blocking=self.accelerator.non_blocking,
        )

    def _lengths(self, dataset: Any) -> np.ndarray:
        """Tokens of each row, shape (rows,), or (rows, 2) for encoder and decoder."""
        columns = ["input_ids"]
        if self._keep_labels and isinstance(self.task.items, TokenItems):
            columns.append("labels")
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

    def _evaluation_loader(self, dataset: Any, description: str) -> DataLoader:
        known = self._eval_loaders.get(id(dataset))
        if known is not None:
            return known
        if len(dataset) == 0:
            raise DataError(f"the {description.lower()} data holds no rows; give at least one")
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

    # ---- Loss ----

    def _probe_loss(self, dataset: Any) -> None:
        """Finds out, once and on all ranks together, what the model's own loss is."""
        if self.step_loss.found is not None:
            return
        row = self._row_with_items(dataset)
        if row is None:
            logger.warning(
                "none of the first %d rows has a label that counts: the loss is computed from the logits",
                _PROBED_ROWS,
            )
            return
        with torch.random.fork_rng(devices=[]):
            found = self.step_loss.probe(self._network, row, takes_count=self.model_accepts_loss_kwargs)
        # The ranks ran the same row; rank 0 decides all the same.
        self.step_loss.found = found = Probe(*on_main(lambda: (found.mode, found.extras)))
        if self.is_world_process_zero():
            logger.info("loss: %s", found.mode.value)

    def _row_with_items(self, dataset: Any) -> dict[str, Tensor] | None:
        kept, collate = dataset, self.task.collate
        if isinstance(dataset, datasets.Dataset):
            kept = self._remove_unused_columns(dataset)
        else:
            collate = self._get_collator_with_removed_columns(collate)
        for row in range(min(len(kept), _PROBED_ROWS)):
            batch = dict(collate([kept[row]]))
            if count_or_zero(self.task.items, batch):
                return without_padding(self._prepare_inputs(batch))
        return None

    # ---- Evaluation ----

    def _prepare_evaluation_model(self) -> nn.Module:
        """Readies the model where nothing was trained before; gives the one that runs."""
        if self.is_deepspeed_enabled and self.deepspeed is None:
            plugin = self.accelerator.state.deepspeed_plugin
            if plugin.zero_stage == 3:
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
        model = self._prepare_evaluation_model()
        self._probe_loss(planned.source)
        if not self.is_in_train and (self.args.fp16_full_eval or self.args.bf16_full_eval):
            dtype = torch.float16 if self.args.fp16_full_eval else torch.bfloat16
            model = model.to(dtype=dtype, device=self.args.device)
        model.eval()
        # Schedule-free optimizers evaluate at averaged weights.
        if callable(switch := getattr(self.optimizer, "eval", None)):
            switch()
        self.callback_handler.eval_dataloader = dataloader

        predicts = not self.args.prediction_loss_only
        predictions: list[tuple[int, Any]] = []
        # Sum of the items' losses, items, and batches without labels.
        sums = torch.zeros(3, dtype=torch.float64, device=self.args.device)
        self._forwards = 0
        for inputs in dataloader:
            batch: dict[str, Any] = self._prepare_inputs(inputs)
            key: BatchKey = batch.pop(BATCH_KEY)
            mean, outputs = self._evaluate_batch(model, batch, key)
            if mean is None:
                sums[2] += 1
            elif key.items:
                sums += torch.stack(
                    [mean.double() * key.items, sums.new_tensor(key.items), sums.new_zeros(())]
                )
            if predicts and not key.filler:
                predicted = self.task.predict(outputs, batch)
                predictions += zip(key.rows, predicted, strict=True)
            self._forwards += 1
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)

        loss_sum, items, unlabelled = self.accelerator.reduce(sums, "sum").tolist()
        rows = len(planned)
        in_order: list[Any] | None = None
        metrics: dict[str, float] = {}
        if predicts:
            in_order = gather_rows(predictions, rows, everywhere=description == "Prediction")
            if not unlabelled:
                metrics = dict(on_main(lambda: self.task.score(in_order or [], planned.source)))
        if items:
            metrics["loss"] = loss_sum / items
        named = {f"{metric_key_prefix}_{name}": float(value) for name, value in metrics.items()}
        predictions_in_order: Any = in_order
        return EvalLoopOutput(
            predictions=predictions_in_order, label_ids=None, metrics=named, num_samples=rows
        )

    @torch.no_grad()
    def _evaluate_batch(
        self, model: nn.Module, batch: Mapping[str, Any], key: BatchKey
    ) -> tuple[Tensor | None, Any]:
        with self.compute_loss_context_manager():
            if not has_labels(self.task.items, batch):
                return None, model(**batch)
            return self.step_loss.mean(model, batch, key.items, keep_labels=self._keep_labels)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs; the steps a second of an evaluation are its forward passes, not a constant batch size's."""
        for name in [name for name in logs if name.endswith("_steps_per_second")]:
            prefix = name.removesuffix("_steps_per_second")
            if prefix != "train" and f"{prefix}_runtime" in logs:
                logs[name] = round(self._forwards / max(logs[f"{prefix}_runtime"], 1e-9), 3)
        super().log(logs, start_time)


def _check_arguments(args: TrainingArguments) -> None:
    """Refuses what would re-batch the plan behind its back."""
    accelerator: Any = args.accelerator_config
    refused = [
        name
        for name, is_set in (
            ("auto_find_batch_size", args.auto_find_batch_size),
            ("dataloader_drop_last", args.dataloader_drop_last),
            ("batch_eval_metrics", args.batch_eval_metrics),
            ("accelerator_config.split_batches", accelerator.split_batches),
            ("accelerator_config.dispatch_batches", bool(accelerator.dispatch_batches)),
        )
        if is_set
    ]
    if refused:
        raise ConfigError(f"{', '.join(refused)} set; batches come from the plan: leave it at its default")
