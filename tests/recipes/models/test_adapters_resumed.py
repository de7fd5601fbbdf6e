"""A run with an adapter that was killed ends as if it hadn't been."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import launch
from tests.recipes.models.adapter_runs import SHORT, same, weights
from tests.recipes.runs import test_resume as resume
from tests.recipes.tasks import test_text_classification as texts


def test_a_resumed_run_ends_with_the_same_adapter(whole: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    shutil.copytree(whole / "checkpoint-6", cut / "checkpoint-6")
    assert launch.call(texts.main, *SHORT, f"--output_dir={cut}") == 0
    assert same(cut, whole)
    assert launch.losses(cut) == launch.losses(whole) and len(launch.losses(cut)) == 9
    # Two moments of each trained number, and nothing of the frozen ones.
    optimizer = torch.load(whole / "checkpoint-9" / "optimizer.pt")["state"]
    moments = sum(state[name].numel() for state in optimizer.values() for name in ("exp_avg", "exp_avg_sq"))
    assert moments == 2 * sum(tensor.numel() for tensor in weights(whole).values())


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_adapter(whole: Path, tmp_path: Path) -> None:
    """Killed for real, in a process of its own, behind step 6."""
    run = tmp_path / "killed"
    script = launch.ROOT / "recipes" / "text_classification.py"
    started = subprocess.Popen(
        [sys.executable, str(script), *SHORT, f"--output_dir={run}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    resume.wait_for(run / "checkpoint-6")
    os.kill(started.pid, signal.SIGKILL)
    started.wait()
    assert not (run / "all_results.json").exists()
    assert launch.call(texts.main, *SHORT, f"--output_dir={run}") == 0
    assert same(run, whole)
    assert launch.losses(run) == launch.losses(whole) and len(launch.losses(run)) == 9


@pytest.mark.parametrize(
    "flags, says",
    [
        (("--lora_r=4",), "adapter: the checkpoint has lora r=16 alpha=32, this run lora r=4 alpha=8"),
        (
            ("--peft=none", "--lora_dropout=0"),
            "adapter: the checkpoint has lora r=16 alpha=32, this run None",
        ),
    ],
)
def test_another_adapter_is_not_resumed(
    flags: tuple[str, ...], says: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole / "checkpoint-3", tmp_path / "checkpoint-3")
    assert launch.call(texts.main, *SHORT, *flags, f"--output_dir={tmp_path}") == 2
    assert says in launch.only_error(capsys.readouterr().err)
