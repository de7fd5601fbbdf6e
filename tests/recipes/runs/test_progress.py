"""What a run shows where its output is a file."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
import yaml

from hf_dist.data import progress
from recipes.text_classification import main
from tests.launch import call, start
from tests.recipes.seq2seq_runs import write
from tests.recipes.models.adapter_runs import CASES

LINE = re.compile(
    r"step ([\d,]+)/([\d,]+) \((\d+) %\): loss (\S+), lr (\S+), ([\d,]+) tokens/s, "
    r"(?:\d+ s|\d+ min|[\d.]+ h) left"
)
TEXTS = [f"{('good', 'bad')[row % 2]} number {row} " * (1 + row % 5) for row in range(160)]


def parsed(text: str) -> list[tuple[int, int, int, float, float, int]]:
    """(step, last step, percent, loss, learning rate, tokens a second) of each line, none garbled."""
    found = [line for line in text.splitlines() if line.startswith("step ") and "loss" in line]
    trained = [line for line in found if "eval_loss" not in line]
    matches = [LINE.fullmatch(line) for line in trained]
    assert all(matches), trained
    whole = [[word.replace(",", "") for word in match.groups()] for match in matches if match]
    return [(int(s), int(m), int(p), float(lo), float(lr), int(t)) for s, m, p, lo, lr, t in whole]


def logged(folder: Path) -> dict[int, tuple[float, float]]:
    """Step -> (loss, learning rate) in trainer_state.json."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return {entry["step"]: (entry["loss"], entry["learning_rate"]) for entry in history if "loss" in entry}


def logging_steps(folder: Path) -> int:
    return json.loads((folder / "run.json").read_text())["config"]["training_arguments"]["logging_steps"]


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "train.jsonl"
    rows = [json.dumps({"text": text, "label": text.split()[0]}) for text in TEXTS]
    file.write_text("\n".join(rows) + "\n")
    return (
        f"--train_file={file}", f"--validation_file={file}", "--max_length=32", "--max_tokens_per_device=256",
        "--tokens_per_step=256", "--max_steps=60", "--save_strategy=steps", "--save_steps=30",
        "--eval_strategy=steps", "--eval_steps=30",
    )  # fmt: skip


@pytest.fixture(scope="module")
def piped(flags, tmp_path_factory):
    """A run in a process of its own: its folder, and what it wrote to stderr."""
    folder = tmp_path_factory.mktemp("piped") / "run"
    done = start("text_classification", *flags, f"--dump_batches={folder}.jsonl", f"--output_dir={folder}")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "step 2/" not in done.stdout
    return folder, done.stderr


def check(folder: Path, stderr: str) -> None:
    """The lines of a whole run agree with what it saved."""
    lines = parsed(stderr)
    assert 20 <= len(lines) <= 50
    saved = logged(folder)
    assert [step for step, *_ in lines] == list(saved) == list(range(2, 61, 2))
    for step, last, percent, loss, rate, _ in lines:
        assert (last, percent) == (60, int(100 * step / 60))
        assert loss == float(f"{saved[step][0]:.3e}")
        assert rate == float(f"{saved[step][1]:.2e}")
    # Tokens of an interval over its tokens a second are its seconds: together the training but its pauses.
    records = [json.loads(line) for line in Path(f"{folder}.jsonl").read_text().splitlines()]
    places = sorted({(record["epoch"], record["step"]) for record in records})
    tokens = dict.fromkeys(places, 0)
    for record in records:
        tokens[record["epoch"], record["step"]] += record["real_tokens"]
    of_step = list(tokens.values())
    seconds = sum(sum(of_step[step - 2 : step]) / line[-1] for line in lines for step in line[:1])
    runtime = json.loads((folder / "train_results.json").read_text())["train_runtime"]
    assert 0.1 * runtime < seconds < 1.05 * runtime


def test_lines_of_a_run_into_a_file(piped):
    folder, stderr = piped
    check(folder, stderr)
    assert logging_steps(folder) == 2
    assert stderr.count("training: steps 1 to 60, logged every 2\n") == 1
    assert len(re.findall(r"^step (?:30|60): eval_accuracy", stderr, flags=re.MULTILINE)) == 2
    # Short work is not announced.
    assert "so far" not in stderr


@pytest.mark.slow
def test_two_processes_print_each_line_once(flags, piped, tmp_path):
    folder = tmp_path / "run"
    more = (f"--dump_batches={folder}.jsonl", f"--output_dir={folder}")
    done = start("text_classification", *flags, *more, nproc=2)
    assert done.returncode == 0, done.stderr[-4000:]
    check(folder, done.stderr)
    assert done.stderr.count("training: steps 1 to 60") == 1
    assert logging_steps(folder) == logging_steps(piped[0])


def test_a_resumed_run_counts_from_where_it_is(flags, piped, tmp_path, capsys):
    folder, stderr = piped
    more = (f"--resume={folder / 'checkpoint-30'}", f"--output_dir={tmp_path / 'run'}")
    assert call(main, *flags, *more) == 0
    shown = capsys.readouterr().err
    assert "training: steps 31 to 60, logged every 2\n" in shown
    # The same numbers but for the speed.
    assert [line[:5] for line in parsed(shown)] == [line[:5] for line in parsed(stderr) if line[0] > 30]


