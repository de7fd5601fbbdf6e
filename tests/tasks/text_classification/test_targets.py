"""Several labels a row, and numbers: from files to tensors and scores."""

from __future__ import annotations

import json

import pytest
import torch
from datasets import ClassLabel, Dataset, Features, List, Value

from hf_dist.config import DataConfig, ModelConfig
from hf_dist.errors import ConfigError, DataError
from hf_dist.tasks.items import ExampleItems
from hf_dist.tasks.text_classification.columns import TextClassificationSettings
from hf_dist.tasks.text_classification.task import TextClassification

NO_MODEL = ModelConfig()


def load(tmp_path, rows, **settings):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = TextClassification(TextClassificationSettings(**settings), pad_to_multiple_of=1)
    data = DataConfig(train_file=str(path), validation_file=str(path))
    return task, data, task.load(data, NO_MODEL)


MANY = [
    {"text": "a", "labels": ["x", "y"]},
    {"text": "b", "labels": []},
    {"text": "c", "labels": ["y"]},
    {"text": "d", "labels": ["y"]},
]


@pytest.mark.parametrize("form", ["lists", "separated", "columns"])
def test_several_labels_in_their_three_forms(tmp_path, form):
    rows, settings = MANY, {}
    if form == "separated":
        rows = [{"text": row["text"], "labels": " | ".join(row["labels"])} for row in MANY]
        settings = {"label_separator": "|"}
    if form == "columns":
        rows = [{"text": row["text"], **{n: int(n in row["labels"]) for n in "xy"}} for row in MANY]
        settings = {"label_columns": ["x", "y"]}
    task, data, raw = load(tmp_path, rows, **settings)
    assert task.items == ExampleItems("multi_label") and task.classes == ("x", "y")
    assert raw["train"]["labels"][:] == [[0, 1], [], [1], [1]]
    tokenizer = task.tokenizer(data, NO_MODEL)
    config = task.model_config(tokenizer, NO_MODEL)
    assert (config.num_labels, config.problem_type) == (2, "multi_label_classification")
    encoded, _ = task.encode(raw, tokenizer, data)
    batch = task.collate([encoded["train"][at] for at in range(4)])
    assert batch["labels"].tolist() == [[1, 1], [0, 0], [0, 1], [0, 1]]
    assert batch["labels"].dtype == torch.float32


def test_several_labels_are_predicted_by_a_threshold(tmp_path):
    logits = torch.tensor([[1.0, -1.0], [3.0, 0.5]])  # probabilities .73 .27, .95 .62
    for threshold, answers in ((0.5, [[0], [0, 1]]), (0.7, [[0], [0]]), (0.25, [[0, 1], [0, 1]])):
        task, _, raw = load(tmp_path, MANY, threshold=threshold)
        assert task.predict({"logits": logits}, {}) == answers
    assert list(task.records([[0], []], raw["train"])) == [{"prediction": ["x"]}, {"prediction": []}]


def test_scores_of_several_labels(tmp_path):
    task, _, raw = load(tmp_path, MANY)
    scores = task.score([[1], [], [1], [0, 1]], raw["validation"])
    # 3 of 4 labels found and one wrong.
    assert scores["f1_micro"] == pytest.approx(6 / 8) and scores["subset_accuracy"] == 0.5
    # The commonest set is {y}: 3 of 4 found, one wrong.
    assert scores["majority_baseline"] == pytest.approx(6 / 8)


def test_class_label_lists_keep_their_order(tmp_path):
    features = Features({"text": Value("string"), "labels": List(ClassLabel(names=["z", "a"]))})
    rows = Dataset.from_dict({"text": ["p", "q"], "labels": [[0], [1, 0]]}, features=features)
    rows.to_parquet(tmp_path / "rows.parquet")
    data = DataConfig(
        train_file=str(tmp_path / "rows.parquet"), validation_file=str(tmp_path / "rows.parquet")
    )
    task = TextClassification()
    assert task.load(data, NO_MODEL)["train"]["labels"][:] == [[0], [0, 1]]
    assert task.classes == ("z", "a")


NUMBERS = [{"text": "a", "score": 1.5}, {"text": "b", "score": 2.0}, {"text": "c", "score": 4.0}]


def test_fractions_are_a_regression(tmp_path):
    task, data, raw = load(tmp_path, NUMBERS)
    assert task.items == ExampleItems("regression") and task.constant == 2.5
    tokenizer = task.tokenizer(data, NO_MODEL)
    config = task.model_config(tokenizer, NO_MODEL)
    assert (config.num_labels, config.problem_type) == (1, "regression")
    encoded, _ = task.encode(raw, tokenizer, data)
    assert task.collate([encoded["train"][at] for at in range(3)])["labels"].tolist() == [1.5, 2.0, 4.0]
    assert task.predict({"logits": torch.tensor([[1.0], [2.0]])}, {}) == [1.0, 2.0]
    scores = task.score([1.5, 2.0, 3.0], raw["validation"])
    # Squares of 0, 0, 1; around the mean of 2.5: 1, 0.25, 2.25.
    assert scores["mse"] == pytest.approx(1 / 3) and scores["mse_baseline"] == pytest.approx(3.5 / 3)


def test_whole_numbers_are_a_regression_where_that_is_said(tmp_path):
    rows = [{"text": "a", "label": "1"}, {"text": "b", "label": "3"}]
    _, _, raw = load(tmp_path, rows, problem="regression")
    assert raw["train"]["labels"][:] == [1.0, 3.0]


@pytest.mark.parametrize(
    "rows, settings, says",
    [
        ([{"text": "a", "label": "1"}, {"text": "b", "label": "x"}], {"problem": "regression"}, "row 2.*'x'"),
        ([{"text": "a", "label": None}, {"text": "b", "label": 1.5}], {}, "row 1.*None; expected a number"),
        ([{"text": "a", "label": "x"}], {"problem": "multi_label"}, "--label_separator"),
        ([{"text": "a", "label": None}, {"text": "b", "label": ["x"]}], {}, "no labels in row 1"),
        ([{"text": "a", "label": [None]}, {"text": "b", "label": ["x"]}], {}, "row 1.*expected a list"),
        (
            [{"text": "a", "x": 2, "y": 0}],
            {"label_columns": ["x", "y"]},
            "column x.*row 1.*2; expected 0 or 1",
        ),
        ([{"text": "a", "x": 1}], {"label_columns": ["x", "yy"]}, "yy: there is no such column"),
        ([{"text": "a", "label": []}], {}, "no label in any training row"),
    ],
)
def test_faults(tmp_path, rows, settings, says):
    with pytest.raises(DataError, match=says):
        load(tmp_path, rows, **settings)


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"problem": "regression", "label_separator": ","}, "--problem regression conflicts"),
        ({"label_columns": ["a"], "label_column": "b"}, "--label_columns conflicts"),
        ({"threshold": 1.0}, "--threshold is 1.0"),
    ],
)
def test_settings_that_exclude_each_other(settings, says):
    with pytest.raises(ConfigError, match=says):
        TextClassificationSettings(**settings)
