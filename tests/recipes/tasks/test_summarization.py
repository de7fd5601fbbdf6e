"""Summarization as its users meet it: files, a trained model, its card, two processes and ZeRO-3."""

from __future__ import annotations

import json

import pytest

from recipes.summarization import build, main
from tests import launch
from tests.recipes.seq2seq_runs import (
    ROWS,
    SHORT,
    compare_with_stock,
    predictions,
    results,
    two_processes_train_and_one_scores,
    write,
)

RECIPE = "summarization"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rows = [{"article": text, "highlights": summary} for text, summary in ROWS]
    write(folder / "train.jsonl", rows)
    write(folder / "dev.jsonl", rows[:12])
    write(folder / "test.jsonl", [{"article": row["article"]} for row in rows[:36:5]])
    return folder


@pytest.fixture(scope="module")
def trained(files, tmp_path_factory):
    """A model trained on the files, and its results."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    flags = [f"--train_file={files}/train.jsonl", f"--validation_file={files}/dev.jsonl"]
    flags += ["--max_steps=60", "--learning_rate=3e-3", "--source_prefix=tldr: "]
    return folder, results(main, *SHORT, *flags, output_dir=folder)


def test_results(trained):
    folder, found = trained
    for name in ("rouge1", "rouge2", "rougeL", "rougeLsum", "rougeL_baseline", "loss", "generated_words"):
        assert isinstance(found[f"eval_{name}"], float), name
    # The baseline answers with the first two words, one of which is the target's.
    assert found["eval_rougeL_baseline"] == pytest.approx(0.5, abs=0.05)
    assert found["eval_rougeL"] > found["eval_rougeL_baseline"]
    losses = launch.losses(folder)
    assert losses[-1] < 0.5 * losses[0]


def test_the_saved_model_says_how_it_generates(trained):
    config = json.loads((trained[0] / "generation_config.json").read_text())
    assert (config["max_new_tokens"], config["num_beams"], config["do_sample"]) == (12, 1, False)


def test_the_model_card_runs(trained, capsys):
    folder, _ = trained
    card = (folder / "README.md").read_text()
    code = card.partition("```python\n")[2].partition("```")[0]
    assert "'tldr: ' + text" in code
    capsys.readouterr()
    exec(code, {"FOLDER": str(folder)})
    assert capsys.readouterr().out.startswith("the ")


def test_eval_and_predict_alone(trained, files, tmp_path):
    folder, found = trained
    again = results(
        main,
        *SHORT,
        f"--model_name_or_path={folder}",
        "--source_prefix=tldr: ",
        "--do_eval",
        "--do_predict",
        "--max_tokens_per_device=64",
        f"--validation_file={files}/dev.jsonl",
        f"--test_file={files}/test.jsonl",
        output_dir=tmp_path / "again",
    )
    # Other batches, same scores.
    assert again["eval_loss"] == pytest.approx(found["eval_loss"], rel=1e-5)
    assert again["eval_rougeL"] == found["eval_rougeL"]
    lines = predictions(tmp_path / "again")
    assert [line["row"] for line in lines] == list(range(8))
    assert all(line["prediction"].startswith("the") for line in lines)


def test_ten_steps_equal_the_stock_trainer(files, tmp_path):
    names = {"train_file": f"{files}/train.jsonl", "validation_file": f"{files}/dev.jsonl"}
    compare_with_stock(build, tmp_path, **names)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--train_file={files}/train.jsonl", "--text_column=artcle"], "did you mean article"),
        (["--train_file={files}/test.jsonl"], "--summary_column"),
        (["--max_target_length=1"], "leaves no token of a target"),
        (["--num_beams=0"], "--num_beams is 0"),
    ],
)
def test_faults_are_one_line(flags, expected, files, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert launch.call(main, "--max_train_samples=20", *(flag.format(files=files) for flag in flags)) != 0
    assert expected in launch.only_error(capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["none", "zero2", "zero3"])
def test_two_processes_score_as_one(preset, trained, files, tmp_path):
    flags = [
        f"--model_name_or_path={trained[0]}",
        "--source_prefix=tldr: ",
        f"--train_file={files}/train.jsonl",
        f"--validation_file={files}/dev.jsonl",
    ]
    scores = ["rouge1", "rouge2", "rougeL", "rougeLsum", "generated_words"]
    two_processes_train_and_one_scores(RECIPE, main, flags, tmp_path, preset=preset, scores=scores)


@pytest.mark.slow
def test_two_processes_evaluate_a_model_under_zero3(trained, files, tmp_path):
    two = launch.run(
        RECIPE,
        *SHORT,
        f"--model_name_or_path={trained[0]}",
        "--source_prefix=tldr: ",
        "--do_eval",
        f"--validation_file={files}/dev.jsonl",
        "--preset=zero3",
        output_dir=tmp_path / "two",
        nproc=2,
    )
    assert two["engine"] == "deepspeed-zero3"
    assert two["eval_rougeL"] == pytest.approx(trained[1]["eval_rougeL"], abs=1e-9)
    assert two["eval_loss"] == pytest.approx(trained[1]["eval_loss"], rel=1e-5)


@pytest.mark.slow
def test_built_in_data_beats_its_baseline(tmp_path):
    found = launch.run(RECIPE, output_dir=tmp_path / "out")
    assert found["eval_rougeL"] > found["eval_rougeL_baseline"] + 0.06
