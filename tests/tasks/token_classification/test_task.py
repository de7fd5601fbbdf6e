"""The task without a Trainer: scores, evaluation of a trained model, built-in data."""

from __future__ import annotations

import json

import numpy as np
import pytest
import seqeval.metrics
import torch
from datasets import DatasetDict
from sklearn.metrics import accuracy_score, f1_score

from hf_dist.config import DataConfig, ModelConfig
from hf_dist.data.builtin import small_models
from hf_dist.errors import DataError
from hf_dist.tasks.token_classification.task import TokenClassification
from tests.tasks.token_classification.tagged import BIO, NO_MODEL, json_lines, loaded, perfect


def test_scores_are_those_of_seqeval_by_word(tmp_path):
    """Predictions that are right but for one word, and a baseline that is recomputed here."""
    validation = [(["Lee", "saw", "Paris"], ["B-PER", "O", "B-LOC"]), (["old", "Rome"], ["B-LOC", "I-LOC"])]
    train = [*BIO, (["x"], ["I-LOC"])]
    task, _, encoded, _ = loaded(tmp_path, train=train, validation=validation)
    rows = encoded["validation"]
    predictions = perfect(task, rows)
    predictions[1][rows[1]["first"][0]] = task.classes.index("O")
    scores = task.score(predictions, rows)
    references = [tags for _, tags in validation]
    found = [["B-PER", "O", "B-LOC"], ["O", "I-LOC"]]
    assert scores["f1"] == pytest.approx(seqeval.metrics.f1_score(references, found), abs=1e-12)
    assert scores["accuracy"] == 4 / 5
    # Lee: once I-PER and once B-PER (the smaller id wins); Rome B-LOC; old O; saw and Paris are new: O.
    guesses = [["B-PER", "O", "O"], ["O", "B-LOC"]]
    assert scores["f1_baseline"] == pytest.approx(seqeval.metrics.f1_score(references, guesses), abs=1e-12)
    assert scores["accuracy_baseline"] == 2 / 5
    assert task.best_metric == "f1"


def test_plain_tags_and_numbers(tmp_path):
    rows = [(["a", "b"], [10, 2]), (["b", "a", "c"], [2, 10, 10]), (["b"], [2])]
    task, _, encoded, _ = loaded(tmp_path, train=rows, validation=rows[:2])
    assert task.classes == ("2", "10") and task.scheme == "plain" and task.best_metric == "accuracy"
    predictions = perfect(task, encoded["validation"])
    predictions[0][encoded["validation"][0]["first"][0]] = 0
    true, found = ["10", "2", "2", "10", "10"], ["2", "2", "2", "10", "10"]
    assert task.score(predictions, encoded["validation"]) == pytest.approx(
        {
            "accuracy": accuracy_score(true, found),
            "f1_macro": f1_score(true, found, average="macro"),
            "accuracy_baseline": 1.0,
            "f1_macro_baseline": 1.0,
        },
        abs=1e-12,
    )


def test_evaluation_alone_takes_the_tags_of_the_model(tmp_path):
    names = {0: "O", 1: "I-LOC", 2: "B-LOC", 3: "B-PER", 4: "I-PER"}
    small_models.small_bert(small_models.bpe_tokenizer(), id2label=names).save_pretrained(tmp_path / "m")
    small_models.bpe_tokenizer().save_pretrained(tmp_path / "m")
    model = ModelConfig(model_name_or_path=str(tmp_path / "m"))
    data = DataConfig(validation_file=json_lines(tmp_path / "dev.jsonl", BIO), max_length=64)
    task = TokenClassification()
    raw = task.load(data, model)
    assert task.classes == tuple(names.values())
    assert raw["validation"]["tags"][1] == [2, 0, 0]
    encoded, _ = task.encode(raw, task.tokenizer(data, model), data)
    # Without training rows the baseline is the commonest tag of these rows, O: 7 of 13 words.
    scores = task.score(perfect(task, encoded["validation"]), encoded["validation"])
    assert (scores["f1"], scores["f1_baseline"], scores["accuracy_baseline"]) == (1.0, 0.0, 7 / 13)
    with pytest.raises(DataError, match="--train_file"):
        TokenClassification().load(data, NO_MODEL)


def test_a_test_split_without_tags_can_be_predicted(tmp_path):
    path = tmp_path / "test.jsonl"
    path.write_text(json.dumps({"tokens": ["Rome", "fell"]}) + "\n")
    task, tokenizer, _, _ = loaded(tmp_path)
    data = DataConfig(
        train_file=str(tmp_path / "train.jsonl"),
        validation_file=str(tmp_path / "dev.jsonl"),
        test_file=str(path),
    )
    raw = task.load(data, NO_MODEL)
    encoded, _ = task.encode(raw, tokenizer, data)
    assert "labels" not in encoded["test"].column_names
    assert "labels" not in task.collate([encoded["test"][0]])
    tags = np.full(len(encoded["test"][0]["input_ids"]), task.classes.index("O"))
    assert list(task.records([tags], encoded["test"])) == [{"tokens": ["Rome", "fell"], "tags": ["O", "O"]}]


def test_built_in_data_end_to_end():
    task = TokenClassification()
    data = DataConfig(max_train_samples=32, max_eval_samples=8, max_predict_samples=8, max_length=64)
    raw = task.load(data, NO_MODEL)
    assert isinstance(raw, DatasetDict) and task.scheme == "iob2"
    tokenizer = task.tokenizer(data, NO_MODEL)
    config = task.model_config(tokenizer, NO_MODEL)
    encoded, _ = task.encode(raw, tokenizer, data)
    assert config.id2label == dict(enumerate(task.classes)) and len(encoded["train"]) == 32
    assert set(encoded["train"].column_names) == {"input_ids", "token_type_ids", "labels"}
    torch.manual_seed(0)
    model = task.auto_class.from_config(config)
    batch = task.collate([encoded["train"][at] for at in range(16)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(12):
        outputs = model(**batch)
        losses.append(outputs.loss.item())
        outputs.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[0] == pytest.approx(np.log(len(task.classes)), abs=0.5) and losses[-1] < 0.6 * losses[0]
