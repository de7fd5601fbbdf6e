"""One optimizer step of a head, by the stock Trainer and by ours, on one process or two.

Started by exactness.py through torchrun:

    exactness_runs.py ddp  FOLDER    every head of FOLDER/heads.json, DDP
    exactness_runs.py zeroN FOLDER   the same through DeepSpeed's ZeRO stage N, ours only

Rank 0 leaves FOLDER/<engine>.json: head -> split -> [stock's error, ours] (or the error's text).
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import exactness_heads as heads
import numpy as np
import torch
import transformers
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_dist.batching.plan import MicroBatch
from hf_dist.training.run.trainer import ExactTrainer

EMPTY = "2x3 with an empty micro-batch"
# Rows of a step by (accumulation index, rank), as uneven as 16 rows allow.
SIZES = {
    "1x1": [[16]],
    "1x4": [[3], [7], [1], [5]],
    "2x1": [[5, 11]],
    "2x4": [[3, 2], [4, 1], [1, 2], [2, 1]],
    # Other ways to split the step, for ours only: a rank without rows runs an empty micro-batch.
    EMPTY: [[3, 2], [5, 1], [5, 0]],
}
LEARNING_RATE = 1000.0
"""So large that a parameter's update is its gradient, hardly rounded (SGD without momentum)."""


def cut(split: str) -> list[list[list[int]]]:
    """Row numbers by accumulation index and rank."""
    numbers = iter(range(heads.ROWS))
    return [[[next(numbers) for _ in range(size)] for size in ranks] for ranks in SIZES[split]]


class OneStep:
    """A plan of one step that is cut as a split says."""

    steps_per_epoch = 1
    rows = heads.ROWS
    dropped = 0
    batching = None
    mean_rows_per_step = float(heads.ROWS)

    def __init__(self, split: str, lengths: np.ndarray) -> None:
        self._slots = cut(split)
        self._lengths = lengths

    def accumulation_steps(self, data_parallel_size: int) -> int:
        return len(self._slots)

    def epoch(self, epoch: int) -> OneStep:
        return self

    def deal_to_rank(self, step: int, size: int, accumulation_steps: int, rank: int) -> list[MicroBatch]:
        return [self._batch(ranks[rank]) for ranks in self._slots]

    def _batch(self, rows: list[int]) -> MicroBatch:
        held = np.array(rows or [int(self._lengths.argmin())], dtype=np.int64)
        lengths = self._lengths[held]
        return MicroBatch(
            rows=held,
            empty=not rows,
            computed_tokens=int(len(held) * lengths.max()),
            real_tokens=int(lengths.sum()) if rows else 0,
        )


class StockTrainer(Trainer):
    """The stock Trainer on given micro-batches; everything about the loss is as it comes."""

    batches: list[list[int]]

    def get_train_dataloader(self) -> DataLoader:
        batches: Any = self.batches
        return DataLoader(self.train_dataset, batch_sampler=batches, collate_fn=self.data_collator)


class KeepGradient(TrainerCallback):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.gradient = heads.flat_gradient(model)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def arguments(accumulation: int, folder: str, **more: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        max_steps=1,
        gradient_accumulation_steps=accumulation,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=1e9,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
        log_level="error",
        **more,
    )


def stock_gradient(head: heads.Head, split: str, folder: str) -> torch.Tensor:
    slots, kept = cut(split), KeepGradient()
    trainer = StockTrainer(
        model=heads.build(head),
        args=arguments(len(slots), folder),
        train_dataset=heads.rows_of(head.kind),
        data_collator=heads.Task(head.kind).collate,
        callbacks=[kept],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.batches = [ranks[_rank()] for ranks in slots]
    trainer.train()
    return kept.gradient


def our_trainer(
    head: heads.Head, model: Any, split: str, args: TrainingArguments, callbacks: Any
) -> ExactTrainer:
    rows = heads.rows_of(head.kind)
    plan: Any = OneStep(split, np.array([len(row["input_ids"]) for row in rows]))
    trainer = ExactTrainer(
        model=model,
        args=args,
        task=heads.Task(head.kind),
        plan=plan,
        train_dataset=rows,
        max_tokens_per_device=256,
        loss_normalization="step",
        callbacks=callbacks,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def our_gradient(head: heads.Head, split: str, folder: str) -> torch.Tensor:
    kept = KeepGradient()
    args = arguments(len(SIZES[split]), folder)
    our_trainer(head, heads.build(head), split, args, [kept]).train()
    return kept.gradient


def measure(head: heads.Head, splits: list[str], folder: str) -> dict[str, list[float | None]]:
    """Split -> [stock's error against the model's own unsplit loss, ours against the formula]."""
    own, formula = heads.own_gradient(head), heads.formula_gradient(head)
    errors: dict[str, list[float | None]] = {}
    for split in splits:
        stock = None
        if split != EMPTY:
            stock = heads.relative_error(stock_gradient(head, split, folder), own)
        errors[split] = [stock, heads.relative_error(our_gradient(head, split, folder), formula)]
    return errors


def measure_all(chosen: list[heads.Head], splits: list[str]) -> dict[str, Any]:
    """Head -> what `measure` says, or the text of what it raised."""
    found: dict[str, Any] = {}
    # accelerate collects garbage at the start of every training; what is imported needs no second look.
    gc.freeze()
    with tempfile.TemporaryDirectory() as folder:
        for head in chosen:
            try:
                found[head.name] = measure(head, splits, folder)
            except Exception as error:
                found[head.name] = f"{type(error).__name__}: {error}"[:200]
                if _world() > 1:
                    raise
            gc.collect()
    return found


# ---- DeepSpeed ----


def zero_config(stage: int) -> dict[str, Any]:
    auto = (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    )
    return {
        **dict.fromkeys(auto, "auto"),
        "zero_optimization": {"stage": stage},
        "zero_allow_untrusted_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def _whole_weights(model: torch.nn.Module) -> torch.Tensor:
    import deepspeed

    found = []
    for p in model.parameters():
        with deepspeed.zero.GatheredParameters([p]):
            found.append(p.detach().reshape(-1).float().clone())
    return torch.cat(found)


def zero_error(head: heads.Head, stage: int, split: str, folder: Path) -> float:
    """Error of the update that a ZeRO engine made, divided by the learning rate."""
    args = arguments(len(SIZES[split]), str(folder / "out"), deepspeed=zero_config(stage))
    # Built by from_pretrained after the arguments: so zero.Init partitions it.
    model = heads.KINDS[head.kind].auto_class.from_pretrained(folder / "initial" / head.name)
    model = heads.adapt(head, model)
    trainer = our_trainer(head, model, split, args, [])
    before = _whole_weights(model)
    trainer.train()
    return heads.relative_error((before - _whole_weights(model)) / LEARNING_RATE, _reference(folder, head))


def _reference(folder: Path, head: heads.Head) -> torch.Tensor:
    return torch.load(folder / "initial" / head.name / "gradient.pt")


def main() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    engine, folder = sys.argv[1], Path(sys.argv[2])
    chosen = [heads.Head.parse(name) for name in json.loads((folder / "heads.json").read_text())]
    found: dict[str, Any]
    if engine == "ddp":
        found = measure_all(chosen, ["2x1", "2x4", EMPTY])
    else:
        import deepspeed

        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
        stage, split = int(engine.removeprefix("zero")), EMPTY
        found = {head.name: zero_error(head, stage, split, folder) for head in chosen}
    if _rank() == 0:
        (folder / f"{engine}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
