"""The command of a finished run again: nothing to do, more to do, something else, or all anew."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes.text_classification import build, main
from tests.launch import ROOT, call, losses, only_error, start
from tests.recipes.runs.test_resume import same_weights

FLAGS = (
    "--max_train_samples=120",
    "--max_eval_samples=20",
    "--max_length=32",
    "--save_strategy=steps",
    "--save_steps=4",
    "--eval_strategy=no",
    "--logging_steps=1",
    "--learning_rate=0.001",
    "--warmup_steps=0",
)


@pytest.fixture(autouse=True)
def _log(monkeypatch):
    """A run's log goes where pytest looks, and not to the captured stderr of an earlier test."""
    logger = logging.getLogger("hf_dist")
    monkeypatch.setattr(logger, "handlers", [logging.NullHandler()])
    monkeypatch.setattr(logger, "propagate", True)


@pytest.fixture(scope="module")
def six(tmp_path_factory):
    """A finished run of six steps; the last checkpoint is that of its end."""
    folder = tmp_path_factory.mktemp("six") / "run"
    assert call(main, *FLAGS, "--max_steps=6", f"--output_dir={folder}") == 0
    return folder


@pytest.fixture
def run(six, tmp_path):
    return Path(shutil.copytree(six, tmp_path / "run"))


def state_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


@pytest.mark.parametrize(
    "flags",
    [(), ("--logging_steps=3", "--preset=zero2", "--dataloader_num_workers=1")],
)
def test_the_same_command_has_nothing_to_do(run, flags, caplog, monkeypatch):
    before = state_of(run)
    monkeypatch.setattr("hf_dist.tasks.text_classification.task.TextClassification.load", None)
    assert call(main, *FLAGS, "--max_steps=6", *flags, f"--output_dir={run}") == 0
    assert [record.getMessage() for record in caplog.records if record.name == "hf_dist"] == [
        f"{run}: finished at step 6; nothing to do"
    ]
    assert state_of(run) == before


def test_python_gets_the_results_again(run):
    settings = dict(flag.lstrip("-").split("=") for flag in FLAGS)
    numbers = {name: json.loads(value) for name, value in settings.items() if name.startswith("max")}
    others = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "no", "learning_rate": 1e-3}
    again = build(
        max_steps=6, warmup_steps=0, logging_steps=1, output_dir=str(run), **numbers, **others
    )  # fmt: skip
    assert again.run() == json.loads((run / "all_results.json").read_text())


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--max_steps=5",), "--max_steps was 6 and is 5"),
        (("--max_steps=9", "--seed=7"), "--max_steps was 6 and is 9; --seed was 42 and is 7"),
        (("--max_steps=6", "--do_train", "--do_eval", "--do_predict"), "--do_predict was False and is True"),
        (("--max_steps=6", "--max_length=64"), "--max_length was 32 and is 64"),
        (("--max_steps=6", "--resume=never"), "--resume was auto and is never"),
        (("--max_steps=9", "--resume=never"), "--resume was auto and is never"),
    ],
)
def test_other_settings_are_named(run, flags, says, capsys):
    before = state_of(run)
    assert call(main, *FLAGS, *flags, f"--output_dir={run}") == 2
    found = only_error(capsys.readouterr().err)
    assert "holds a finished run of other settings" in found and says in found
    assert state_of(run) == before


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_more_steps_go_on_from_the_end(tmp_path, schedule, caplog):
    flags = (*FLAGS, f"--lr_scheduler_type={schedule}", "--save_total_limit=1")
    for steps in (6, 10):
        assert call(main, *flags, f"--max_steps={steps}", f"--output_dir={tmp_path / 'run'}") == 0
    assert "resuming from" in caplog.text and "checkpoint-6" in caplog.text
    assert "finished at step 6 and goes on; the learning rate follows the schedule" in caplog.text
    history = json.loads((tmp_path / "run" / "trainer_state.json").read_text())["log_history"]
    rates = {entry["step"]: entry["learning_rate"] for entry in history if "loss" in entry}
    assert sorted(rates) == list(range(1, 11))
    if schedule == "constant":
        assert call(main, *flags, "--max_steps=10", f"--output_dir={tmp_path / 'whole'}") == 0
        assert same_weights(tmp_path / "whole", tmp_path / "run")
        assert losses(tmp_path / "whole") == losses(tmp_path / "run")
        return
    # Linear from 0.001 at the first step to 0 behind the last: of six steps, then of ten.
    expected = {step: 1e-3 * (1 - (step - 1) / (6 if step <= 6 else 10)) for step in range(1, 11)}
    assert rates == pytest.approx(expected, rel=1e-6)
    # It is finished as any other run.
    assert call(main, *flags, "--max_steps=10", f"--output_dir={tmp_path / 'run'}") == 0
    assert "finished at step 10; nothing to do" in caplog.text


