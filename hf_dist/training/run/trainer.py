"""The Trainer whose optimizer steps do not depend on how they are split.

transformers 5.24 hands `num_items_in_batch` to models of which most ignore it, so that the gradient comes
out multiplied by world size x accumulation (transformers issue 47688). Here the loss is weighed before it
reaches the backward pass, for every kind of head.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from hf_dist.batching.plan import Plan, TokenBatching
from hf_dist.batching.sampler import BATCH_KEY, BatchKey, PlannedBatchSampler
from hf_dist.batching.stream import StreamBatches
from hf_dist.config import Normalization, OnNaN
from hf_dist.errors import ConfigError, DataError, EngineError
from hf_dist.training.checkpoints.resuming import ResumingTrainer
from hf_dist.training.ranks.stopping import StopBehindStep, Stopping
from hf_dist.training.reports.batch_log import BatchLog
from hf_dist.training.reports.counters import TokenCounters
from hf_dist.training.steps.grad_norm import gradient_norm
from hf_dist.training.steps.loss import count_or_zero, items_per_row
from hf_dist.training.steps.planned import require_rows
from hf_dist.training.steps.spec import PreparingTask, TaskSpec


class ExactTrainer(ResumingTrainer):
    """Trains by a plan; the loss of a step is (sum over items) / (items), however the step is split.

    Args:
        model: The model.
        args: Arguments; `gradient_accumulation_steps` says into how many forward passes a rank's share of
            a step is split, at least as many as the plan needs on this many ranks.
        task: What is trained.
        plan: The steps, or None for evaluation and prediction only.
        stream: Instead of a plan, micro-batches of rows that are read as the run goes.
        train_dataset: The rows that the plan numbers; some rows, to probe the loss on, beside a stream.
        max_tokens_per_device: Hard cap on the computed tokens of a forward pass in evaluation.
        pad_to_multiple_of: Rows are padded to a multiple of this many tokens (by the task's collator).
        loss_normalization: "step" divides by the step's own items; "mean" by the plan's mean items a
            step, so that over an epoch every item weighs the same although steps hold different numbers.
            Default: "mean" for token budgets and rows that hold a fixed number of items, else "step".
        class_weights: Factor of an item's loss by its class.
        on_nan: What a loss that is NaN or infinite does: "stop" raises behind the step, "skip" leaves the
            step's update out.
        dump_batches: File for one JSON line per rank and micro-batch.
        others: What `Trainer` takes by the same names.

    Attributes:
        counters: Token counts of the training so far.

    Raises:
        ConfigError: If the arguments, the plan and the normalization disagree.
        DataError: If the plan is for another number of rows than the data set holds.
    """

    # Read by `Trainer.training_step`: don't divide by the accumulation, the loss already is a share.
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        *,
        model: nn.Module,
        args: TrainingArguments,
        task: TaskSpec,
        plan: Plan | None,
        stream: StreamBatches | None = None,
        train_dataset: Any = None,
        max_tokens_per_device: int,
        pad_to_multiple_of: int = 1,
        loss_normalization: Normalization | None = None,
        class_weights: tuple[float, ...] | None = None,
        on_nan: OnNaN = "stop",
        dump_batches: str | None = None,
        **others: Any,
    ) -> None:
        self.plan = plan
        self.stream = stream
        self.counters = TokenCounters()
        self.stopping = Stopping(on_nan)
        self._sampler: PlannedBatchSampler | None = None
        self._throughput: dict[str, float] = {}
        self._mean_items = _mean_items(plan, task, loss_normalization)
        super().__init__(
            model=model,
            args=args,
            task=task,
            max_tokens_per_device=max_tokens_per_device,
            pad_to_multiple_of=pad_to_multiple_of,
            class_weights=class_weights,
            train_dataset=train_dataset,
            **others,
        )
        self.add_callback(StopBehindStep(self.stopping))
        if on_nan == "skip" and self.is_deepspeed_enabled:
            raise ConfigError(
                "--on_nan skip can't leave out a step of DeepSpeed, which applies it in its own engine; say "
                "--on_nan stop, or --preset none"
            )
        self._batch_log = self._make_batch_log(dump_batches)
        if plan is not None:
            self._check_plan(plan)

    def _make_batch_log(self, path: str | None) -> BatchLog | None:
        if path is None:
            return None
        return BatchLog(
            path,
            rank=self.data_parallel_rank,
            writes=self.args.process_index % self._replicas == 0,
            main=self.is_world_process_zero(),
            barrier=self.accelerator.wait_for_everyone,
        )

    def _check_plan(self, plan: Plan) -> None:
        least = plan.accumulation_steps(self.data_parallel_size)
        if self.args.gradient_accumulation_steps < least:
            raise ConfigError(
                f"gradient_accumulation_steps is {self.args.gradient_accumulation_steps}; the plan needs "
                f"at least {least} on {self.data_parallel_size} data-parallel ranks: derive it from the plan"
            )
        planned = plan.rows + plan.dropped
        dataset: Any = self.train_dataset
        if dataset is not None:
            require_rows(dataset, "training")
        if dataset is None or len(dataset) != planned:
            held = "no data set" if dataset is None else f"{len(dataset)} rows"
            raise DataError(f"the plan is for {planned} rows and the Trainer has {held}; build both from one")

    # ---- Batches ----

    def get_train_dataloader(self) -> DataLoader:
        """The plan's batches of this rank.

        Raises:
            DataError: If there is no plan.
        """
        if self.stream is not None:
            return self._stream_loader(self.stream)
        if self.plan is None:
            raise DataError("there is no plan to train by; build one from the training data's lengths")
        self._sampler = sampler = PlannedBatchSampler(
            self.plan,
            data_parallel_rank=self.data_parallel_rank,
            data_parallel_size=self.data_parallel_size,
            accumulation_steps=self.args.gradient_accumulation_steps,
        )
        return self._make_loader(self.train_dataset, sampler, "Training", training=True)

    def _stream_loader(self, stream: StreamBatches) -> DataLoader:
        first: Any = self.train_dataset
        _, collate = self._without_unused_columns([first[0]])
        loader: DataLoader = DataLoader(
            stream,
            batch_size=None,
            collate_fn=self._keyed(collate),  # type: ignore[arg-type]
            pin_memory=self.args.dataloader_pin_memory,
        )
        return self._prepare_loader(loader)

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Mean rows of an optimizer step (what the Trainer reports samples a second by)."""
        if self.plan is None:
            return super().get_total_train_batch_size(args)
        return max(1, round(self.plan.mean_rows_per_step))

    # ---- One step ----

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, DataLoader]:
        self._forget_evaluation_model()
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if isinstance(self.task, PreparingTask):
            self.task.prepare_for(self._network)
        self._probe_loss(self.train_dataset)
        self.counters.reset()
        if self.stream is not None and resume_from_checkpoint:
            self.stream.load_state_dict(torch.load(self._stream_file(resume_from_checkpoint)))
        if self.stream is not None and self._batch_log is not None:
            self._batch_log.start(*self.stream.position)
        if self.plan is not None and self._sampler is not None:
            position = divmod(self.state.global_step, self.plan.steps_per_epoch)
            if not self.args.ignore_data_skip:
                self._sampler.fast_forward(*position)
            if self._batch_log is not None:
                self._batch_log.start(*position)
        return prepared

    def _stream_file(self, checkpoint: str) -> Path:
        return Path(checkpoint) / f"stream_{self.data_parallel_rank}.pt"

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Saves, unless what would be saved is spoiled.

        Raises:
            NotFiniteError: If a loss of this step was no number.
        """
        # The step's own losses are agreed on in the next step's reduction only.
        self.stopping.agree(self.accelerator.reduce(self.stopping.flags(self.args.device), "sum"))
        self.stopping.refuse(self.state.global_step)
        super()._save_checkpoint(model, trial)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Clips by the norm of all gradients, which a CPU would get wrong in a large model."""
        if not self._adds_on_cpu():
            return super()._clip_grad_norm(model)
        norm = gradient_norm(model)
        nn.utils.clip_grads_with_norm_(model.parameters(), self.args.max_grad_norm, norm)
        return norm

    def _adds_on_cpu(self) -> bool:
        """Whether torch itself adds up the norm's squares, on a CPU."""
        return self.args.device.type == "cpu" and not self.is_deepspeed_enabled

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The norm of the applied gradient; one that is no number is not applied under `on_nan="skip"`."""
        if grad_norm is None and self._adds_on_cpu():
            grad_norm = gradient_norm(model)
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if self.stopping.skips(norm, half=self.args.fp16):
            for parameter in model.parameters():
                parameter.grad = None
        return norm

    def _save_rng_state(self, output_dir: str) -> None:
        """Saves the position in the stream beside the random state: each rank has its own."""
        super()._save_rng_state(output_dir)
        if self.stream is not None and self.args.process_index % self._replicas == 0:
            torch.save(self.stream.state_at(self.state.global_step), self._stream_file(output_dir))

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Any]], device: torch.device) -> Tensor:
        """Items of the whole step, over all ranks and accumulation steps (a scalar, int64)."""
        keys: list[BatchKey] = [batch[BATCH_KEY] for batch in batch_samples]
        computed = sum(key.computed_tokens for key in keys)
        counts = [sum(key.items for key in keys), sum(key.real_tokens for key in keys), computed]
        # Whether to stop travels along: one reduction a step, and all ranks stop behind the same one.
        local = self.stopping.flags(device, counts)
        total = self.accelerator.reduce(local, "sum").to(torch.int64) // self._replicas
        self.stopping.agree(total[3:])
        self.counters.add(total[1:3], computed)
        return total[0]

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Runs forward and backward; returns what the log adds up to sum / own items of the step."""
        if self._batch_log is not None:
            self._batch_log.write(inputs[BATCH_KEY])
        key: BatchKey = inputs[BATCH_KEY]
        try:
            loss = super().training_step(model, inputs, num_items_in_batch)
        except torch.OutOfMemoryError as error:
            raise self._out_of_memory(key) from error
        self.stopping.watch(loss)
        if self._mean_items is None or num_items_in_batch is None:
            return loss
        return loss * (self._mean_items / torch.as_tensor(num_items_in_batch).clamp(min=1))

    def _out_of_memory(self, key: BatchKey) -> EngineError:
        cap = self.plan.batching.max_tokens_per_device if self.plan is not None else None
        rows, tokens = len(key.rows), key.computed_tokens
        return EngineError(
            f"out of memory in step {key.step} of epoch {key.epoch}, in a forward pass of {rows} rows x "
            f"{tokens // max(rows, 1)} tokens ({tokens} computed tokens); lower --max_tokens_per_device "
            f"(now {cap}), or choose a preset that shards or offloads more"
        )

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The micro-batch's share of the step's loss, or its own mean where no count is given.

        DDP and DeepSpeed average gradients over the ranks, so the share is multiplied by their number.
        """
        batch = dict(inputs)
        key: BatchKey | None = batch.pop(BATCH_KEY, None)
        items = key.items if key is not None else count_or_zero(self.task.items, batch)
        loss, outputs = self.step_loss.mean(model, batch, items, keep_labels=self._keep_labels)
        if num_items_in_batch is not None:
            whole = self._mean_items or torch.as_tensor(num_items_in_batch).clamp(min=1)
            loss = loss * (items * self.data_parallel_size / whole)
        return (loss, outputs) if return_outputs else loss

    # ---- The end ----

    def create_model_card(self, *arguments: Any, **named: Any) -> None:
        """Keeps the card that is there (a recipe writes its own); else writes the Trainer's."""
        if not (Path(self.args.output_dir or ".") / "README.md").exists():
            super().create_model_card(*arguments, **named)

    def throughput_metrics(self) -> dict[str, float]:
        """`train_tokens_per_second`, `padding_efficiency` and `rank_imbalance` of the last training."""
        return dict(self._throughput)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs; the summary at the end of training (the one with a runtime) gets the token counts."""
        if "train_runtime" in logs:
            mine = torch.tensor([self.counters.rank_computed_tokens], device=self.args.device)
            by_rank = self.accelerator.gather(mine)[:: self._replicas]
            self._throughput = self.counters.metrics(by_rank, logs["train_runtime"])
            logs.update(self._throughput)
        super().log(logs, start_time)

    def _finalize_training(self, trial: Any, num_train_samples: int, start_time: float) -> Any:
        result = super()._finalize_training(trial, num_train_samples, start_time)
        if self._batch_log is not None:
            self._batch_log.join()
        return result


def _mean_items(plan: Plan | None, task: TaskSpec, normalization: Normalization | None) -> float | None:
    """The constant that "mean" divides by, or None for "step".

    Raises:
        ConfigError: If "mean" is asked for where a row's number of items isn't fixed.
    """
    per_row = items_per_row(task.items)
    if plan is None:
        return None
    if normalization is None:
        mean = per_row is not None and isinstance(plan.batching, TokenBatching)
        normalization = "mean" if mean else "step"
    if normalization == "step":
        return None
    if per_row is None:
        raise ConfigError(
            "loss_normalization is mean, but this task's rows hold different numbers of items; use step"
        )
    return plan.mean_rows_per_step * per_row
