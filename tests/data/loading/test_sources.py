"""Splits from files, folders and the (absent) hub; held-out rows; columns by their usual names."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from datasets import Dataset, DatasetDict

from hf_dist.config import DataConfig
from hf_dist.data.loading import sources
from hf_dist.errors import DataError


def never() -> DatasetDict:
    raise AssertionError("the built-in data was asked for")


def csv(path, rows: list[str]) -> str:
    path.write_text("text,label\n" + "".join(f"{row}\n" for row in rows))
    return str(path)


def test_built_in_data_only_where_nothing_is_named(tmp_path):
    own = DatasetDict({"train": Dataset.from_dict({"text": ["a"]})})
    assert sources.load_splits(DataConfig(), lambda: own) is own
    named = sources.load_splits(DataConfig(test_file=csv(tmp_path / "t.csv", ["a,x"])), never)
    assert {split: len(rows) for split, rows in named.items()} == {"test": 1}


def test_a_folder_as_data_set_and_a_file_that_replaces_a_split(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    csv(folder / "train.csv", ["a,x", "b,y"])
    csv(folder / "test.csv", ["c,x"])
    data = DataConfig(dataset_name=str(folder), test_file=csv(tmp_path / "t.csv", ["d,x", "e,y"]))
    splits = sources.load_splits(data, never)
    assert {split: rows["text"][:] for split, rows in splits.items()} == {
        "train": ["a", "b"],
        "test": ["d", "e"],
    }


def test_other_names_of_the_splits(tmp_path):
    for name in ("train", "dev"):
        (tmp_path / name).mkdir()
        csv(tmp_path / name / "a.csv", [f"{name},x"])
    loaded = sources.load_splits(DataConfig(dataset_name=str(tmp_path)), never)
    assert loaded["validation"]["text"][:] == ["dev"]


def test_a_data_set_that_is_nowhere():
    with pytest.raises(DataError) as caught:
        sources.load_splits(DataConfig(dataset_name="no-such-owner/no-such-set"), never)
    message = str(caught.value)
    assert "--dataset_name no-such-owner/no-such-set" in message and "\n" not in message


def test_a_folder_that_cannot_be_read_as_a_data_set(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": 3\n')
    with pytest.raises(DataError, match=f"--dataset_name {tmp_path}: .") as caught:
        sources.load_splits(DataConfig(dataset_name=str(tmp_path)), never)
    assert "\n" not in str(caught.value)


def test_held_out_rows_are_stratified_disjoint_and_the_same_each_time():
    strata = np.repeat([0, 1, 2, 3], [600, 300, 95, 5])
    splits = DatasetDict({"train": Dataset.from_dict({"id": list(range(1000))})})
    parts = sources.hold_out(splits, DataConfig(validation_fraction=0.1), strata)
    train, held = parts["train"]["id"][:], parts["validation"]["id"][:]
    assert sorted(train + held) == list(range(1000))
    assert train == sorted(train) and held == sorted(held)
    assert Counter(strata[held].tolist()) == {0: 60, 1: 30, 2: 10}
    assert (
        sources.hold_out(splits, DataConfig(validation_fraction=0.1), strata)["validation"]["id"][:] == held
    )


@pytest.mark.parametrize("counts, held", [([2, 1, 1], 1), ([3, 3], 1), ([1, 1, 1, 7], 1)])
def test_small_classes_keep_a_training_row(counts, held):
    strata = np.repeat(np.arange(len(counts)), counts)
    splits = DatasetDict({"train": Dataset.from_dict({"id": list(range(len(strata)))})})
    parts = sources.hold_out(splits, DataConfig(validation_fraction=0.1), strata)
    assert len(parts["validation"]) == held
    assert set(strata[parts["train"]["id"][:]]) == set(strata)


@pytest.mark.parametrize("strata", [[0], [0, 1], [0, 1, 2]])
def test_too_few_rows_to_hold_any_out(strata):
    splits = DatasetDict({"train": Dataset.from_dict({"id": list(range(len(strata)))})})
    with pytest.raises(DataError, match="--validation_file"):
        sources.hold_out(splits, DataConfig(validation_fraction=0.1), np.array(strata))


def test_a_validation_split_is_left_alone():
    rows = Dataset.from_dict({"id": [1, 2]})
    splits = DatasetDict({"train": rows, "validation": rows})
    assert sources.hold_out(splits, DataConfig(validation_fraction=0.5), np.zeros(2)) is splits


def test_first_rows():
    rows = Dataset.from_dict({"id": list(range(9))})
    splits = DatasetDict({"train": rows, "validation": rows, "test": rows})
    cut = sources.first_rows(splits, DataConfig(max_train_samples=2, max_eval_samples=99))
    assert {split: part["id"][:] for split, part in cut.items()} == {
        "train": [0, 1],
        "validation": list(range(9)),
        "test": list(range(9)),
    }


def test_columns():
    columns = ["id", "Content", "Text", "labels"]
    assert sources.find_column(columns, None, ("text", "content"), flag="text_column") == "Text"
    assert sources.find_column(columns, "Content", ("text",), flag="text_column") == "Content"
    with pytest.raises(DataError, match=r"did you mean labels\?.*id, Content, Text, labels"):
        sources.find_column(columns, "label", (), flag="label_column")
    with pytest.raises(DataError, match=r"id, Content, Text, labels.*--label_column"):
        sources.find_column(columns, None, ("target", "class"), flag="label_column")
