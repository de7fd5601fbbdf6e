"""The task without a Trainer: built-in data, local files, classes, scores and faults."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    GPT2Config,
)

from hf_dist.config import DataConfig, ModelConfig
from hf_dist.data.builtin import small_models
from hf_dist.errors import ConfigError, DataError
from hf_dist.tasks.items import ExampleItems
from hf_dist.tasks.text_classification.columns import TextClassificationSettings
from hf_dist.tasks.text_classification.task import TextClassification

NO_MODEL = ModelConfig()


def csv(path: Path, rows: list[tuple], header: str = "text,label") -> str:
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return str(path)


def json_lines(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def saved_model(folder: Path, config, tokenizer=None) -> ModelConfig:
    config.save_pretrained(folder)
    (tokenizer or small_models.bpe_tokenizer()).save_pretrained(folder)
    return ModelConfig(model_name_or_path=str(folder))


def small_bert(**fields) -> BertConfig:
    return small_models.small_bert(small_models.bpe_tokenizer(), **fields)


@pytest.fixture
def files(tmp_path):
    """Three training rows a class, and one of each to validate on."""
    train = csv(tmp_path / "train.csv", [(f"text {n}", label) for n in range(3) for label in ("b", "a", "c")])
    validation = csv(tmp_path / "validation.csv", [("x", "c"), ("y", "a"), ("z", "b")])
    return {"train_file": train, "validation_file": validation}


def test_built_in_data_end_to_end():
    task = TextClassification()
    data = DataConfig(max_train_samples=64, max_length=64)
    raw = task.load(data, NO_MODEL)
    tokenizer = task.tokenizer(data, NO_MODEL)
    config = task.model_config(tokenizer, NO_MODEL)
    encoded, truncated = task.encode(raw, tokenizer, data)
    assert len(encoded["train"]) == 64 and set(encoded) == set(truncated) == {"train", "validation", "test"}
    assert config.num_labels == 20 and config.id2label == dict(enumerate(task.classes))
    assert task.items == ExampleItems("single_label")

    torch.manual_seed(0)
    model = BertForSequenceClassification(config)
    rows = [encoded["train"][place] for place in range(16)]
    batch = task.collate(rows)
    lengths = [len(row["input_ids"]) for row in rows]
    assert batch["input_ids"].shape == (16, -(-max(lengths) // 8) * 8)
    assert batch["attention_mask"].sum(1).tolist() == lengths
    assert batch["labels"].tolist() == [row["labels"] for row in rows]

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    first = last = None
    for _ in range(15):
        outputs = model(**batch)
        last = outputs.loss.item()
        first = last if first is None else first
        outputs.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert first == pytest.approx(np.log(20), abs=0.5) and last < 0.75 * first
    model.eval()
    with torch.no_grad():
        predictions = task.predict(model(**batch), batch)
    scores = task.score(predictions, encoded["train"].select(range(16)))
    assert scores["accuracy"] == np.mean(
        [p == row["labels"] for (p, _), row in zip(predictions, rows, strict=True)]
    )


def test_baseline_answers_with_the_commonest_training_label(tmp_path):
    data = DataConfig(
        train_file=csv(tmp_path / "a.csv", [("t", "b"), ("t", "a"), ("t", "b")]),
        validation_file=csv(tmp_path / "b.csv", [("t", "a"), ("t", "a"), ("t", "b"), ("t", "a")]),
    )
    task = TextClassification()
    raw = task.load(data, NO_MODEL)
    scores = task.score([(0, 1.0)] * 4, raw["validation"])
    assert task.classes == ("a", "b")
    assert scores == pytest.approx({"accuracy": 0.75, "f1_macro": (6 / 7 + 0) / 2, "majority_baseline": 0.25})


@pytest.mark.parametrize("labels", [[3, 11, 2], [True, False, True], ["x", "y", "x"]])
def test_label_types(tmp_path, labels):
    rows = [{"sentence": f"text {place}", "target": label} for place, label in enumerate(labels)]
    path = json_lines(tmp_path / "a.jsonl", rows)
    task = TextClassification()
    raw = task.load(DataConfig(train_file=path, validation_file=path), NO_MODEL)
    order = sorted(set(labels))
    assert task.classes == tuple(str(label) for label in order)
    assert raw["train"]["labels"][:] == [order.index(label) for label in labels]
    assert set(raw["train"].column_names) == {"text", "labels"}


@pytest.mark.parametrize(
    "header, flags, texts",
    [
        ("premise,hypothesis,label", {}, ("p", "h")),
        ("question,sentence,label", {}, ("p", "h")),
        ("a,b,label", {"text_column": "a", "text_pair_column": "b"}, ("p", "h")),
        ("b,a,label", {"text_column": "a", "text_pair_column": "b"}, ("h", "p")),
    ],
)
def test_pairs(tmp_path, header, flags, texts):
    path = csv(tmp_path / "a.csv", [("p", "h", "yes"), ("p", "h", "no")], header)
    data = DataConfig(train_file=path, validation_file=path)
    task = TextClassification(TextClassificationSettings(**flags))
    raw = task.load(data, NO_MODEL)
    assert (raw["train"]["text"][0], raw["train"]["text_pair"][0]) == texts
    tokenizer = task.tokenizer(data, NO_MODEL)
    task.model_config(tokenizer, NO_MODEL)
    encoded, _ = task.encode(raw, tokenizer, data)
    assert encoded["train"]["input_ids"][0] == tokenizer(*texts)["input_ids"]
    assert task.collate([encoded["train"][0]])["token_type_ids"][0, :5].tolist() == [0, 0, 0, 1, 1]


def test_one_column_of_a_usual_pair_can_be_asked_for(tmp_path):
    path = csv(tmp_path / "a.csv", [("p", "h", "yes"), ("p", "h", "no")], "premise,hypothesis,label")
    data = DataConfig(train_file=path, validation_file=path)
    settings = TextClassificationSettings(text_column="hypothesis")
    assert set(TextClassification(settings).load(data, NO_MODEL)["train"].column_names) == {"text", "labels"}


def test_held_out_rows_and_limits(tmp_path):
    path = csv(tmp_path / "a.csv", [(f"text {n}", "ab"[n % 2]) for n in range(40)])
    task = TextClassification()
    raw = task.load(DataConfig(train_file=path, max_train_samples=10, validation_fraction=0.2), NO_MODEL)
    assert len(raw["train"]) == 10 and len(raw["validation"]) == 8
    assert set(raw["train"]["text"]).isdisjoint(raw["validation"]["text"])
    assert sum(raw["validation"]["labels"]) == 4


def test_labels_are_those_of_all_training_rows_and_not_of_the_first(files):
    task = TextClassification()
    task.load(DataConfig(**files, max_train_samples=1), NO_MODEL)
    assert task.classes == ("a", "b", "c") and task.constant == 1


@pytest.mark.parametrize(
    "test_rows, header", [([("x",), ("y",)], "text"), ([("x", ""), ("y", "")], "text,label")]
)
def test_a_test_split_without_labels_can_be_predicted(files, tmp_path, test_rows, header):
    data = DataConfig(**files, test_file=csv(tmp_path / "test.csv", test_rows, header))
    task = TextClassification()
    raw = task.load(data, NO_MODEL)
    encoded, _ = task.encode(raw, task.tokenizer(data, NO_MODEL), data)
    assert "labels" not in encoded["test"].column_names
    assert "labels" not in task.collate([encoded["test"][0], encoded["test"][1]])


def test_a_training_set_of_one_row_needs_a_validation_file(tmp_path):
    one = csv(tmp_path / "one.csv", [("x", "a")])
    with pytest.raises(DataError, match="one label"):
        TextClassification().load(DataConfig(train_file=one), NO_MODEL)
    two = csv(tmp_path / "two.csv", [("x", "a"), ("y", "b")])
    with pytest.raises(DataError, match="--validation_file"):
        TextClassification().load(DataConfig(train_file=two), NO_MODEL)
    assert (
        len(TextClassification().load(DataConfig(train_file=two, validation_file=one), NO_MODEL)["train"])
        == 2
    )


def test_a_fine_tuned_model_keeps_its_classes(files, tmp_path):
    model = saved_model(tmp_path / "m", small_bert(id2label={0: "c", 1: "b", 2: "a", 3: "d"}))
    task = TextClassification()
    raw = task.load(DataConfig(**files), model)
    assert task.classes == ("c", "b", "a", "d")
    assert raw["validation"]["labels"][:] == [0, 2, 1]
    config = task.model_config(task.tokenizer(DataConfig(), model), model)
    assert config.id2label == {0: "c", 1: "b", 2: "a", 3: "d"}


def test_a_model_with_other_classes_gets_those_of_the_data(files, tmp_path):
    model = saved_model(tmp_path / "m", small_bert(id2label={0: "x", 1: "y"}))
    task = TextClassification()
    task.load(DataConfig(**files), model)
    config = task.model_config(task.tokenizer(DataConfig(), model), model)
    assert config.id2label == {0: "a", 1: "b", 2: "c"} and config.label2id == {"a": 0, "b": 1, "c": 2}
    assert config.num_labels == 3 and config.problem_type == "single_label_classification"


def test_evaluation_alone_takes_the_classes_of_the_model(files, tmp_path):
    data = DataConfig(validation_file=files["validation_file"])
    model = saved_model(tmp_path / "m", small_bert(id2label={0: "c", 1: "b", 2: "a"}))
    task = TextClassification()
    raw = task.load(data, model)
    assert raw["validation"]["labels"][:] == [0, 2, 1] and task.constant is None
    assert task.score([(0, 1.0)] * 3, raw["validation"])["majority_baseline"] == pytest.approx(1 / 3)
    with pytest.raises(DataError, match="--train_file"):
        TextClassification().load(data, NO_MODEL)
    other = saved_model(tmp_path / "n", small_bert(id2label={0: "c", 1: "b"}))
    with pytest.raises(DataError, match="the model never shows: a"):
        TextClassification().load(data, other)


def test_placeholder_names_of_a_model_stand_for_numbers(tmp_path):
    path = json_lines(tmp_path / "a.jsonl", [{"text": "x", "label": 2}, {"text": "y", "label": 0}])
    model = saved_model(tmp_path / "m", small_bert(num_labels=3))
    raw = TextClassification().load(DataConfig(validation_file=path), model)
    assert raw["validation"]["labels"][:] == [2, 0]


def test_a_batch_has_only_what_the_model_takes(files, tmp_path):
    tokenizer = small_models.bpe_tokenizer()
    config = DistilBertConfig(vocab_size=len(tokenizer), dim=32, n_layers=1, n_heads=2, hidden_dim=64)
    model = saved_model(tmp_path / "m", config, tokenizer)
    data, task = DataConfig(**files), TextClassification()
    raw = task.load(data, model)
    tokenizer = task.tokenizer(data, model)
    task.model_config(tokenizer, model)
    encoded, _ = task.encode(raw, tokenizer, data)
    assert set(task.collate([encoded["train"][0]])) == {"input_ids", "attention_mask", "labels"}


def test_decoder_models_are_told_the_pad_token(files, tmp_path):
    tokenizer = small_models.bpe_tokenizer()
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=1, n_head=2, n_positions=512)
    model = saved_model(tmp_path / "m", config, tokenizer)
    task = TextClassification()
    task.load(DataConfig(**files), model)
    assert (
        task.model_config(task.tokenizer(DataConfig(), model), model).pad_token_id == tokenizer.pad_token_id
    )


def test_it_can_be_sent_to_worker_processes(files):
    data, task = DataConfig(**files), TextClassification(pad_to_multiple_of=1)
    raw = task.load(data, NO_MODEL)
    tokenizer = task.tokenizer(data, NO_MODEL)
    task.model_config(tokenizer, NO_MODEL)
    encoded, _ = task.encode(raw, tokenizer, data)
    rows = [encoded["train"][place] for place in range(3)]
    sent = pickle.loads(pickle.dumps(task)).collate(rows)
    assert sent["input_ids"].tolist() == task.collate(rows)["input_ids"].tolist()


@pytest.mark.parametrize(
    "train, validation, header, flags, says",
    [
        ([("x", "a"), ("y", "b")], [("x", "c")], "text,label", {}, "never shows: c, first in row 1"),
        ([("x", "a"), ("y", "")], [("x", "a")], "text,label", {}, "train data has no label in row 2"),
        ([("x", "a"), ("", "b")], [("x", "a")], "text,label", {}, "train data has no text in row 2"),
        ([("x", "a"), ("y", "b")], [("x", "")], "text,label", {}, "validation data has no label in row 1"),
        ([("x", "a"), ("y", "a")], [("x", "a")], "text,label", {}, "one label"),
        ([("x", "a"), ("y", "b")], [("x", "a")], "foo,label", {}, "foo, label: name one with --text_column"),
        ([("x", "a"), ("y", "b")], [("x", "a")], "text,foo", {}, "text, foo: name one with --label_column"),
        (
            [("x", "a"), ("y", "b")],
            [("x", "a")],
            "text,label",
            {"label_column": "lable"},
            r"lable: there is no such column \(did you mean label\?\)",
        ),
        ([("x", "a")], [("x", "a")], "text,label", {"label_column": "text"}, "must be different columns"),
        ([("x", "a")], [("x", "a")], "text,label", {"text_pair_column": "text"}, "must be different columns"),
    ],
)
def test_faults_in_files(tmp_path, train, validation, header, flags, says):
    data = DataConfig(
        train_file=csv(tmp_path / "a.csv", train, header),
        validation_file=csv(tmp_path / "b.csv", validation, header),
    )
    with pytest.raises(DataError, match=says):
        TextClassification(TextClassificationSettings(**flags)).load(data, NO_MODEL)


def test_a_validation_file_with_other_columns(files, tmp_path):
    other = csv(tmp_path / "other.csv", [("x", "a")], "sentence,label")
    with pytest.raises(DataError, match="validation data has no column text.*it has sentence, label"):
        TextClassification().load(DataConfig(train_file=files["train_file"], validation_file=other), NO_MODEL)


def test_text_that_is_a_number(tmp_path):
    path = json_lines(tmp_path / "a.jsonl", [{"text": 3, "label": "a"}, {"text": 4, "label": "b"}])
    with pytest.raises(DataError, match=r"holds numbers \(int64\)"):
        TextClassification().load(DataConfig(train_file=path, validation_file=path), NO_MODEL)


def _config(files, model: ModelConfig, **data) -> None:
    task, settings = TextClassification(), DataConfig(**files, **data)
    task.load(settings, model)
    task.model_config(task.tokenizer(settings, model), model)


def test_a_vocabulary_larger_than_the_embedding(files, tmp_path):
    tokenizer = small_models.bpe_tokenizer()
    tokenizer.add_tokens(["<one>", "<more>", "<token>"])
    model = saved_model(tmp_path / "m", small_bert(), tokenizer)
    with pytest.raises(ConfigError, match="4099 tokens and the model's embedding 4096"):
        _config(files, model)


def test_a_tokenizer_without_pad_token(files, tmp_path):
    model = saved_model(tmp_path / "m", small_bert())
    path = tmp_path / "m" / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    del settings["pad_token"]
    path.write_text(json.dumps(settings))
    assert AutoTokenizer.from_pretrained(tmp_path / "m").pad_token is None
    with pytest.raises(ConfigError, match="no pad token"):
        _config(files, model)


@pytest.mark.parametrize("length, suits", [(512, True), (513, False), (511, True)])
def test_max_length_and_positions(files, length, suits):
    if suits:
        _config(files, NO_MODEL, max_length=length)
    else:
        with pytest.raises(ConfigError, match="at most 512 tokens; give --max_length 512"):
            _config(files, NO_MODEL, max_length=length)


def test_a_model_that_is_nowhere(files, tmp_path):
    with pytest.raises(ConfigError, match="--model_name_or_path") as caught:
        _config(files, ModelConfig(model_name_or_path=str(tmp_path / "none")))
    assert "\n" not in str(caught.value)
