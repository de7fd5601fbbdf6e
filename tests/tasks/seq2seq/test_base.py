"""What summarization and translation share: encoding, batches, generation, limits and faults."""

from __future__ import annotations

import json
import logging
import pickle
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    BartConfig,
    GenerationConfig,
    GPT2Config,
    MarianConfig,
    MBartConfig,
    T5Config,
)

from hf_dist.config import DataConfig, ModelConfig
from hf_dist.data.builtin import seq2seq as builtin_seq2seq
from hf_dist.errors import ConfigError, DataError
from hf_dist.tasks.items import TokenItems
from hf_dist.tasks.seq2seq.summarization import Summarization, SummarizationSettings
from hf_dist.training.steps.loss import StepLoss

NO_MODEL = ModelConfig()
ROWS = [
    {"document": "one two three four five six", "summary": "one two"},
    {"document": "seven eight", "summary": "a longer summary with many words in it"},
    {"document": "nine ten eleven twelve " * 3, "summary": "nine"},
]


def json_lines(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def tokenizer():
    return builtin_seq2seq.outline_tokenizer()


def config_of(kind: str, tokenizer):
    sizes = {"vocab_size": len(tokenizer), "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    if kind == "t5":
        return T5Config(**sizes, d_model=32, d_kv=8, num_heads=4, d_ff=64, num_layers=2)
    small = {
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_position_embeddings": 64,
        "bos_token_id": 0,
    }
    return {"bart": BartConfig, "marian": MarianConfig, "mbart": MBartConfig}[kind](
        **sizes, **small, forced_eos_token_id=None
    )


def saved(folder: Path, config, tokenizer) -> ModelConfig:
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return ModelConfig(model_name_or_path=str(folder))


def prepared(tmp_path, rows=ROWS, model=NO_MODEL, *, max_length=32, pad_to_multiple_of=1, **settings):
    path = json_lines(tmp_path / "rows.jsonl", rows)
    data = DataConfig(train_file=path, validation_file=path, max_length=max_length)
    task = Summarization(SummarizationSettings(**settings), pad_to_multiple_of=pad_to_multiple_of)
    raw = task.load(data, model)
    found = task.tokenizer(data, model)
    config = task.model_config(found, model)
    encoded, truncated = task.encode(raw, found, data)
    return task, encoded, truncated, config


def test_rows_hold_two_lists_and_evaluation_keeps_its_texts(tmp_path, tokenizer):
    task, encoded, truncated, _ = prepared(tmp_path, max_length=8, max_target_length=6)
    assert task.items == TokenItems()
    assert set(encoded["train"].column_names) == {"input_ids", "labels"}
    assert set(encoded["validation"].column_names) == {"input_ids", "labels", "source", "target"}
    for row, given in zip(encoded["validation"], ROWS, strict=True):
        whole = tokenizer(given["document"])["input_ids"], tokenizer(given["summary"])["input_ids"]
        assert row["input_ids"] == (whole[0] if len(whole[0]) <= 8 else [*whole[0][:7], 1])
        assert row["labels"] == (whole[1] if len(whole[1]) <= 6 else [*whole[1][:5], 1])
        # Scores see the whole target.
        assert row["target"] == given["summary"]
    cut = sum(len(tokenizer(row["document"])["input_ids"]) > 8 for row in ROWS)
    assert truncated == {"train": cut, "validation": cut} and cut > 0


def test_cut_targets_are_counted(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "hf_dist"):
        prepared(tmp_path, max_target_length=6)
    assert "train: 1 of 3 targets cut to --max_target_length 6 tokens" in caplog.text


def test_the_prefix_stands_before_every_source(tmp_path, tokenizer):
    _, encoded, _, _ = prepared(tmp_path, source_prefix="summarize: ")
    assert encoded["train"][1]["input_ids"] == tokenizer("summarize: seven eight")["input_ids"]
    assert encoded["validation"][1]["source"] == "seven eight"


@pytest.mark.parametrize("multiple", [1, 8])
def test_batches(tmp_path, multiple):
    task, encoded, _, _ = prepared(tmp_path, pad_to_multiple_of=multiple)
    rows = [encoded["train"][place] for place in range(3)]
    batch = task.collate(rows)
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    for name, lists, fill in (("input_ids", "input_ids", 0), ("labels", "labels", -100)):
        longest = max(len(row[lists]) for row in rows)
        assert batch[name].shape == (3, -(-longest // multiple) * multiple)
        for row, ids in zip(batch[name].tolist(), (row[lists] for row in rows), strict=True):
            assert row == ids + [fill] * (len(row) - len(ids))
    assert batch["attention_mask"].sum(1).tolist() == [len(row["input_ids"]) for row in rows]
    sent = pickle.loads(pickle.dumps(task)).collate(rows)
    assert all(torch.equal(sent[name], batch[name]) for name in batch)


@pytest.mark.parametrize("kind", ["t5", "bart", "marian", "mbart"])
def test_models_make_their_decoder_inputs_of_the_labels(kind, tmp_path, tokenizer):
    """As `prepare_decoder_input_ids_from_labels` does; and the loss is the mean over target tokens."""
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(config_of(kind, tokenizer)).eval()
    task, encoded, _, _ = prepared(tmp_path)
    rows = [encoded["train"][place] for place in range(3)]
    batch = task.collate(rows)
    given = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    items = sum(len(row["labels"]) for row in rows)
    with torch.no_grad():
        ours, outputs = StepLoss(task.items).mean(model, batch, items, keep_labels=True)
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        explicit = model(**inputs, decoder_input_ids=given)["logits"]
        alone = [model(**task.collate([row]))["loss"] * len(row["labels"]) for row in rows]
    counted = batch["labels"] != -100
    assert torch.allclose(outputs["logits"][counted], explicit[counted], atol=1e-5)
    # A row's loss does not depend on the rows that it is padded with.
    assert ours.item() == pytest.approx(sum(map(float, alone)) / items, rel=1e-5)


@pytest.mark.parametrize("kind", ["t5", "bart", "marian"])
@pytest.mark.parametrize("num_beams", [1, 3])
def test_generated_texts_do_not_depend_on_the_batch(kind, num_beams, tmp_path, tokenizer):
    torch.manual_seed(0)
    config = config_of(kind, tokenizer)
    # With the weights of a fresh model, the texts don't depend on the source.
    config.tie_word_embeddings = False
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.5)
    task, encoded, _, _ = prepared(tmp_path, num_beams=num_beams, val_max_target_length=8)
    rows = [encoded["validation"][place] for place in range(3)]
    together = task.generate(model, task.collate(rows), synced=False)
    alone = [task.generate(model, task.collate([row]), synced=False)[0] for row in rows]
    reverse = task.generate(model, task.collate(rows[::-1]), synced=False)
    assert together == alone == reverse[::-1]
    assert len(set(together)) > 1 and all(text == text.strip() for text in together)


def test_greedy_generation_takes_the_likeliest_token_each_time(tmp_path, tokenizer):
    torch.manual_seed(1)
    model = AutoModelForSeq2SeqLM.from_config(config_of("t5", tokenizer)).eval()
    task, encoded, _, _ = prepared(tmp_path, val_max_target_length=5)
    batch = task.collate([encoded["validation"][0]])
    tokens = [0]
    with torch.no_grad():
        for _ in range(5):
            logits = model(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                decoder_input_ids=torch.tensor([tokens]),
            )["logits"]
            tokens.append(int(logits[0, -1].argmax()))
            if tokens[-1] == 1:
                break
    wanted = tokenizer.decode(tokens, skip_special_tokens=True).strip()
    assert task.generate(model, batch, synced=False) == [wanted]


def test_without_labels_a_batch_can_be_generated_from(tmp_path, tokenizer):
    path = json_lines(tmp_path / "test.jsonl", [{"document": "one two"}, {"document": "three"}])
    train = json_lines(tmp_path / "train.jsonl", ROWS)
    data = DataConfig(train_file=train, validation_file=train, test_file=path, max_length=32)
    task = Summarization(SummarizationSettings(val_max_target_length=4))
    raw = task.load(data, NO_MODEL)
    config = task.model_config(tokenizer, NO_MODEL)
    encoded, _ = task.encode(raw, tokenizer, data)
    assert set(encoded["test"].column_names) == {"input_ids", "source"}
    batch = task.collate([encoded["test"][0], encoded["test"][1]])
    assert "labels" not in batch
    texts = task.generate(AutoModelForSeq2SeqLM.from_config(config), batch, synced=False)
    assert list(task.records(texts, encoded["test"])) == [{"prediction": text} for text in texts]


# ---- The saved generation config ----


def test_the_generation_config_says_what_evaluation_does(tmp_path, tokenizer):
    task, _, _, config = prepared(tmp_path, max_target_length=20)
    model = AutoModelForSeq2SeqLM.from_config(config)
    task.prepare_for(model)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    found = GenerationConfig.from_pretrained(tmp_path / "model")
    found.validate(strict=True)
    assert (found.max_new_tokens, found.num_beams, found.do_sample) == (20, 1, False)
    assert (found.decoder_start_token_id, found.eos_token_id, found.pad_token_id) == (0, 1, 0)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model")
    tokens = loaded.generate(**tokenizer("one two", return_tensors="pt"))
    assert tokens.shape[1] <= 21


def test_what_a_model_brings_is_kept_where_it_has_an_effect():
    inherited = GenerationConfig(
        max_length=142, min_length=56, num_beams=4, length_penalty=2.0, early_stopping=True,
        no_repeat_ngram_size=3, forced_bos_token_id=0, temperature=0.7, do_sample=True,
    )  # fmt: skip
    greedy = Summarization(SummarizationSettings(max_target_length=40)).generation_config(inherited)
    greedy.validate(strict=True)
    assert (greedy.num_beams, greedy.max_new_tokens, greedy.max_length, greedy.min_length) == (
        1,
        40,
        None,
        None,
    )
    assert (greedy.length_penalty, greedy.early_stopping, greedy.temperature) == (None, None, None)
    assert (greedy.no_repeat_ngram_size, greedy.forced_bos_token_id, greedy.do_sample) == (3, 0, False)
    settings = SummarizationSettings(max_target_length=60, num_beams=2)
    beams = Summarization(settings).generation_config(inherited)
    beams.validate(strict=True)
    assert (beams.num_beams, beams.length_penalty, beams.early_stopping, beams.min_length) == (
        2,
        2.0,
        True,
        56,
    )
    assert inherited.num_beams == 4, "the model's own is left as it is"


# ---- Faults ----


def test_rows_without_tokens_are_left_out_of_training_and_counted(tmp_path, caplog):
    blank = [{"document": " ", "summary": "x"}, {"document": "x", "summary": ""}]
    with caplog.at_level(logging.WARNING, "hf_dist"):
        _, encoded, _, _ = prepared(tmp_path, [ROWS[0], *blank, ROWS[1]])
    assert len(encoded["train"]) == 2 and len(encoded["validation"]) == 4
    assert "train: 2 of 4 rows have a source or a target without tokens and are left out" in caplog.text
    assert "validation: 2 of 4 rows" in caplog.text


def test_all_rows_without_tokens_is_an_error(tmp_path):
    with pytest.raises(DataError, match="all 2 rows of the train data"):
        prepared(tmp_path, [{"document": "x", "summary": " "}] * 2)


@pytest.mark.parametrize("column", ["document", "summary"])
def test_nulls_are_named_by_row(tmp_path, column):
    rows = [ROWS[0], {**ROWS[1], column: None}]
    with pytest.raises(DataError, match=f"column {column} of the train data has no text in row 2"):
        prepared(tmp_path, rows)


def test_text_that_is_no_text(tmp_path):
    with pytest.raises(DataError, match=r"column summary .* holds numbers .*--summary_column"):
        prepared(tmp_path, [{"document": "x", "summary": 3}])


@pytest.mark.parametrize(
    ("settings", "max_length", "says"),
    [
        ({"max_target_length": 1}, 32, "--max_target_length 1 leaves no token of a target"),
        ({"source_prefix": "summarize this text: "}, 5, "--max_length 5 leaves no token of a source"),
        ({}, 1, "--max_length 1 leaves no token of a source"),
    ],
)
def test_limits_that_leave_nothing(tmp_path, settings, max_length, says):
    with pytest.raises(ConfigError, match=says):
        prepared(tmp_path, max_length=max_length, **settings)


@pytest.mark.parametrize("name", ["max_target_length", "val_max_target_length", "num_beams"])
def test_settings_are_at_least_one(name):
    with pytest.raises(ConfigError, match=f"--{name} is 0"):
        SummarizationSettings(**{name: 0})


def test_more_target_tokens_than_the_decoder_has_positions(tmp_path, tokenizer):
    model = saved(tmp_path / "m", config_of("bart", tokenizer), tokenizer)
    with pytest.raises(ConfigError, match="65, and the model's decoder has 64 positions; give at most 64"):
        prepared(tmp_path, model=model, max_target_length=65)
    with pytest.raises(ConfigError, match="is 100, and"):
        prepared(tmp_path, model=model, max_target_length=16, val_max_target_length=100)


def test_a_model_without_a_decoder_of_its_own(tmp_path, tokenizer):
    """Found before its tokenizer, which has no pad token, is complained of."""
    tokenizer.save_pretrained(tmp_path / "m")
    GPT2Config(n_embd=8, n_layer=1, n_head=1).save_pretrained(tmp_path / "m")
    with pytest.raises(ConfigError, match="is a gpt2 model without a separate decoder.*causal_lm"):
        prepared(tmp_path, model=ModelConfig(model_name_or_path=str(tmp_path / "m")))


def test_a_tokenizer_without_a_pad_token(tmp_path, tokenizer):
    """It pads with its end token, which stays a target at the end of each summary."""
    model = saved(tmp_path / "m", config_of("t5", tokenizer), tokenizer)
    file = tmp_path / "m" / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    del settings["pad_token"]
    file.write_text(json.dumps(settings))
    task, encoded, _, config = prepared(tmp_path, model=model)
    assert config.pad_token_id == tokenizer.eos_token_id == 1
    rows = list(encoded["train"])
    batch = task.collate(rows)
    for row, ids, mask, labels in zip(
        rows, batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True
    ):
        assert ids[mask.bool()].tolist() == row["input_ids"] and row["labels"][-1] == 1
        assert labels.tolist() == row["labels"] + [-100] * (len(labels) - len(row["labels"]))
    assert len({len(row["labels"]) for row in rows}) > 1


@pytest.mark.parametrize(("prefix", "warns"), [(None, True), ("summarize: ", False)])
def test_a_t5_model_without_a_prefix(tmp_path, tokenizer, caplog, prefix, warns):
    model = saved(tmp_path / "m", config_of("t5", tokenizer), tokenizer)
    with caplog.at_level(logging.WARNING, "hf_dist"):
        prepared(tmp_path, model=model, source_prefix=prefix)
    assert ("without --source_prefix" in caplog.text) == warns
