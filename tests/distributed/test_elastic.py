"""A run goes on with other processes and under another preset, to the weights of the unbroken one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from tests.distributed.processes import ROOT, start, torchrun
from tests.launch import losses

SCRIPT = ROOT / "recipes" / "text_classification.py"
FLAGS = (
    "--max_train_samples=300",
    "--max_eval_samples=16",
    "--max_length=32",
    "--max_tokens_per_device=512",
    "--tokens_per_step=1024",
    "--dropout=0",
    "--weight_decay=0.1",
    "--learning_rate=1e-3",
    "--warmup_steps=4",
    "--max_steps=9",
    "--save_strategy=steps",
    "--save_steps=3",
    "--eval_strategy=no",
    "--logging_steps=1",
    "--do_train=true",
)


def train(folder: Path, preset: str, processes: int, last_step: int, *more: str) -> None:
    """Runs to the end, or is ended behind a checkpoint as a preemption does."""
    flags = (*FLAGS, *more, f"--preset={preset}", f"--output_dir={folder}")
    environment = {"HF_DIST_STOP_BEHIND": str(last_step)}
    worker = Path(__file__).parent / "stopped_recipe.py"
    if processes == 1:
        done = start(sys.executable, str(worker), *flags, **environment)
    else:
        done = torchrun(worker, *flags, **environment)
    # torchrun ends with a status of its own where its processes end with 143.
    assert done.returncode in ((0,) if last_step == 9 else (143, 1)), done.stderr[-6000:]
    assert (folder / f"checkpoint-{last_step}" / "manifest.json").exists(), done.stderr[-6000:]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    train(folder, "none", 1, 9)
    return folder


@pytest.mark.parametrize(
    "stages",
    [
        (("none", 2), ("zero3", 2), ("none", 1)),
        pytest.param((("zero1", 2), ("zero2", 1), ("zero3", 1)), marks=pytest.mark.slow),
        pytest.param((("zero3", 2), ("zero2", 2), ("zero1", 1)), marks=pytest.mark.slow),
        pytest.param((("zero2", 2), ("zero2", 1), ("none", 2)), marks=pytest.mark.slow),
        pytest.param((("zero3", 1), ("zero3", 2), ("zero3_offload", 2)), marks=pytest.mark.slow),
    ],
    ids=lambda stages: "-".join(f"{preset}x{processes}" for preset, processes in stages),
)
def test_the_loss_curve_is_that_of_the_unbroken_run(
    unbroken: Path, tmp_path: Path, stages: tuple[tuple[str, int], ...]
) -> None:
    folder = tmp_path / "run"
    for last_step, (preset, processes) in zip((3, 6, 9), stages, strict=True):
        train(folder, preset, processes, last_step)
    assert losses(folder) == pytest.approx(losses(unbroken), abs=1e-5)
    assert not (folder / ".converting").exists()
    mine, theirs = (
        AutoModelForSequenceClassification.from_pretrained(run).state_dict() for run in (folder, unbroken)
    )
    # Adam scales up what is only rounding noise, so no weight is held to the rounding error of its own size.
    worst = max((mine[name] - theirs[name]).abs().max().item() for name in theirs)
    assert worst < 1e-4 * max(weight.abs().max().item() for weight in theirs.values())


@pytest.mark.slow
def test_an_adapter_goes_on_as_well(tmp_path: Path) -> None:
    unbroken, folder = tmp_path / "unbroken", tmp_path / "run"
    train(unbroken, "none", 1, 9, "--peft=lora")
    for last_step, (preset, processes) in zip(
        (3, 6, 9), (("none", 2), ("zero3", 2), ("zero2", 1)), strict=True
    ):
        train(folder, preset, processes, last_step, "--peft=lora")
    assert losses(folder) == pytest.approx(losses(unbroken), abs=1e-5)
    mine, theirs = (load_file(run / "adapter_model.safetensors") for run in (folder, unbroken))
    assert mine.keys() == theirs.keys()
    assert max((mine[name] - theirs[name]).abs().max().item() for name in theirs) < 1e-4
