"""Token classification as its users meet it: files, a trained model, its card, two processes and ZeRO-3."""

from __future__ import annotations

import json
import re

import pytest
from transformers import DataCollatorForTokenClassification, pipeline

from recipes.token_classification import build, main
from tests import launch
from tests.recipes.seq2seq_runs import predictions, results, write
from tests.recipes.stock import compare_with_stock

RECIPE = "token_classification"
# A name after "in" is a place, elsewhere a person: the word alone does not say which.
NAMES = ("Paris", "Virginia", "Austin", "Chelsea", "Florence")
ROWS = [
    row
    for name in NAMES
    for row in (
        ([name, "Lee", "is", "old"], ["B-PER", "I-PER", "O", "O"]),
        (["she", "lives", "in", name, "now"], ["O", "O", "O", "B-LOC", "O"]),
        (["the", "file", "is", "in", name], ["O", "O", "O", "O", "B-LOC"]),
        ([name, "reads", "the", "file"], ["B-PER", "O", "O", "O"]),
    )
] * 3
SHORT = (
    "--max_length=32",
    "--max_tokens_per_device=256",
    "--tokens_per_step=256",
    "--logging_steps=1",
    "--save_strategy=no",
    "--eval_strategy=no",
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write(folder / "train.jsonl", [{"tokens": words, "ner_tags": tags} for words, tags in ROWS])
    write(folder / "dev.jsonl", [{"tokens": words, "ner_tags": tags} for words, tags in ROWS[:20]])
    write(folder / "test.jsonl", [{"tokens": words} for words, _ in ROWS[:7]])
    sentences = ["".join(f"{word}\t{tag}\n" for word, tag in zip(*row, strict=True)) for row in ROWS[:20]]
    (folder / "dev.conll").write_text("\n".join(sentences))
    return folder


@pytest.fixture(scope="module")
def trained(files, tmp_path_factory):
    """A model trained on the files, and its results."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    flags = [f"--train_file={files}/train.jsonl", f"--validation_file={files}/dev.jsonl"]
    return folder, results(main, *SHORT, *flags, "--max_steps=60", "--learning_rate=3e-3", output_dir=folder)


def test_results(trained):
    folder, found = trained
    for name in ("f1", "precision", "recall", "f1_LOC", "f1_PER", "accuracy", "f1_baseline", "loss"):
        assert isinstance(found[f"eval_{name}"], float), name
    # Each name is as often B-PER as B-LOC, and the smaller id, B-LOC, wins: 10 of 20 entities are found
    # (those of LOC), and of PER none.
    assert found["eval_f1_baseline"] < 0.7
    assert found["eval_f1"] > 0.95
    config = json.loads((folder / "config.json").read_text())
    assert config["id2label"] == {"0": "B-LOC", "1": "B-PER", "2": "I-PER", "3": "O"}


def test_the_saved_model_runs_in_a_pipeline(trained, capsys):
    tag = pipeline("token-classification", model=str(trained[0]), aggregation_strategy="first", device="cpu")
    rows = [["Paris", "Lee", "is", "old"], ["she", "lives", "in", "Paris", "now"]]
    person, place = tag(rows, is_split_into_words=True)
    assert [(one["entity_group"], one["word"].strip()) for one in person] == [("PER", "Paris Lee")]
    assert [(one["entity_group"], one["word"].strip()) for one in place] == [("LOC", "Paris")]
    assert {one["entity_group"] for one in tag("she lives in Austin now")} == {"LOC"}
    card = (trained[0] / "README.md").read_text()
    code = card.partition("```python\n")[2].partition("```")[0]
    capsys.readouterr()
    # The card's words are Python, of which this model knows nothing.
    code = re.sub(r"words = \[.*\]", 'words = ["she", "lives", "in", "Paris", "now"]', code)
    exec(code, {"FOLDER": str(trained[0])})
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [["Paris", "LOC"]]


def test_eval_and_predict_alone(trained, files, tmp_path):
    """The same sentences as CoNLL, in other batches."""
    folder, found = trained
    again = results(
        main,
        *SHORT,
        f"--model_name_or_path={folder}",
        "--do_eval",
        "--do_predict",
        "--max_tokens_per_device=64",
        f"--validation_file={files}/dev.conll",
        f"--test_file={files}/test.jsonl",
        output_dir=tmp_path / "again",
    )
    assert again["eval_loss"] == pytest.approx(found["eval_loss"], rel=1e-5)
    assert again["eval_f1"] == found["eval_f1"]
    lines = predictions(tmp_path / "again")
    assert [line["row"] for line in lines] == list(range(7))
    assert [line["tokens"] for line in lines] == [words for words, _ in ROWS[:7]]
    assert [line["tags"] for line in lines] == [tags for _, tags in ROWS[:7]]


def test_ten_steps_equal_the_stock_trainer(files, tmp_path):
    compare_with_stock(
        build,
        tmp_path,
        collator=lambda recipe: DataCollatorForTokenClassification(recipe.tokenizer),
        train_file=f"{files}/train.jsonl",
        validation_file=f"{files}/dev.jsonl",
    )


def test_training_rows_can_be_streamed(files, tmp_path):
    flags = [f"--train_file={files}/train.jsonl", f"--validation_file={files}/dev.jsonl"]
    found = results(main, *SHORT, *flags, "--streaming", "--max_steps=4", output_dir=tmp_path / "out")
    losses = launch.losses(tmp_path / "out")
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert found["eval_f1"] >= 0


IOB1 = {"B-PER": "I-PER", "B-LOC": "I-LOC"}
"""No two entities of the rows stand side by side."""


@pytest.fixture(scope="module")
def conll_2003(tmp_path_factory):
    """The rows as CoNLL-2003 was published: IOB1 in four columns of blanks; one tag in testa only."""
    folder = tmp_path_factory.mktemp("conll")

    def sentence(words, tags) -> str:
        return "".join(
            f"{word} NN I-NP {IOB1.get(tag, tag)}\r\n" for word, tag in zip(words, tags, strict=True)
        )

    start = "-DOCSTART- -X- -X- O\r\n\r\n"
    more = [(["go", "Python"], ["O", "I-MISC"])] * 2
    for name, rows in (("eng.train", ROWS), ("eng.testa", [*ROWS[:18], *more])):
        content = "\ufeff" + start + "\r\n".join(sentence(*row) for row in rows)
        (folder / name).write_bytes(content.encode())
    return folder


def test_conll_2003_files_run_as_they_were_published(conll_2003, tmp_path, capsys):
    flags = [f"--train_file={conll_2003}/eng.train", f"--validation_file={conll_2003}/eng.testa"]
    # Predictions are those of the same sentences without tags, in a file that could be anything.
    words = [words for words, _ in ROWS[:18]]
    (tmp_path / "test").write_text("\n\n".join("\n".join(row) for row in words))
    with launch.logged() as lines:
        steps = ("--max_steps=60", "--learning_rate=3e-3")
        found = results(main, *SHORT, *flags, *steps, output_dir=tmp_path / "out")
    said = "\n".join(lines)
    for line in (
        "eng.train: read as conll, by the contents",
        "eng.testa: read as conll, by the contents",
        "4 tags, scheme IOB1: an I- opens an entity",
        "1 tag occurs only in the validation data (2 rows) and never in the training data: I-MISC",
    ):
        assert said.count(line) == 1, said
    assert "not well formed" not in said
    classes = json.loads((tmp_path / "out" / "config.json").read_text())["id2label"]
    assert classes == {"0": "I-LOC", "1": "I-MISC", "2": "I-PER", "3": "O"}
    # 18 sentences with an entity each, which the model learns, and two with one it has never seen.
    assert found["eval_recall"] == pytest.approx(18 / 20) and found["eval_f1_MISC"] == 0
    again = ["--do_predict", f"--test_file={tmp_path}/test", f"--model_name_or_path={tmp_path}/out", *SHORT]
    assert launch.call(main, *again) != 0
    assert "test: neither its ending (none) nor its contents" in launch.only_error(capsys.readouterr().err)
    results(main, *again, "--file_format=conll", output_dir=tmp_path / "again")
    tags = [[IOB1.get(tag, tag) for tag in row] for _, row in ROWS[:18]]
    assert [line["tags"] for line in predictions(tmp_path / "again")] == tags


@pytest.mark.slow
def test_two_processes_have_the_same_classes_as_one(conll_2003, tmp_path):
    flags = [f"--train_file={conll_2003}/eng.train", f"--validation_file={conll_2003}/eng.testa"]
    flags += [*SHORT, "--max_steps=3", "--dropout=0"]
    one = results(main, *flags, output_dir=tmp_path / "one")
    two = launch.run(RECIPE, *flags, output_dir=tmp_path / "two", nproc=2)
    assert two["world_size"] == 2
    assert two["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-4)
    classes = [json.loads((tmp_path / run / "config.json").read_text())["id2label"] for run in ("one", "two")]
    assert classes[0] == classes[1] and len(classes[0]) == 4


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--train_file={files}/train.jsonl", "--tags_column=ner_tag"], "did you mean ner_tags"),
        (["--train_file={files}/test.jsonl"], "--tags_column"),
        (["--train_file={files}/train.jsonl", "--tag_scheme=iob"], "--tag_scheme"),
        (["--train_file={files}/train.jsonl", "--max_length=2"], "--max_length 2"),
    ],
)
def test_faults_are_one_line(flags, expected, files, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert launch.call(main, *(flag.format(files=files) for flag in flags)) != 0
    assert expected in launch.only_error(capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["none", "zero2", "zero3"])
def test_two_processes_score_a_model_as_one(preset, trained, files, tmp_path):
    """After a step that changes nothing, for ZeRO-2 takes no run that trains nothing."""
    folder, found = trained
    two = launch.run(
        RECIPE,
        *SHORT,
        f"--model_name_or_path={folder}",
        "--do_train",
        "--do_eval",
        "--max_steps=1",
        "--learning_rate=0",
        f"--train_file={files}/train.jsonl",
        f"--validation_file={files}/dev.jsonl",
        f"--preset={preset}",
        output_dir=tmp_path / "two",
        nproc=2,
    )
    assert two["world_size"] == 2
    for name in ("f1", "precision", "recall", "accuracy"):
        assert two[f"eval_{name}"] == pytest.approx(found[f"eval_{name}"], abs=1e-9), name
    assert two["eval_loss"] == pytest.approx(found["eval_loss"], rel=1e-5)


@pytest.mark.slow
def test_two_processes_train_with_zero3(files, tmp_path):
    flags = [*SHORT, f"--train_file={files}/train.jsonl", "--max_steps=3", "--preset=zero3"]
    found = launch.run(RECIPE, *flags, output_dir=tmp_path / "out", nproc=2)
    assert (found["engine"], found["world_size"]) == ("deepspeed-zero3", 2)
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 0


@pytest.mark.slow
def test_built_in_data_beats_its_baseline(tmp_path):
    found = launch.run(RECIPE, output_dir=tmp_path / "out")
    assert found["eval_f1"] > found["eval_f1_baseline"] + 0.5
