"""Labels of every type, their order, and the rows at fault."""

from __future__ import annotations

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, Value

from hf_dist.data import labels
from hf_dist.errors import DataError


def names_and_order(values: list, feature=None) -> tuple[list, list[str]]:
    features = None if feature is None else Features({"label": feature})
    rows = Dataset.from_dict({"label": values}, features=features)
    names = labels.label_names(rows, "label")
    return names.to_pylist(), labels.class_order(rows, "label", names)


@pytest.mark.parametrize(
    "values, names, order",
    [
        (["b", "a", "B", "a"], ["b", "a", "B", "a"], ["B", "a", "b"]),
        ([10, 9, 2, -1], ["10", "9", "2", "-1"], ["-1", "2", "9", "10"]),
        (["10", "9", "2"], ["10", "9", "2"], ["2", "9", "10"]),
        (["10", "9", "x"], ["10", "9", "x"], ["10", "9", "x"]),
        ([True, False, True], ["True", "False", "True"], ["False", "True"]),
        ([1.0, None, 0.0], ["1", None, "0"], ["0", "1"]),
        (["a", "", None], ["a", None, None], ["a"]),
        ([None, None], [None, None], []),
        (["1.5", "x", "nan"], ["1.5", "x", "nan"], ["1.5", "nan", "x"]),
    ],
    ids=["text", "integers", "digits", "digits and text", "bool", "gaps", "empty", "all null", "versions"],
)
def test_names_and_their_order(values, names, order):
    assert names_and_order(values) == (names, order)


def test_class_labels_keep_their_order_and_minus_one_is_none():
    assert names_and_order([1, 0, -1], ClassLabel(names=["z", "a", "unused"])) == (
        ["a", "z", None],
        ["z", "a", "unused"],
    )


@pytest.mark.parametrize(
    "values, found", [([0.5, 1.0], "0.5"), (["1", "0.25", None], "0.25"), ([["a"], ["b"]], "lists")]
)
def test_no_classes(values, found):
    with pytest.raises(DataError, match=found):
        labels.label_names(Dataset.from_dict({"label": values}), "label")


def test_ids():
    rows = Dataset.from_dict({"label": ["b", None, "a", "c"]})
    ids = labels.label_ids(labels.label_names(rows, "label"), ["a", "b"])
    assert ids.dtype == np.int64 and ids.tolist() == [1, -1, 0, -1]


def test_columns_follow_selected_rows():
    rows = Dataset.from_dict({"label": ["a", "b", "c"]}).select([2, 0])
    assert labels.arrow_column(rows, "label").to_pylist() == ["c", "a"]


def test_missing_labels_give_their_rows():
    names = labels.label_names(Dataset.from_dict({"label": ["a", None, "b", *[None] * 7]}), "label")
    with pytest.raises(DataError, match=r"rows 2, 4, 5, 6, 7 and 3 more \(counted from 1\)"):
        labels.check_labelled(names, column="label", split="train")


def test_texts():
    rows = Dataset.from_dict({"text": ["a", "", " \n", "b"], "number": [1, 2, 3, 4]})
    assert labels.check_text(rows, "text", split="train") == 2
    with pytest.raises(DataError, match=r"numbers \(int64\).*--text_column"):
        labels.check_text(rows, "number", split="train")
    with pytest.raises(DataError, match="row 2 "):
        labels.check_text(Dataset.from_dict({"text": ["a", None]}), "text", split="train")
    empty = Dataset.from_dict({"text": [None]}, features=Features({"text": Value("null")}))
    with pytest.raises(DataError, match="no text in any row"):
        labels.check_text(empty, "text", split="train")
