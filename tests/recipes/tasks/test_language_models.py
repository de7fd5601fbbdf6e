"""Causal and masked language models as their users meet them."""

from __future__ import annotations

import json

import pytest
import torch
from datasets import Dataset
from transformers import DataCollatorForTokenClassification, DataCollatorWithPadding

from recipes import causal_lm, masked_lm
from tests import launch
from tests.recipes.seq2seq_runs import predictions, results, write
from tests.recipes.stock import compare_with_stock

SHORT = (
    "--max_length=32",
    "--max_tokens_per_device=256",
    "--tokens_per_step=256",
    "--logging_steps=1",
    "--save_strategy=no",
    "--eval_strategy=no",
)
WORDS = ("file", "socket", "thread", "class", "module", "string")
TEXTS = [f"the {word} opens the {other} and closes the {word}" for word in WORDS for other in WORDS] * 2
CHATS = [[("user", f"name {word}"), ("assistant", f"it is a {word}")] for word in WORDS] * 12


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write(folder / "texts.jsonl", [{"text": text} for text in TEXTS])
    write(folder / "dev.jsonl", [{"text": text} for text in TEXTS[:12]])
    turns = [[{"role": role, "content": content} for role, content in chat] for chat in CHATS]
    write(folder / "chats.jsonl", [{"messages": chat} for chat in turns])
    write(folder / "asked.jsonl", [{"messages": chat[:1]} for chat in turns[:6]])
    return folder


def flags(files, name="texts", dev="dev"):
    return f"--train_file={files}/{name}.jsonl", f"--validation_file={files}/{dev}.jsonl"


