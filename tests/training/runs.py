"""Real, tiny trainings for tests: plain SGD, one process unless a launcher says otherwise."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainingArguments

from hf_dist.training.run.trainer import ExactTrainer
from tests.training import toy

# accelerate collects garbage at the start of every training; what is imported by now needs no second look.
gc.freeze()


class Gradients(TrainerCallback):
    """Keeps the gradient of every optimizer step, as it is applied."""

    def __init__(self) -> None:
        self.steps: list[torch.Tensor] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.steps.append(toy.flat_gradient(model))


def arguments(folder: Path | str, **changes: Any) -> TrainingArguments:
    values: dict[str, Any] = dict(
        output_dir=str(folder),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_steps=1,
        logging_nan_inf_filter=False,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=1e9,
        num_train_epochs=1,
    )
    return TrainingArguments(**{**values, **changes})


def trainer(
    kind: str,
    plan: Any,
    data: Any,
    folder: Path | str,
    *,
    architecture: str | None = None,
    net: torch.nn.Module | None = None,
    task: Any = None,
    own: dict[str, Any] | None = None,
    **changes: Any,
) -> ExactTrainer:
    """`own` goes to ExactTrainer, `changes` to TrainingArguments. Gradients stand in `.gradients`."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if plan is not None:
        changes.setdefault("gradient_accumulation_steps", plan.accumulation_steps(world))
    kept = Gradients()
    options: dict[str, Any] = dict(max_tokens_per_device=40, callbacks=[kept], **(own or {}))
    made = ExactTrainer(
        model=net or toy.model(kind, architecture=architecture),
        args=arguments(folder, **changes),
        task=task or toy.ToyTask(kind),
        plan=plan,
        train_dataset=data if plan is not None else None,
        **options,
    )
    made.gradients = kept.steps  # type: ignore[attr-defined]
    return made


def logged(made: Any, name: str) -> list[float]:
    return [entry[name] for entry in made.state.log_history if name in entry]
