"""What training and evaluation in planned batches have in common: loaders, ranks, the loss."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import datasets
import numpy as np
import torch
from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import seed_worker

from hf_dist.batching.sampler import (
    BatchKey,
    EvaluationBatchSampler,
    PlannedBatchSampler,
    PlannedCollator,
    PlannedDataset,
)
from hf_dist.errors import ConfigError, DataError, EngineError
from hf_dist.tasks.items import TokenItems
from hf_dist.training.ranks.gather import on_main
from hf_dist.training.steps.loss import (
    Probe,
    Reshaping,
    StepLoss,
    class_weight_tuple,
    count_or_zero,
    without_padding,
)
from hf_dist.training.steps.plan import row_lengths
from hf_dist.training.steps.spec import RandomCollate, TaskSpec

logger = logging.getLogger("hf_dist")

_PROBED_ROWS = 64


class PlannedTrainer(Trainer):
    """A Trainer whose batches come from a plan; what training and evaluation have in common.

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

    def _set_signature_columns_if_needed(self) -> None:
        """Keeps the columns that the task's collator needs beside those that the model's forward takes."""
        if self._signature_columns is None:
            super()._set_signature_columns_if_needed()
            known: Any = self._signature_columns
            known.extend(getattr(self.task, "extra_columns", ()))

    def _without_unused_columns(
        self, dataset: Any, description: str | None = None
    ) -> tuple[Any, Callable[[list[dict[str, Any]], BatchKey], dict[str, Any]]]:
        """The data set and a collator that between them leave out what the model doesn't take."""
        if isinstance(dataset, datasets.Dataset):
            kept = self._remove_unused_columns(dataset, description=description)
            return kept, functools.partial(_collate, self.task, list)
        trim: Any = self._get_collator_with_removed_columns(list, description=description)
        return dataset, functools.partial(_collate, self.task, trim)

    def _make_loader(
        self,
        dataset: Any,
        sampler: PlannedBatchSampler | EvaluationBatchSampler,
        description: str,
        *,
        training: bool = False,
    ) -> DataLoader:
        kept, collate = self._without_unused_columns(dataset, description)
        seeds = functools.partial(
            seed_worker, num_workers=self.args.dataloader_num_workers, rank=self.args.process_index
        )
        loader: DataLoader = DataLoader(
            PlannedDataset(kept, source=dataset),
            # torch types a batch as a list of indices; ours is the key that the data set answers to.
            batch_sampler=sampler,  # type: ignore[arg-type]
            collate_fn=self._keyed(collate),  # type: ignore[arg-type]
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
            persistent_workers=self.args.dataloader_persistent_workers,
            multiprocessing_context=self.args.dataloader_multiprocessing_context,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            in_order=self.args.dataloader_in_order,
            worker_init_fn=seeds if training else None,
            # A loader draws its workers' seed from the global random state each time it is iterated: dropout
            # would depend on how often a run has evaluated.
            generator=torch.Generator().manual_seed(self.args.seed),
        )
        return self._prepare_loader(loader)

    def _keyed(self, collate: Callable[[list[dict[str, Any]], BatchKey], dict[str, Any]]) -> PlannedCollator:
        """The collator with the batch's key and its count of items."""
        return PlannedCollator(collate, functools.partial(count_or_zero, self.task.items))

    def _prepare_loader(self, loader: DataLoader) -> DataLoader:
        """Moves batches to the device.

        `accelerator.prepare` would shard the batches among the ranks once more (accelerate 1.15); as the one
        process of one it leaves them alone.
        """
        return prepare_data_loader(
            loader,
            device=self.accelerator.device,
            num_processes=1,
            process_index=0,
            put_on_device=True,
            rng_types=None,
            # Of a stream rank 0's batches would be sent to all others.
            dispatch_batches=False,
            # What a batch in pinned memory is for; accelerate's own default is to wait for each copy.
            non_blocking=self.accelerator.non_blocking or self._pins(loader),
        )

    def _pins(self, loader: DataLoader) -> bool:
        """Whether the loader's batches lie in memory that a GPU copies from by itself."""
        return loader.pin_memory and self.accelerator.device.type == "cuda"

    def _lengths(self, dataset: Any) -> np.ndarray:
        """Tokens of each row, shape (rows,), or (rows, 2) for encoder and decoder."""
        return row_lengths(dataset, with_labels=self._keep_labels and isinstance(self.task.items, TokenItems))

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
        kept, collate = self._without_unused_columns(dataset)
        for row in range(min(len(kept), _PROBED_ROWS)):
            key = BatchKey(0, 0, 0, rows=(row,), empty=False, computed_tokens=0, real_tokens=0)
            batch = dict(collate([kept[row]], key))
            if count_or_zero(self.task.items, batch):
                return without_padding(self._prepare_inputs(batch))
        return None


def _collate(
    task: TaskSpec,
    trim: Callable[[list[dict[str, Any]]], list[dict[str, Any]]],
    examples: list[dict[str, Any]],
    key: BatchKey,
) -> dict[str, Any]:
    kept = trim(examples)
    if isinstance(task, RandomCollate):
        return task.collate_rows(kept, epoch=key.epoch, rows=key.rows)
    return task.collate(kept)


def require_rows(dataset: Any, description: str) -> None:
    """Refuses a data set that can't be planned.

    Raises:
        DataError: If it is a stream, or holds no rows.
    """
    if isinstance(dataset, (IterableDataset, datasets.IterableDataset)):
        raise DataError(f"the {description} data is a stream; expected a data set with a length")
    if len(dataset) == 0:
        raise DataError(f"the {description} data holds no rows; give at least one")


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