def test_a_resumed_run_that_is_longer_logs_and_saves_as_it_says(flags, piped, tmp_path, capsys):
    more = (f"--resume={piped[0] / 'checkpoint-30'}", "--max_steps=120", f"--output_dir={tmp_path / 'run'}")
    assert call(main, *flags, *more, "--do_train", "--eval_steps=1000", "--save_steps=40") == 0
    assert {path.name for path in (tmp_path / "run").glob("checkpoint-*")} == {
        "checkpoint-80",
        "checkpoint-120",
    }
    assert [line[0] for line in parsed(capsys.readouterr().err)] == list(range(35, 121, 5))
    assert logging_steps(tmp_path / "run") == 5


def test_a_bar_on_a_terminal(flags, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert call(main, *flags, "--max_steps=4", "--logging_steps=2", f"--output_dir={tmp_path / 'run'}") == 0
    shown = capsys.readouterr().err
    assert "4/4" in shown and "tok/s=" in shown and "loss=" in shown
    assert "training: steps" not in shown and parsed(shown) == []


def dry(recipe: str, capsys, *flags: str) -> tuple[dict, int | None]:
    """TrainingArguments and steps of a run, as `--dry_run` prints them."""
    assert call(importlib.import_module(f"recipes.{recipe}").main, "--dry_run", *flags) == 0
    settings, _, facts = capsys.readouterr().out.partition("\n\n")
    steps = re.search(r"^steps: (\d+)", facts, flags=re.MULTILINE)
    return yaml.safe_load(settings)["training_arguments"], int(steps[1]) if steps else None


def of_recipe(recipe: str, folder: Path) -> list[str]:
    case = CASES[recipe]
    file = write(folder / "rows.jsonl", case.rows)
    settings = {name: value for name, value in case.settings.items() if name != "max_steps"}
    return [
        f"--train_file={file}", f"--validation_file={file}", "--max_length=32", "--max_tokens_per_device=512",
        "--tokens_per_step=512", *(f"--{name}={value}" for name, value in settings.items()),
    ]  # fmt: skip


@pytest.mark.parametrize("recipe", CASES)
def test_every_recipe_logs_20_to_50_times(recipe, tmp_path, capsys):
    arguments, steps = dry(recipe, capsys, *of_recipe(recipe, tmp_path), "--num_train_epochs=70")
    assert steps > 50
    assert 20 <= steps // arguments["logging_steps"] <= 50


@pytest.mark.slow
@pytest.mark.parametrize("recipe", CASES)
def test_every_recipe_prints_its_lines(recipe, tmp_path, capsys):
    flags = (*of_recipe(recipe, tmp_path), "--max_steps=51", "--do_train", "--eval_strategy=no")
    run = tmp_path / "run"
    assert call(importlib.import_module(f"recipes.{recipe}").main, *flags, f"--output_dir={run}") == 0
    lines = parsed(capsys.readouterr().err)
    assert [(step, last) for step, last, *_ in lines] == [(step, 51) for step in range(2, 51, 2)]
    assert [loss for _, _, _, loss, *_ in lines] == [float(f"{loss:.3e}") for loss, _ in logged(run).values()]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("--logging_steps=7",), 7),
        (("--logging_steps=0.1",), 0.1),
        (("--logging_strategy=epoch",), None),
        (("--logging_strategy=steps",), 20),
        (("--streaming",), 20),
        (("--do_eval", "--model_name_or_path=none"), None),
    ],
)
def test_what_is_given_decides(given, expected, flags, capsys, piped):
    given = [word.replace("=none", f"={piped[0]}") for word in given]
    arguments, _ = dry("text_classification", capsys, *flags, "--max_steps=1000", *given)
    assert arguments.get("logging_steps") == expected


def test_long_work_says_what_it_is(tmp_path, monkeypatch, caplog):
    """As if everything took more than five seconds, and every millisecond were a minute."""
    monkeypatch.setattr(progress, "_FIRST_LINE_SECONDS", 0.0)
    monkeypatch.setattr(progress, "_NEXT_LINE_SECONDS", 0.001)
    for name, rows in (("train", 150), ("dev", 40)):
        lines = [f"{row % 2}\t{('ebb', 'flow')[row % 2]} {row}" for row in range(rows)]
        (tmp_path / f"{name}.tsv").write_text("\n".join(["label\ttext", *lines]) + "\n")
    files = (f"--train_file={tmp_path}/train.tsv", f"--validation_file={tmp_path}/dev.tsv")
    small = ("--max_steps=1", "--max_length=16", "--max_tokens_per_device=64", "--tokens_per_step=64")
    assert call(main, *files, *small, "--save_strategy=no", f"--output_dir={tmp_path / 'run'}") == 0
    assert re.search(r"^.*tokenising train: 150 rows, 0 s so far$", caplog.text, flags=re.MULTILINE)
    assert re.search(r"tokenising validation: 40 rows, 0 s so far", caplog.text)
    forwards = re.findall(r"evaluation of 40 rows: (\d+) of (\d+) forward passes, 0 s so far", caplog.text)
    assert forwards and {int(of) for _, of in forwards} == {int(forwards[0][1])}
    done = [int(number) for number, _ in forwards]
    assert done == sorted(done) and done[0] >= 0 and done[-1] <= int(forwards[0][1])
