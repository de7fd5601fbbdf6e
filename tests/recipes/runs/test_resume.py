"""Killed, stopped and damaged runs, started again as a user does: the same command."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from hf_dist.training.ranks.stopping import NotFiniteError
from recipes.text_classification import build, main
from tests.launch import ROOT, call, losses, only_error

FLAGS = (
    "--max_train_samples=300",
    "--max_eval_samples=40",
    "--max_length=32",
    "--max_steps=12",
    "--save_strategy=steps",
    "--save_steps=3",
    "--eval_strategy=steps",
    "--eval_steps=4",
    "--logging_steps=1",
)


def same_weights(one: Path, other: Path) -> bool:
    mine, theirs = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    return mine.keys() == theirs.keys() and all((mine[name] == theirs[name]).all() for name in mine)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    assert call(main, *FLAGS, "--save_total_limit=9", f"--output_dir={folder}") == 0
    return folder


def started(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "recipes" / "text_classification.py"), *FLAGS, f"--output_dir={folder}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def wait_for(path: Path) -> None:
    end = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < end, f"{path} never came"
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_stopped_run_ends_with_the_same_weights(unbroken, tmp_path, number):
    run = started(tmp_path / "run")
    wait_for(tmp_path / "run" / "checkpoint-6")
    run.send_signal(number)
    _, shown = run.communicate(timeout=120)
    assert not (tmp_path / "run" / "all_results.json").exists()
    if number == signal.SIGTERM:
        assert run.returncode == 143
        assert "SIGTERM: stopped behind step" in shown and "Traceback" not in shown
    assert call(main, *FLAGS, f"--output_dir={tmp_path / 'run'}") == 0
    assert same_weights(unbroken, tmp_path / "run")
    # Dropout is on: the log of both runs agrees to the last digit as well.
    logs = [losses(folder) for folder in (unbroken, tmp_path / "run")]
    assert logs[0] == logs[1] and len(logs[0]) == 12


def test_a_damaged_checkpoint_is_passed_over_and_stays(unbroken, tmp_path, caplog):
    for step in (6, 9):
        shutil.copytree(unbroken / f"checkpoint-{step}", tmp_path / "run" / f"checkpoint-{step}")
    torn = tmp_path / "run" / "checkpoint-9" / "optimizer.pt"
    torn.write_bytes(torn.read_bytes()[:1000])
    assert call(main, *FLAGS, f"--output_dir={tmp_path / 'run'}") == 0
    shown = caplog.text
    assert "checkpoint-9 is passed over: optimizer.pt has 1000 bytes" in shown
    assert "resuming from" in shown and "checkpoint-6" in shown
    assert (tmp_path / "run" / "checkpoint-9.replaced-1" / "optimizer.pt").stat().st_size == 1000
    assert same_weights(unbroken, tmp_path / "run")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--max_train_samples=200",), "plan: the checkpoint has"),
        (("--resume=nowhere/checkpoint-3",), "there is no checkpoint"),
        (("--tokens_per_step=2048",), "plan: the checkpoint has"),
    ],
)
def test_what_is_not_resumed(unbroken, tmp_path, capsys, flags, says):
    shutil.copytree(unbroken / "checkpoint-3", tmp_path / "run" / "checkpoint-3")
    assert call(main, *FLAGS, *flags, f"--output_dir={tmp_path / 'run'}") == 2
    assert says in only_error(capsys.readouterr().err)
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint*")) == ["checkpoint-3"]


def test_a_run_by_name_of_a_checkpoint_or_afresh(unbroken, tmp_path):
    named = f"--resume={unbroken / 'checkpoint-9'}"
    assert call(main, *FLAGS, named, f"--output_dir={tmp_path / 'one'}") == 0
    assert same_weights(unbroken, tmp_path / "one")
    assert not (tmp_path / "one" / "checkpoint-9").exists()
    shutil.copytree(unbroken / "checkpoint-9", tmp_path / "two" / "checkpoint-9")
    assert call(main, *FLAGS, "--resume=never", "--max_steps=1", f"--output_dir={tmp_path / 'two'}") == 0
    assert json.loads((tmp_path / "two" / "trainer_state.json").read_text())["global_step"] == 1


def test_an_unnamed_run_goes_on_and_a_finished_one_is_left_alone(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)

    assert call(main, *FLAGS) == 0
    first = tmp_path / "runs" / "text_classification-001"
    # As if it had been killed behind step 9.
    for name in ("all_results.json", "model.safetensors", "checkpoint-12"):
        path = first / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    caplog.clear()
    assert call(main, *FLAGS) == 0
    shown = caplog.text
    assert "was not finished and has the same settings" in shown and "checkpoint-9" in shown
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["text_classification-001"]
    assert call(main, *FLAGS, "--max_steps=1") == 0
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_two_runs_into_one_folder(tmp_path, capsys):
    settings = {"max_train_samples": 50, "max_eval_samples": 10, "max_length": 32, "max_steps": 1}
    first = build(**settings, output_dir=str(tmp_path / "run"))
    assert call(main, *FLAGS, f"--output_dir={tmp_path / 'run'}") == 2
    assert "another run is writing to" in only_error(capsys.readouterr().err)
    first.lock.release()


def test_a_full_disk_leaves_the_earlier_ones_and_the_training_alone(tmp_path, monkeypatch, caplog):
    """Free space is mocked; a disk that is really full is in benchmarks/faults.py."""
    recipe = build(
        max_train_samples=100, max_eval_samples=10, max_length=32, max_steps=6, save_strategy="steps",
        save_steps=2, eval_strategy="no", output_dir=str(tmp_path / "run"),
    )  # fmt: skip
    real = shutil.disk_usage

    def usage(path):
        found = real(path)
        full = recipe.trainer.state.global_step == 4
        return found._replace(free=1000) if full else found

    monkeypatch.setattr(shutil, "disk_usage", usage)
    with caplog.at_level("WARNING", logger="hf_dist"):
        recipe.run()
    assert "checkpoint-4 could not be saved" in caplog.text and "0 MB free" in caplog.text
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint*")) == [
        "checkpoint-2",
        "checkpoint-6",
    ]
    assert not (tmp_path / "run" / ".saving").exists()


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_loss_that_is_no_number(tmp_path, policy, capsys):
    """The weights of step 3 are spoiled by hand, behind the checkpoint of step 2."""
    recipe = build(
        max_train_samples=100, max_eval_samples=10, max_length=32, max_steps=6, save_strategy="steps",
        save_steps=2, eval_strategy="no", logging_steps=1, on_nan=policy, output_dir=str(tmp_path / "run"),
    )  # fmt: skip
    bias = recipe.model.classifier.bias
    kept = {}

    class Spoil(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == 2:
                kept["bias"] = bias.detach().clone()
                bias.data.fill_(float("nan"))
            elif state.global_step == 3 and policy == "skip":
                bias.data.copy_(kept["bias"])

    recipe.trainer.add_callback(Spoil())
    if policy == "skip":
        recipe.run()
        assert recipe.trainer.stopping.skipped == 1
        assert all(torch.isfinite(parameter).all() for parameter in recipe.model.parameters())
        return
    with pytest.raises(NotFiniteError, match="NaN or infinite at or before step"):
        recipe.run()
    assert [path.name for path in (tmp_path / "run").glob("checkpoint*")] == ["checkpoint-2"]
    recipe.lock.release()


def test_a_new_machine_goes_on_from_the_copy(unbroken, tmp_path, caplog, capsys):
    copy = f"--checkpoint_copy=file://{tmp_path / 'copy'}"
    run = f"--output_dir={tmp_path / 'run'}"
    assert call(main, *FLAGS, copy, run, "--save_total_limit=2") == 0
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == ["checkpoint-12", "checkpoint-9"]
    shutil.rmtree(tmp_path / "copy" / "checkpoint-12")
    shutil.rmtree(tmp_path / "run")
    caplog.clear()
    assert call(main, *FLAGS, copy, run) == 0
    assert "checkpoint-9 is copied back" in caplog.text and "resuming from" in caplog.text
    assert same_weights(unbroken, tmp_path / "run")
    assert call(main, *FLAGS, copy, f"--output_dir={tmp_path / 'other'}", "--resume=never") == 2
    assert "holds checkpoints of a former run" in only_error(capsys.readouterr().err)
