"""Folders of files and patterns: which files are taken, and what does not fit together."""

from __future__ import annotations

import json
import logging

import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

from hf_dist.config import DataConfig
from hf_dist.data.loading.sources import load_splits
from hf_dist.errors import DataError


def load(name, **other) -> DatasetDict:
    def never() -> DatasetDict:
        raise AssertionError("the built-in data was asked for")

    return load_splits(DataConfig(train_file=str(name), **other), never)


def write(folder, **files: str) -> None:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)


def test_all_files_of_a_folder_sorted_by_name(tmp_path, caplog):
    write(
        tmp_path,
        part_2__csv="text,label\nc,z\n",
        part_10__csv="text,label\na,x\nb,y\n",
        part_3__jsonl='{"label": "w", "text": "d"}\n',
        README__md="what this is",
        _SUCCESS="",
    )
    (tmp_path / ".hidden.csv").write_text("broken")
    (tmp_path / "below").mkdir()
    with caplog.at_level(logging.INFO):
        rows = load(tmp_path)["train"]
    assert rows["text"][:] == ["a", "b", "c", "d"]  # 10 before 2: by name
    assert list(rows)[3] == {"text": "d", "label": "w"}
    assert "3 files are read" in caplog.text and "README.md" in caplog.text and "below" in caplog.text


def test_a_pattern(tmp_path):
    write(tmp_path, a__txt="one\n", b__txt="two\n", c__csv="text,label\nx,y\n")
    write(tmp_path / "deep", d__txt="three\n")
    assert load(tmp_path / "*.txt")["train"]["text"][:] == ["one", "two"]
    assert load(tmp_path / "**" / "[bd].txt")["train"]["text"][:] == ["two", "three"]
    with pytest.raises(DataError, match=r"no file matches .*\*\.tsv"):
        load(tmp_path / "*.tsv")
    (tmp_path / "odd[1].txt").write_text("itself\n")
    assert load(tmp_path / "odd[1].txt")["train"]["text"][:] == ["itself"]


def test_other_splits_from_folders_too(tmp_path):
    write(tmp_path / "t", a__txt="one\n")
    write(tmp_path / "v", a__txt="two\n", b__txt="three\n")
    splits = load(tmp_path / "t", validation_file=str(tmp_path / "v"))
    assert splits["validation"]["text"][:] == ["two", "three"]


@pytest.mark.parametrize(
    "other, wanted",
    [
        ("text\nb\n", r"b.csv has other columns than .*a.csv: it lacks label"),
        ("text,label,more\nb,y,z\n", r"b.csv has other columns than .*a.csv: it also has more"),
        ("text,label\nb\n", r"b.csv, line 2"),
        ("", "b.csv is empty"),
    ],
)
def test_a_file_that_does_not_fit_is_named(tmp_path, other, wanted):
    write(tmp_path, a__csv="text,label\na,x\n", b__csv=other)
    with pytest.raises(DataError, match=wanted):
        load(tmp_path)


def test_types_that_fit_are_made_one(tmp_path):
    shards = [
        [{"n": 1, "tag": None, "list": [], "chat": [{"role": "a"}]}],
        [{"n": 0.5, "tag": "x", "list": ["y"], "chat": [{"role": "a", "name": "b"}]}],
        [{"n": 2, "tag": None, "list": None, "chat": None}],
    ]
    for number, rows in enumerate(shards):
        (tmp_path / f"{number}.json").write_text(json.dumps(rows))
    assert list(load(tmp_path)["train"]) == [
        {"n": 1.0, "tag": None, "list": [], "chat": [{"role": "a", "name": None}]},
        {"n": 0.5, "tag": "x", "list": ["y"], "chat": [{"role": "a", "name": "b"}]},
        {"n": 2.0, "tag": None, "list": None, "chat": None},
    ]


def test_types_that_do_not_fit_name_both_files(tmp_path):
    write(tmp_path, a__jsonl='{"label": null}\n', b__jsonl='{"label": 1}\n', c__jsonl='{"label": "x"}\n')
    with pytest.raises(DataError, match=r"c.jsonl: column label holds text where .*b.jsonl holds numbers"):
        load(tmp_path)


def test_class_labels_stay_and_must_be_the_same(tmp_path):
    def shard(name: str, names: list[str], score) -> None:
        features = Features({"label": ClassLabel(names=names), "score": Value(score)})
        Dataset.from_dict({"label": [1], "score": [3]}, features=features).to_parquet(tmp_path / name)

    shard("a.parquet", ["no", "yes"], "int64")
    shard("b.parquet", ["no", "yes"], "float64")
    rows = load(tmp_path)["train"]
    assert rows.features == Features({"label": ClassLabel(names=["no", "yes"]), "score": Value("float64")})
    assert list(rows) == [{"label": 1, "score": 3.0}] * 2
    shard("b.parquet", ["yes", "no"], "int64")
    with pytest.raises(DataError, match="b.parquet: column label holds"):
        load(tmp_path)


