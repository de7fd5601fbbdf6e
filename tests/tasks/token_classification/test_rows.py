"""Rows of words and tags: names of the classes, held-out rows, faults."""

from __future__ import annotations

import pytest
from datasets import ClassLabel, Dataset, Features, List, Value

from hf_dist.config import DataConfig
from hf_dist.errors import DataError
from hf_dist.tasks.token_classification.rows import TokenClassificationSettings as Settings
from hf_dist.tasks.token_classification.task import TokenClassification
from tests.tasks.token_classification.tagged import BIO, NO_MODEL, json_lines, loaded


def test_a_class_label_keeps_its_names_and_order(tmp_path):
    features = Features(
        {"words": List(Value("string")), "ner_tags": List(ClassLabel(names=["O", "I-X", "B-X"]))}
    )
    rows = Dataset.from_dict({"words": [["a", "b"], ["c"]], "ner_tags": [[2, 1], [0]]}, features=features)
    for split in ("train", "validation"):
        rows.to_parquet(str(tmp_path / f"{split}.parquet"))
    task = TokenClassification()
    raw = task.load(DataConfig(dataset_name=str(tmp_path)), NO_MODEL)
    assert task.classes == ("O", "I-X", "B-X") and raw["train"]["tags"][:] == [[2, 1], [0]]


def test_held_out_rows(tmp_path):
    rows = [([f"w{at}"], ["B-X" if at % 2 else "O"]) for at in range(40)]
    data = DataConfig(train_file=json_lines(tmp_path / "a.jsonl", rows), validation_fraction=0.25)
    raw = TokenClassification().load(data, NO_MODEL)
    assert (len(raw["train"]), len(raw["validation"])) == (30, 10)
    assert {row[0] for row in raw["train"]["tokens"]}.isdisjoint(
        row[0] for row in raw["validation"]["tokens"]
    )


@pytest.mark.parametrize(
    "rows, says",
    [
        ([(["a", "b"], ["O"]), (["a"], ["B-X"])], r"row 1 \(counted from 1\): 2 words in tokens and 1 tags"),
        ([(["a"], ["O"]), ([], [])], "has no words in row 2"),
        ([(["a"], ["O"]), (None, ["O"])], "has no words in row 2"),
        ([(["a"], ["O"]), (["b"], None)], "has no tags in row 2"),
        ([(["a"], ["O"]), (["b", "c"], ["O", None])], r"row 2 \(counted from 1\): the word 'c' has no tag"),
        ([(["a"], ["O"]), (["b", ""], ["O", "O"])], r"row 2 \(counted from 1\): word 2 is empty"),
        ([(["a"], ["O"]), (["b", None], ["O", "O"])], r"row 2 \(counted from 1\): word 2 is empty"),
        ([("a b", "O O")], "tokens of the train data holds text; expected a list of words a row"),
        ([(["a"], [0.5]), (["a"], [1.5])], "holds fractions"),
        ([([1, 2], ["O", "B-X"])], "holds lists of int64; expected lists of words"),
        ([(["a", "b"], ["O", "O"])], r"one tag in all training rows \(O\)"),
    ],
)
def test_faults_in_rows(tmp_path, rows, says):
    data = DataConfig(train_file=json_lines(tmp_path / "a.jsonl", rows))
    with pytest.raises(DataError, match=says):
        TokenClassification().load(data, NO_MODEL)


def test_faults_between_splits(tmp_path):
    with pytest.raises(
        DataError, match=r"only tags that the training data never shows: B-ORG .*, first in row 1"
    ):
        loaded(tmp_path, validation=[(["c"], ["B-ORG"])])
    other = json_lines(tmp_path / "other.jsonl", BIO, names=("words", "tags"))
    data = DataConfig(train_file=str(tmp_path / "train.jsonl"), validation_file=other)
    with pytest.raises(DataError, match="validation data has no column tokens.*it has words, tags"):
        TokenClassification().load(data, NO_MODEL)
    with pytest.raises(
        DataError, match=r"--tags_column tag: there is no such column \(did you mean tags\?\)"
    ):
        TokenClassification(Settings(tags_column="tag")).load(data, NO_MODEL)
    with pytest.raises(DataError, match="must be different"):
        TokenClassification(Settings(tags_column="tokens")).load(data, NO_MODEL)
