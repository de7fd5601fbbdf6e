"""Summarization without a Trainer: columns, scores, the baseline and the lines that run a saved model."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from hf_dist.config import DataConfig, ModelConfig
from hf_dist.errors import DataError
from hf_dist.tasks.seq2seq.summarization import Summarization, SummarizationSettings

NO_MODEL = ModelConfig()


def load(tmp_path, rows, **settings):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = Summarization(SummarizationSettings(**settings))
    return task, task.load(DataConfig(train_file=str(path), validation_file=str(path)), NO_MODEL)


@pytest.mark.parametrize(
    ("columns", "settings"),
    [
        (("document", "summary"), {}),
        (("article", "highlights"), {}),
        (("Dialogue", "Summary"), {}),
        (("text", "target"), {}),
        (("a", "b"), {"text_column": "a", "summary_column": "b"}),
        (("a", "headline"), {"text_column": "a"}),
    ],
)
def test_columns(tmp_path, columns, settings):
    text, summary = columns
    _, raw = load(tmp_path, [{"id": 1, summary: "short", text: "long long"}], **settings)
    assert raw["train"][0] == {"source": "long long", "target": "short"}


@pytest.mark.parametrize(
    ("row", "settings", "says"),
    [
        ({"x": "1", "summary": "2"}, {}, "name one with --text_column"),
        ({"text": "1", "x": "2"}, {}, "name one with --summary_column"),
        ({"text": "1", "summary": "2"}, {"summary_column": "sumary"}, "did you mean summary"),
        ({"text": "1", "summary": "2"}, {"text_column": "summary", "summary_column": "summary"}, "summary"),
    ],
)
def test_columns_that_are_not_there(tmp_path, row, settings, says):
    with pytest.raises(DataError, match=says):
        load(tmp_path, [row], **settings)


def test_validation_needs_summaries(tmp_path):
    train, validation = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    train.write_text('{"text": "x", "summary": "y"}\n')
    validation.write_text('{"text": "x"}\n')
    with pytest.raises(DataError, match="validation data has no column summary"):
        Summarization().load(DataConfig(train_file=str(train), validation_file=str(validation)), NO_MODEL)


def test_scores_and_the_lead_baseline(tmp_path):
    rows = [
        {"text": "the cat sat on the mat today", "summary": "a cat sat"},
        {"text": "dogs bark", "summary": "loud dogs bark now and"},
    ]
    task, raw = load(tmp_path, rows, rouge_stemmer=False)
    # Summaries have 3 and 5 words, so the baseline answers with the first 4.
    assert task.baseline(raw["validation"]) == [
        "the cat sat on",
        "dogs bark",
    ]
    scores = task.score(["a cat sat", "dogs"], raw["validation"])
    assert scores["rouge1"] == pytest.approx((1 + 2 / (1 + 5)) / 2)
    assert scores["rougeL"] == pytest.approx((1 + 2 / 6) / 2)
    # Lead: 2 of 4 and 3 words, 2 of 2 and 5.
    assert scores["rougeL_baseline"] == pytest.approx((2 * 2 / 7 + 2 * 2 / 7) / 2)
    assert scores["generated_words"] == 2.0
    assert list(task.records(["p", "q"], raw["validation"])) == [
        {"prediction": "p", "target": "a cat sat"},
        {"prediction": "q", "target": "loud dogs bark now and"},
    ]


def test_scripts_that_rouge_does_not_know_are_not_scored_in_silence(tmp_path, caplog):
    task, raw = load(tmp_path, [{"text": "Дом стоит", "summary": "Дом"}])
    with caplog.at_level(logging.WARNING, "hf_dist"):
        assert task.score(["Дом"], raw["validation"])["rouge1"] == 0
    assert "1 of 1 summaries have none of the letters" in caplog.text


def test_without_training_rows_the_baseline_is_as_long_as_the_targets(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one two three four", "summary": "x y z"}\n')
    task = Summarization()
    raw = task.load(DataConfig(validation_file=str(path)), NO_MODEL)
    assert task.baseline(raw["validation"]) == ["one two three"]


def test_the_lines_of_the_model_card_run(tmp_path, capsys):
    task = Summarization(SummarizationSettings(max_target_length=8, source_prefix="summarize: "))
    data = DataConfig(max_train_samples=4, max_eval_samples=4, max_predict_samples=4, max_length=64)
    raw = task.load(data, NO_MODEL)
    tokenizer = task.tokenizer(data, NO_MODEL)
    model = AutoModelForSeq2SeqLM.from_config(task.model_config(tokenizer, NO_MODEL))
    # A fresh T5 writes nothing but padding.
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.3)
    task.encode(raw, tokenizer, data)
    task.prepare_for(model)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    capsys.readouterr()
    exec(task.usage(), {"FOLDER": str(tmp_path)})
    shown = capsys.readouterr().out
    batch = task.collate([{"input_ids": tokenizer("summarize: " + task.example)["input_ids"]}])
    assert shown.strip()
    assert shown == task.generate(model.eval(), batch, synced=False)[0] + "\n"
