"""Question answering as its users meet it: files, a trained model, its card, two processes and ZeRO-3."""

from __future__ import annotations

import json

import pytest
from transformers import default_data_collator

from recipes.question_answering import build, main
from tests import launch
from tests.recipes.seq2seq_runs import predictions, results, write
from tests.recipes.stock import compare_with_stock

RECIPE = "question_answering"
WAYS = ("left", "right", "up", "down", "end")
WORDS = ("file", "class", "string", "method", "object")
SHORT = (
    "--max_length=32",
    "--max_question_tokens=8",
    "--doc_stride=8",
    "--max_tokens_per_device=512",
    "--tokens_per_step=512",
    "--logging_steps=1",
    "--save_strategy=no",
    "--eval_strategy=no",
)


def question(at: int, *, answered: bool = True) -> dict:
    """A way, or nothing, among other words."""
    words = [WORDS[(at * place + place) % 5] for place in range(2, 12)]
    way = WAYS[at % 5]
    words.insert(at % 7, way)
    context = "the " + " ".join(words if answered else [word for word in words if word != way])
    answers = {"text": [way], "answer_start": [context.index(way)]} if answered else None
    return {
        "id": f"q{at}",
        "question": "which way?",
        "context": context,
        "answers": answers or {"text": [], "answer_start": []},
    }


ROWS = [question(at) for at in range(120)]
NEGATIVES = [question(at, answered=at % 3 != 0) for at in range(120)]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write(folder / "train.jsonl", ROWS)
    write(folder / "dev.jsonl", ROWS[:20])
    write(folder / "negatives.jsonl", NEGATIVES)
    long = [
        {**row, "context": f"{'the file class object method string ' * 5}{row['context']}"}
        for row in NEGATIVES[:7]
    ]
    write(
        folder / "test.jsonl", [{name: row[name] for name in ("id", "question", "context")} for row in long]
    )
    paragraphs = [
        {
            "context": row["context"],
            "qas": [
                {
                    "id": row["id"],
                    "question": row["question"],
                    "is_impossible": not row["answers"]["text"],
                    "answers": [
                        {"text": text, "answer_start": start}
                        for text, start in zip(*row["answers"].values(), strict=True)
                    ],
                }
            ],
        }
        for row in NEGATIVES[:20]
    ]
    squad = {"version": "v2.0", "data": [{"title": "ways", "paragraphs": paragraphs}]}
    (folder / "dev.json").write_text(json.dumps(squad))
    return folder


@pytest.fixture(scope="module")
def trained(files, tmp_path_factory):
    """A model trained on the files with negatives, and its results on SQuAD JSON."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    flags = [f"--train_file={files}/negatives.jsonl", f"--validation_file={files}/dev.json"]
    return folder, results(main, *SHORT, *flags, "--max_steps=80", "--learning_rate=3e-3", output_dir=folder)


def test_results(trained):
    _, found = trained
    for name in ("exact_match", "f1", "has_answer_f1", "no_answer_exact", "best_f1", "f1_baseline", "loss"):
        assert isinstance(found[f"eval_{name}"], float), name
    # No constant sentence is a single way; answering nothing is right in every third row (7 of 20).
    assert found["eval_f1_baseline"] == pytest.approx(35.0)
    assert found["eval_f1"] > 90


def test_the_model_card_runs(trained, capsys):
    folder, _ = trained
    card = (folder / "README.md").read_text()
    code = card.partition("```python\n")[2].partition("```")[0]
    assert "max_length=32, doc_stride=8" in code and "null_threshold=0.0" in code
    capsys.readouterr()
    exec(code, {"FOLDER": str(folder)})
    assert "Answer(text=" in capsys.readouterr().out


def test_eval_and_predict_alone(trained, files, tmp_path):
    """In other batches; long contexts, of several windows, are answered once a question and in order."""
    folder, found = trained
    again = results(
        main,
        *SHORT,
        f"--model_name_or_path={folder}",
        "--do_eval",
        "--do_predict",
        "--version_2_with_negative",
        "--max_tokens_per_device=64",
        f"--validation_file={files}/dev.json",
        f"--test_file={files}/test.jsonl",
        output_dir=tmp_path / "again",
    )
    assert again["eval_loss"] == pytest.approx(found["eval_loss"], rel=1e-5)
    assert again["eval_f1"] == found["eval_f1"]
    lines = predictions(tmp_path / "again")
    assert [line["row"] for line in lines] == list(range(7))
    assert [line["id"] for line in lines] == [f"q{at}" for at in range(7)]
    # Of three windows each, the last of which holds the answer.
    assert [line["prediction"] for line in lines] == [WAYS[at % 5] if at % 3 else "" for at in range(7)]
    assert all((line["null_score"] > 0) == (line["prediction"] == "") for line in lines)


def test_ten_steps_equal_the_stock_trainer(tmp_path):
    """On rows of one length: the stock loss lets padding take part in the softmax, ours doesn't."""
    rows = [row for row in (question(at) for at in range(200)) if len(row["context"].split()) == 12][:80]
    write(tmp_path / "train.jsonl", rows)
    recipe = compare_with_stock(
        build,
        tmp_path,
        collator=lambda _: default_data_collator,
        max_question_tokens=8,
        doc_stride=8,
        train_file=str(tmp_path / "train.jsonl"),
        validation_file=str(tmp_path / "train.jsonl"),
    )
    assert len({len(ids) for ids in recipe.datasets["train"]["input_ids"]}) == 1


def test_training_rows_can_be_streamed(files, tmp_path):
    flags = [f"--train_file={files}/train.jsonl", f"--validation_file={files}/dev.jsonl"]
    found = results(main, *SHORT, *flags, "--streaming", "--max_steps=4", output_dir=tmp_path / "out")
    losses = launch.losses(tmp_path / "out")
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert found["eval_f1"] >= 0


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--train_file={files}/train.jsonl", "--answers_column=answer"], "did you mean answers"),
        (["--train_file={files}/test.jsonl"], "--answers_column"),
        (["--train_file={files}/train.jsonl", "--max_length=16", "--doc_stride=8"], "leaves no room"),
        (["--n_best=0"], "--n_best is 0"),
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
        f"--train_file={files}/negatives.jsonl",
        f"--validation_file={files}/dev.json",
        f"--preset={preset}",
        output_dir=tmp_path / "two",
        nproc=2,
    )
    assert two["world_size"] == 2
    for name in ("exact_match", "f1", "has_answer_f1", "no_answer_exact", "best_f1"):
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
    assert found["eval_f1"] > found["eval_f1_baseline"] + 30