@pytest.fixture(scope="module")
def causal(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("causal")
    return folder, results(causal_lm.main, *SHORT, *flags(files), "--max_steps=25", output_dir=folder)


@pytest.fixture(scope="module")
def masked(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("masked")
    return folder, results(masked_lm.main, *SHORT, *flags(files), "--max_steps=25", output_dir=folder)


def run_card(folder, capsys) -> str:
    """Runs the code of the model card; returns what it prints."""
    code = (folder / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    capsys.readouterr()
    exec(code, {"FOLDER": str(folder)})
    return capsys.readouterr().out


def test_both_beat_the_frequencies_of_the_tokens(causal, masked):
    for _, found in (causal, masked):
        assert found["eval_perplexity"] < 0.7 * found["eval_perplexity_baseline"]


def test_the_code_of_the_cards_runs(causal, masked, capsys):
    assert run_card(causal[0], capsys).strip().startswith("Return the")
    assert "token_str" in run_card(masked[0], capsys)


def test_packed_training_rows_are_scored_like_any(files, causal, tmp_path):
    """The learning rate is 0: both runs score the initial model, and trained on the same documents."""
    still = (*SHORT, *flags(files), "--learning_rate=0", "--max_steps=4")
    plain = results(causal_lm.main, *still, output_dir=tmp_path / "plain")
    dump = tmp_path / "dump.jsonl"
    packed = results(
        causal_lm.main, *still, "--packing", f"--dump_batches={dump}", output_dir=tmp_path / "packed"
    )
    assert packed["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-6)
    batches = [json.loads(line) for line in dump.read_text().splitlines()]
    real, computed = (sum(batch[f"{kind}_tokens"] for batch in batches) for kind in ("real", "computed"))
    # A pack of 32 holds one text of 20 to 26 tokens, or is filled with what fits.
    assert real / computed > 0.6 and packed["train_loss"] == pytest.approx(plain["train_loss"], rel=0.05)


@pytest.mark.slow
def test_conversations_are_answered(files, tmp_path):
    """It learns to name what it was asked for, and predictions.jsonl shows it."""
    results(
        causal_lm.main,
        *SHORT,
        *flags(files, "chats", "chats"),
        f"--test_file={files}/asked.jsonl",
        "--do_train",
        "--do_eval",
        "--do_predict",
        "--max_steps=180",
        "--learning_rate=3e-3",
        "--max_new_tokens=12",
        output_dir=tmp_path / "chat",
    )
    lines = predictions(tmp_path / "chat")
    assert [line["row"] for line in lines] == list(range(6))
    assert [line["prediction"] for line in lines] == [f"it is a {word}" for word in WORDS]


def test_causal_steps_equal_the_stock_trainer(files, tmp_path):
    def collator(recipe):
        pad = DataCollatorWithPadding(recipe.tokenizer)

        def collate(rows):
            batch = pad([{"input_ids": row["input_ids"]} for row in rows])
            batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
            return batch

        return collate

    train, dev = f"{files}/texts.jsonl", f"{files}/dev.jsonl"
    compare_with_stock(causal_lm.build, tmp_path, collator=collator, train_file=train, validation_file=dev)


def test_masked_steps_equal_the_stock_trainer(files, tmp_path):
    def rows_of(recipe, keys):
        """The rows with the masks of the recipe; the loss is the stock Trainer's."""
        found = []
        for key in keys:
            for row in key["rows"]:
                example = recipe.datasets["train"][row]
                alone = recipe.task.collate_rows([example], epoch=key["epoch"], rows=[row])
                found.append({name: alone[name][0].tolist() for name in ("input_ids", "labels")})
        return Dataset.from_list(found)

    compare_with_stock(
        masked_lm.build,
        tmp_path,
        collator=lambda recipe: DataCollatorForTokenClassification(recipe.tokenizer),
        rows_of=rows_of,
        train_file=f"{files}/texts.jsonl",
        validation_file=f"{files}/dev.jsonl",
    )


@pytest.mark.parametrize(
    ("main", "more", "expected"),
    [
        (causal_lm.main, ["--text_column=txt"], "did you mean text"),
        (causal_lm.main, ["--max_length=600"], "--max_length 512"),
        (causal_lm.main, ["--block_size=1"], "--block_size"),
        (masked_lm.main, ["--mlm_probability=1.5"], "--mlm_probability"),
        (masked_lm.main, ["--packing"], "unknown flag --packing"),
    ],
)
def test_faults_are_one_line(main, more, expected, files, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert launch.call(main, *flags(files), *more) != 0
    assert expected in launch.only_error(capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["none", "zero2", "zero3"])
@pytest.mark.parametrize("recipe", ["causal_lm", "masked_lm"])
def test_two_processes_score_a_model_as_one(recipe, preset, causal, masked, files, tmp_path):
    """Two train a few steps and evaluate; one scores what they saved, in other batches."""
    folder, _ = causal if recipe == "causal_lm" else masked
    data = f"--validation_file={files}/dev.jsonl"
    two = launch.run(
        recipe,
        *SHORT,
        f"--model_name_or_path={folder}",
        *("--do_train", "--do_eval", "--max_steps=3", f"--train_file={files}/texts.jsonl", data),
        f"--preset={preset}",
        output_dir=tmp_path / "two",
        nproc=2,
    )
    assert two["world_size"] == 2
    main = causal_lm.main if recipe == "causal_lm" else masked_lm.main
    saved = f"--model_name_or_path={tmp_path / 'two'}"
    narrow = [flag for flag in SHORT if "max_tokens_per_device" not in flag] + ["--max_tokens_per_device=64"]
    found = results(main, *narrow, saved, "--do_eval", data, output_dir=tmp_path / "one")
    assert two["eval_token_accuracy"] == pytest.approx(found["eval_token_accuracy"], abs=1e-9)
    for name in ("perplexity", "loss"):
        assert two[f"eval_{name}"] == pytest.approx(found[f"eval_{name}"], rel=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["none", "zero2", "zero3"])
def test_two_processes_train_on_packs_as_one(preset, files, tmp_path):
    """The same losses as one process, step by step."""
    # The built-in Llama has no dropout.
    steps = (*SHORT, *flags(files), "--packing", "--max_steps=4", "--tokens_per_step=512")
    losses = {}
    for nproc, engine in ((1, "none"), (2, preset)):
        folder = tmp_path / f"{nproc}"
        launch.run("causal_lm", *steps, f"--preset={engine}", output_dir=folder, nproc=nproc)
        losses[nproc] = launch.losses(folder)
    assert losses[2] == pytest.approx(losses[1], rel=1e-4)
    assert torch.tensor(losses[1]).isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "share"), [("causal_lm", 0.4), ("masked_lm", 0.8)])
def test_built_in_data_beats_its_baseline(recipe, share, tmp_path):
    found = launch.run(recipe, output_dir=tmp_path / "out")
    assert found["eval_perplexity"] < share * found["eval_perplexity_baseline"]
