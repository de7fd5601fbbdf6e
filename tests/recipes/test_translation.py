"""Translation as its users meet it: files, a trained model, its card, two processes and ZeRO-3."""

from __future__ import annotations

import pytest

from recipes.translation import build, main
from tests import launch
from tests.recipes.seq2seq_runs import ROWS as SHORT_ROWS
from tests.recipes.seq2seq_runs import SHORT, compare_with_stock, predictions, results, write

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


def test_two_processes_generate_under_zero3_as_one_process_does(trained, files, tmp_path):
    """Every rank must take part in every forward pass, though their texts end at different lengths."""
    _two_score_as_one("zero3", trained, files, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["none", "zero2"])
def test_two_processes_score_a_model_as_one(preset, trained, files, tmp_path):
    _two_score_as_one(preset, trained, files, tmp_path)


def _two_score_as_one(preset, trained, files, tmp_path):
    folder, found = trained
    two = launch.run(
        RECIPE,
        *SHORT,
        f"--model_name_or_path={folder}",
        "--source_lang=xx",
        "--do_eval",
        f"--validation_file={files}/dev.jsonl",
        f"--preset={preset}",
        output_dir=tmp_path / "two",
        nproc=2,
    )
    assert two["world_size"] == 2
    for name in ("bleu", "chrf", "generated_words"):
        assert two[f"eval_{name}"] == pytest.approx(found[f"eval_{name}"], abs=1e-9), name
    assert two["eval_loss"] == pytest.approx(found["eval_loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["zero2", "zero3"])
def test_two_processes_train_and_generate(preset, tmp_path):
    small = (*launch.SMALL, "--max_target_length=16", "--tokens_per_step=2048")
    found = launch.run(RECIPE, *small, f"--preset={preset}", output_dir=tmp_path / "out", nproc=2)
    assert found["engine"] == f"deepspeed-{preset}"
    assert found["eval_loss"] > 0 and found["eval_bleu"] >= 0


@pytest.mark.slow
def test_built_in_data_beats_its_baseline(tmp_path):
    found = launch.run(RECIPE, output_dir=tmp_path / "out")
    assert found["eval_bleu"] > found["eval_bleu_baseline"] + 30
