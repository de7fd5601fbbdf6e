"""A step waits for the device once, behind all that it was given, and no part of the model waits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_dist.training.reports.callbacks import TrainingProgress
from hf_dist.training.steps import planned
from tests.training import runs, toy
from tests.training.run.waits import Wait, Waits

STEPS = 3

# Three steps of two forward passes.
SPLIT = [[[range(0, 3)], [range(3, 4)]], [[range(4, 6)], [range(6, 8)]], [[range(8, 10)], [range(10, 12)]]]

# transformers 5.24 looks in each forward pass whether a batch has padding, to do without a mask under sdpa.
UPSTREAM = ("_ignore_bidirectional_mask_sdpa", "_ignore_causal_mask_sdpa")


def a_trainer(kind: str, folder: Path, *, architecture: str | None = None, **changes: Any) -> Any:
    data = toy.examples(kind, 12, seed=3)
    trainer = runs.trainer(
        kind, toy.ListedPlan(SPLIT, data), data, folder, architecture=architecture, **changes
    )
    trainer.add_callback(TrainingProgress(trainer.counters))
    return trainer


def watched(trainer: Any) -> tuple[list[Wait], list[list[Wait]]]:
    """All waits of a training, and by step those that are neither a log's nor transformers' masks'."""
    waits = Waits(trainer)
    with waits.watching():
        trainer.train()
    assert trainer.state.global_step == STEPS
    return waits.found, [
        [wait for wait in waits.of_step(step) if not wait.place.endswith(UPSTREAM)] for step in range(STEPS)
    ]


@pytest.mark.parametrize(
    "kind, architecture",
    [*((kind, None) for kind in toy.KINDS), ("clm", "mixtral"), ("seq2seq", "t5")],
)
def test_a_step_waits_once_and_in_no_part_of_the_model(
    kind: str, architecture: str | None, tmp_path: Path
) -> None:
    _, steps = watched(a_trainer(kind, tmp_path, architecture=architecture))
    for waits in steps:
        assert [(wait.part, wait.call) for wait in waits] == [("step", "tolist")], waits
        assert waits[0].place.startswith("training/ranks/stopping.py"), waits


@pytest.mark.parametrize("changes", [{"bf16": True}, {"label_smoothing_factor": 0.1}, {"max_grad_norm": 0}])
def test_settings_of_a_step_add_no_wait(changes: dict[str, Any], tmp_path: Path) -> None:
    _, steps = watched(a_trainer("clm", tmp_path, **changes))
    assert [len(waits) for waits in steps] == [1] * STEPS, steps


def test_class_weights_add_no_wait(tmp_path: Path) -> None:
    own = {"class_weights": (1.0, 2.0, 3.0, 4.0, 5.0)}
    _, steps = watched(a_trainer("tagging", tmp_path, own=own))
    assert [len(waits) for waits in steps] == [1] * STEPS, steps


def test_a_log_reads_the_loss_the_norm_and_the_counts_once_each(tmp_path: Path) -> None:
    found, _ = watched(a_trainer("single", tmp_path))
    logged = [wait.call for wait in found if wait.part == "log"]
    assert logged == ["item", "item", "tolist"] * STEPS


def _in_backward(loss: Tensor) -> None:
    loss.register_hook(lambda gradient: print(gradient.item()))


FAULTS: dict[str, tuple[str, Callable[[Tensor], object]]] = {
    "item": ("forward", lambda loss: loss.item()),
    "bool": ("forward", lambda loss: bool(loss > 0)),
    "float": ("forward", lambda loss: float(loss.detach())),
    "int": ("forward", lambda loss: int(loss.detach())),
    "cpu": ("forward", lambda loss: loss.detach().cpu()),
    "numpy": ("forward", lambda loss: loss.detach().numpy()),
    "print": ("forward", lambda loss: f"{loss}"),
    "repr": ("forward", repr),
    "nonzero": ("forward", lambda loss: loss.reshape(1).nonzero()),
    "mask": ("forward", lambda loss: loss.reshape(1)[loss.reshape(1) > 0]),
    "tensor": ("forward", lambda loss: torch.tensor([1.0], device=loss.device)),
    "new_tensor": ("forward", lambda loss: loss.new_tensor([1.0])),
    "backward": ("backward", _in_backward),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_guard_sees_a_wait_in_the_model(fault: str, tmp_path: Path) -> None:
    part, wait = FAULTS[fault]
    trainer = a_trainer("single", tmp_path)
    mean = trainer.step_loss.mean

    def faulty(*arguments: Any, **named: Any) -> Any:
        loss, outputs = mean(*arguments, **named)
        wait(loss)
        return loss, outputs

    trainer.step_loss.mean = faulty
    _, steps = watched(trainer)
    for waits in steps:
        assert {wait.part for wait in waits} == {"step", part}, waits
        assert any(wait.place.startswith("training/run/test_waits.py") for wait in waits), waits


@pytest.mark.parametrize("pins", [True, False])
def test_pinned_batches_are_copied_without_waiting(
    pins: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = a_trainer("single", tmp_path)
    # `use_cpu` unset it.
    trainer.args.dataloader_pin_memory = pins
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(planned, "prepare_data_loader", lambda _, **named: given.append(named))
    monkeypatch.setattr(type(trainer.accelerator), "device", torch.device("cuda"))
    trainer.get_train_dataloader()
    trainer.get_eval_dataloader(toy.examples("single", 4))
    assert [named["non_blocking"] for named in given] == [pins, pins]
