"""Translation as its users meet it: files, a trained model, its card, two processes and ZeRO-3."""

from __future__ import annotations

import pytest

from recipes.translation import build, main
from tests import launch
from tests.recipes.seq2seq_runs import ROWS as SHORT_ROWS
from tests.recipes.seq2seq_runs import (
    SHORT,
    compare_with_stock,
    predictions,
    results,
    two_processes_train_and_one_scores,
    write,
)

RECIPE = "translation"
# BLEU counts groups of four words.
ROWS = [(source, f"{target} is over there") for source, target in SHORT_ROWS]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    rows = [{"translation": {"xx": source, "en": target}} for source, target in ROWS]
    write(folder / "train.jsonl", rows)
    write(folder / "dev.jsonl", rows[:12])
    (folder / "test.tsv").write_text("xx\ten\n" + "".join(f"{s}\t{t}\n" for s, t in ROWS[:36:5]))
    return folder


@pytest.fixture(scope="module")
def trained(files, tmp_path_factory):
    """A model trained on the files, and its results."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    flags = [f"--train_file={files}/train.jsonl", f"--validation_file={files}/dev.jsonl"]
    found = results(
        main, *SHORT, "--max_steps=60", "--learning_rate=3e-3", "--source_lang=xx", *flags, output_dir=folder
    )
    return folder, found


def test_results(trained):
    _, found = trained
    for name in ("bleu", "chrf", "bleu_baseline", "loss", "generated_words"):
        assert isinstance(found[f"eval_{name}"], float), name
    assert found["eval_bleu"] > found["eval_bleu_baseline"]


def test_the_model_card_runs(trained, capsys):
    folder, _ = trained
    code = (folder / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    capsys.readouterr()
    exec(code, {"FOLDER": str(folder)})
    assert capsys.readouterr().out.startswith("the ")


def test_predictions_of_a_test_file_with_two_columns(trained, files, tmp_path):
    folder, _ = trained
    found = results(
        main,
        *SHORT,
        f"--model_name_or_path={folder}",
        "--source_lang=xx",
        "--target_lang=en",
        "--num_beams=2",
        "--do_predict",
        f"--test_file={files}/test.tsv",
        output_dir=tmp_path / "out",
    )
    lines = predictions(tmp_path / "out")
    assert [line["target"] for line in lines] == [target for _, target in ROWS[:36:5]]
    assert found["test_bleu"] > found["test_bleu_baseline"]


def test_ten_steps_equal_the_stock_trainer(files, tmp_path):
    compare_with_stock(
        build,
        tmp_path,
        train_file=f"{files}/train.jsonl",
        validation_file=f"{files}/dev.jsonl",
        source_lang="xx",
    )


def test_faults_are_one_line(files, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert launch.call(main, f"--train_file={files}/train.jsonl", "--source_lang=xy") != 0
    said = launch.only_error(capsys.readouterr().err)
    assert "for the languages xy" in said and "translation.en" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "preset", ["zero3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("none", "zero2"))]
)
def test_two_processes_score_as_one(preset, trained, files, tmp_path):
    """Under ZeRO-3 every rank must take part in every forward pass, though texts end at different lengths."""
    flags = [
        f"--model_name_or_path={trained[0]}",
        "--source_lang=xx",
        f"--train_file={files}/train.jsonl",
        f"--validation_file={files}/dev.jsonl",
    ]
    scores = ["bleu", "chrf", "generated_words"]
    two_processes_train_and_one_scores(RECIPE, main, flags, tmp_path, preset=preset, scores=scores)


@pytest.mark.slow
def test_built_in_data_beats_its_baseline(tmp_path):
    found = launch.run(RECIPE, output_dir=tmp_path / "out")
    assert found["eval_bleu"] > found["eval_bleu_baseline"] + 30