def test_where_the_end_left_no_checkpoint(run, caplog, capsys):
    shutil.rmtree(run / "checkpoint-6")
    assert call(main, *FLAGS, "--max_steps=8", f"--output_dir={run}") == 0
    assert "steps 5 to 6 left no checkpoint and are trained again" in caplog.text
    assert json.loads((run / "trainer_state.json").read_text())["global_step"] == 8
    for checkpoint in run.glob("checkpoint-*"):
        (checkpoint / "optimizer.pt").unlink()
    before = state_of(run)
    assert call(main, *FLAGS, "--max_steps=9", f"--output_dir={run}") == 2
    assert "no whole checkpoint to go on from" in only_error(capsys.readouterr().err)
    assert state_of(run) == before
    for checkpoint in run.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    assert call(main, *FLAGS, "--max_steps=9", f"--output_dir={run}") == 2
    assert "finished at step 8 and left no checkpoint" in only_error(capsys.readouterr().err)


def test_more_epochs_go_on_from_the_last_and_not_from_the_best(tmp_path, caplog):
    """The learning rate is so high that it gets worse."""
    flags = ("--max_train_samples=60", "--max_eval_samples=20", "--max_length=32", "--eval_strategy=epoch",
             "--save_strategy=epoch", "--load_best_model_at_end=true", "--metric_for_best_model=loss",
             "--greater_is_better=false", "--lr_scheduler_type=constant", "--learning_rate=0.5")  # fmt: skip
    run = tmp_path / "run"
    assert call(main, *flags, "--num_train_epochs=2", f"--output_dir={run}") == 0
    steps = json.loads((run / "trainer_state.json").read_text())
    half, end = steps["global_step"] // 2, steps["global_step"]
    assert steps["best_model_checkpoint"] == str(run / f"checkpoint-{half}")
    assert call(main, *flags, "--num_train_epochs=3", f"--output_dir={run}") == 0
    assert f"resuming from {run / f'checkpoint-{end}'}" in caplog.text
    after = json.loads((run / "trainer_state.json").read_text())
    assert after["global_step"] == half * 3 and after["epoch"] == 3
    # Steps where there were epochs: as many as were trained are no more.
    caplog.clear()
    assert call(main, *flags, f"--max_steps={half * 3}", f"--output_dir={run}") == 2


@pytest.mark.slow
def test_a_continuation_that_is_killed_is_an_unfinished_run(run, caplog):
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "recipes" / "text_classification.py"), *FLAGS, "--max_steps=400",
         f"--output_dir={run}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    end = time.monotonic() + 120
    while not (run / "checkpoint-12").exists():
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert not (run / "all_results.json").exists()
    step = max(int(path.name.split("-")[1]) for path in run.glob("checkpoint-*")) + 2
    assert call(main, *FLAGS, f"--max_steps={step}", f"--output_dir={run}") == 0
    assert json.loads((run / "trainer_state.json").read_text())["global_step"] == step


def test_training_afresh_removes_what_is_ours_and_nothing_else(run, monkeypatch, capsys):
    flag = ("--overwrite_output_dir",)
    (run / "notes.txt").write_text("mine")
    (run / "checkpoint-99").mkdir()
    (run / "checkpoint-99" / "x").write_text("another program's")
    (run / "predictions.jsonl").write_text("old")
    data = run / "train.jsonl"
    rows = [{"text": f"word {n}", "label": n % 2} for n in range(40)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = state_of(run)
    again = (*FLAGS, "--max_steps=3", *flag, f"--output_dir={run}")
    assert call(main, *again, f"--train_file={data}") == 2
    assert "would remove what --train_file" in only_error(capsys.readouterr().err)
    # Nothing goes before all of it has been looked at.
    assert call(main, *again, "--max_tokens_per_device=1") == 2
    assert state_of(run) == before
    capsys.readouterr()
    assert call(main, *again, "--seed=3") == 0
    assert (run / "notes.txt").read_text() == "mine" and (run / "checkpoint-99" / "x").exists()
    assert {path.name for path in run.glob("checkpoint-*")} == {"checkpoint-3", "checkpoint-99"}
    assert not (run / "predictions.jsonl").exists()
    assert json.loads((run / "run.json").read_text())["seed"] == 3
    # torchrun starts processes again after a fault: they don't begin once more.
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert call(main, *again, "--seed=3", "--max_train_samples=120") == 0
    assert json.loads((run / "trainer_state.json").read_text())["global_step"] == 3


@pytest.mark.slow
def test_a_requeue_on_two_processes(six, run):
    before = state_of(run)
    done = start("text_classification", *FLAGS, "--max_steps=6", f"--output_dir={run}", nproc=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("finished at step 6; nothing to do") == 1
    assert state_of(run) == before
    done = start(
        "text_classification", *FLAGS, "--max_steps=8", "--preset=zero2", f"--output_dir={run}", nproc=2
    )
    assert done.returncode == 0, done.stderr[-3000:]
    history = json.loads((run / "trainer_state.json").read_text())["log_history"]
    rates = {entry["step"]: entry["learning_rate"] for entry in history if "loss" in entry}
    assert rates[7] == pytest.approx(1e-3 * 2 / 8) and rates[8] == pytest.approx(1e-3 / 8)
    done = start("text_classification", *FLAGS, "--max_steps=8", "--seed=1", f"--output_dir={run}", nproc=2)
    assert done.returncode != 0 and done.stderr.count("--seed was 42 and is 1") == 1