def test_a_folder_of_several_splits_is_no_training_set(tmp_path):
    write(tmp_path, train_0__txt="a\n", train_1__txt="b\n")
    assert len(load(tmp_path)["train"]) == 2
    write(tmp_path, test__txt="c\n")
    with pytest.raises(DataError, match=r"several splits .*test.txt.*--test_file"):
        load(tmp_path)


def test_a_folder_without_a_file_to_read(tmp_path):
    with pytest.raises(DataError, match="holds no file to read .found: nothing"):
        load(tmp_path)
    write(tmp_path, a__md="x")
    with pytest.raises(DataError, match=r"found: a.md.*\.jsonl"):
        load(tmp_path)


def test_saved_folders(tmp_path):
    rows = Dataset.from_dict({"text": ["a", "b"]})
    rows.with_format("numpy").save_to_disk(tmp_path / "one")
    named = {"training": rows, "dev": rows.select([0]), "extra": rows}
    DatasetDict(named).save_to_disk(tmp_path / "splits")
    assert list(load(tmp_path / "one")["train"]) == list(rows)
    splits = load(tmp_path / "splits", test_file=str(tmp_path / "one"))
    assert {split: len(part) for split, part in splits.items()} == {"train": 2, "validation": 1, "test": 2}
    by_name = load_splits(DataConfig(dataset_name=str(tmp_path / "splits")), DatasetDict)
    assert sorted(by_name) == ["train", "validation"]
    apart = load(tmp_path / "one", validation_file=str(tmp_path / "splits"))
    assert len(apart["validation"]) == 1


def test_splits_by_the_names_that_flags_give(tmp_path):
    parts = {name: Dataset.from_dict({"text": [name]}) for name in ("train", "extra", "validation")}
    DatasetDict(parts).save_to_disk(tmp_path / "saved")
    (tmp_path / "by_name").mkdir()
    for name, rows in parts.items():
        (tmp_path / "by_name" / name).mkdir()
        rows.to_json(tmp_path / "by_name" / name / "a.jsonl")
    for name in ("saved", "by_name"):
        data = DataConfig(
            dataset_name=str(tmp_path / name), train_split="validation", validation_split="train"
        )
        splits = load_splits(data, DatasetDict)
        assert {split: rows["text"][:] for split, rows in splits.items()} == {
            "train": ["validation"],
            "validation": ["train"],
        }
        with pytest.raises(
            DataError, match=r"no split validaton \(--test_split\) \(did you mean validation\?\); it has"
        ):
            load_splits(DataConfig(dataset_name=str(tmp_path / name), test_split="validaton"), DatasetDict)
    taken = load(tmp_path / "saved", train_split="extra", validation_split="extra")
    assert taken["train"]["text"][:] == taken["validation"]["text"][:] == ["extra"]
    write(tmp_path, a__txt="x\n")
    with pytest.raises(DataError, match="--train_split dev names a split, and no data set"):
        load(tmp_path / "a.txt", train_split="dev")


def test_faults_of_saved_folders(tmp_path):
    rows = Dataset.from_dict({"text": ["a" * 1000] * 1000})
    DatasetDict({"train": rows}).save_to_disk(tmp_path / "splits")
    with pytest.raises(DataError, match="has no validation split, only train; name the folder"):
        load(tmp_path / "splits", validation_file=str(tmp_path / "splits"))
    with pytest.raises(DataError, match="--dataset_config_name en: .* has none"):
        load_splits(DataConfig(dataset_name=str(tmp_path / "splits"), dataset_config_name="en"), DatasetDict)
    part = next((tmp_path / "splits" / "train").glob("*.arrow"))
    part.write_bytes(part.read_bytes()[:5000])
    with pytest.raises(DataError, match="is no whole folder of save_to_disk"):
        load(tmp_path / "splits")
    part.unlink()
    with pytest.raises(DataError, match="is no whole folder of save_to_disk"):
        load(tmp_path / "splits")


def test_a_data_set_with_code_is_refused_and_its_code_not_run(tmp_path):
    """From version 5 datasets has no loading scripts; that it never runs one is what this watches."""
    ran = tmp_path / "ran"
    (tmp_path / f"{tmp_path.name}.py").write_text(f"open({str(ran)!r}, 'w')\n")
    with pytest.raises(DataError, match="--dataset_name .*scripts are no longer supported"):
        load_splits(DataConfig(dataset_name=str(tmp_path)), DatasetDict)
    assert not ran.exists()
