"""Ten steps of a recipe against a plain Trainer on the same rows.

One process and no accumulation: there the stock Trainer is right (see tests/training/run/test_trainer.py for
where it is not).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import Trainer, TrainingArguments

from hf_dist.training.run.recipe import Recipe

SETTINGS = {
    "batching": "examples",
    "window": 1,
    "gradient_accumulation_steps": 1,
    "max_steps": 10,
    "max_length": 32,
    "logging_steps": 1,
    "dropout": 0.0,
    "save_strategy": "no",
    "eval_strategy": "no",
    "do_train": True,
}


class _RightNorm(Trainer):
    """The stock Trainer, clipping by the right norm: on a CPU torch is off by 1e-5 in a million weights."""

    def _clip_grad_norm(self, model):
        squares = [parameter.grad.double().square().sum() for parameter in model.parameters()]
        norm = torch.stack(squares).sum().sqrt().float()
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), self.args.max_grad_norm, norm)
        return norm


def compare_with_stock(
    build: Callable[..., Recipe],
    folder: Path,
    *,
    collator: Callable[[Recipe], Any],
    rows_of: Callable[[Recipe, list[dict[str, Any]]], Dataset] | None = None,
    rows_per_step: int = 4,
    **settings: Any,
) -> Recipe:
    """Both train the rows of the recipe's plan, in its order, from the same weights.

    Args:
        build: the recipe's.
        folder: an empty folder.
        collator: the stock collator for a recipe's rows.
        rows_of: the stock Trainer's rows for a recipe and its dumped batches; default: those of the plan.
        rows_per_step: rows of a step.
        **settings: flags of the recipe.

    Returns:
        The recipe, for what else a test asks of its rows.
    """
    values = {**SETTINGS, "per_device_train_batch_size": rows_per_step, **settings}
    ours = build(**values, output_dir=str(folder / "ours"), dump_batches=str(folder / "batches.jsonl"))
    ours.run()
    losses = [entry["loss"] for entry in ours.trainer.state.log_history if "loss" in entry]
    keys = [json.loads(line) for line in (folder / "batches.jsonl").read_text().splitlines()]
    again = build(**values, output_dir=str(folder / "again"))
    if rows_of is not None:
        rows = rows_of(again, keys)
    else:
        rows = again.datasets["train"].select([row for key in keys for row in key["rows"]])
    arguments = again.trainer.args
    stock = _RightNorm(
        model=again.model,
        args=TrainingArguments(
            output_dir=str(folder / "stock"),
            per_device_train_batch_size=rows_per_step,
            max_steps=10,
            learning_rate=arguments.learning_rate,
            lr_scheduler_type=arguments.lr_scheduler_type,
            weight_decay=arguments.weight_decay,
            adam_epsilon=arguments.adam_epsilon,
            warmup_steps=arguments.warmup_steps,
            train_sampling_strategy="sequential",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=rows,
        data_collator=collator(again),
        processing_class=again.tokenizer,
    )
    stock.train()
    expected = [entry["loss"] for entry in stock.state.log_history if "loss" in entry]
    assert losses == pytest.approx(expected, rel=1e-6)
    assert len(losses) == 10 and losses[-1] < losses[0]
    return ours
