"""Streams: the rows of the files, read as they are used, dealt to ranks, and resumed."""

from __future__ import annotations

import gzip
import json
import pickle
from itertools import islice
from pathlib import Path

import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from datasets.distributed import split_dataset_by_node

from hf_dist.batching.steps.budget import TokenBatching
from hf_dist.batching.stream import StreamBatches
from hf_dist.config import DataConfig
from hf_dist.data.loading.streams import load_stream
from hf_dist.data.readers import files
from hf_dist.errors import DataError

ROWS = 40


def never() -> DatasetDict:
    raise AssertionError("the built-in data was asked for")


def lines(rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def shards(tmp_path) -> Path:
    """Four files of ten rows, in four formats."""
    rows = [{"text": f"row {number}", "id": str(number)} for number in range(ROWS)]
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "a.jsonl").write_text(lines(rows[:10]))
    (folder / "b.csv.gz").write_bytes(
        gzip.compress(("text,id\n" + "".join(f"{row['text']},{row['id']}\n" for row in rows[10:20])).encode())
    )
    Dataset.from_list(rows[20:30]).to_parquet(folder / "c.parquet")
    (folder / "d.json").write_text(json.dumps(rows[30:]))
    return folder


def ids(stream) -> list[int]:
    return [int(row["id"]) for row in stream]


def test_the_rows_of_all_files_in_order_with_their_columns(shards):
    train, others = load_stream(DataConfig(train_file=str(shards), streaming=True), never)
    assert train.column_names == ["text", "id"]
    assert list(train) == [{"text": f"row {number}", "id": str(number)} for number in range(ROWS)]
    assert others == {}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_share_the_rows(shards, size):
    train, _ = load_stream(DataConfig(train_file=str(shards), streaming=True), never)
    shuffled = train.shuffle(seed=3, buffer_size=16)
    parts = [ids(split_dataset_by_node(shuffled, rank, size)) for rank in range(size)]
    together = [row for part in parts for row in part]
    assert sorted(together) == list(range(ROWS)) and together != sorted(together)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_rank_opens_only_its_own_files(shards, monkeypatch):
    train, _ = load_stream(DataConfig(train_file=str(shards), streaming=True), never)
    (shards / "d.json").write_text("broken")
    assert ids(split_dataset_by_node(train, 1, 4)) == list(range(10, 20))
    with pytest.raises(DataError, match="d.json, line 1"):
        ids(split_dataset_by_node(train, 3, 4))


def test_rows_are_read_only_as_they_are_used(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(lines({"id": number} for number in range(2000)) + "broken\n")
    train, _ = load_stream(DataConfig(train_file=str(path), streaming=True), never)
    assert len(list(islice(train, 2000))) == 2000
    with pytest.raises(DataError, match="a.jsonl, line 2001: broken JSON"):
        list(train)


@pytest.mark.parametrize("stop", [0, 1, 9, 10, 25, 39])
def test_the_position_is_saved_and_resumed(shards, stop):
    def build():
        return load_stream(DataConfig(train_file=str(shards), streaming=True), never)[0]

    first = build()
    assert ids(islice(first, stop)) == list(range(stop))
    second = build()
    second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    assert ids(second) == list(range(stop, ROWS))


def test_batches_of_a_tokenised_stream_resume_as_if_nothing_happened(shards):
    def build() -> StreamBatches:
        train, _ = load_stream(DataConfig(train_file=str(shards), streaming=True), never)
        train = train.map(
            lambda batch: {"input_ids": [[int(row)] * (1 + int(row) % 7) for row in batch["id"]]},
            batched=True,
            batch_size=4,
            remove_columns=train.column_names,
        )
        batching = TokenBatching(max_tokens_per_device=16, tokens_per_step=32, window=8)
        return StreamBatches(train, batching, max_steps=12, data_parallel_rank=1, data_parallel_size=2)

    whole = [(batch.key, [row["input_ids"][0] for row in batch.examples]) for batch in build()]
    first = build()
    for _ in islice(iter(first), 5):
        pass
    second = build()
    second.load_state_dict(first.state_dict())
    assert [(batch.key, [row["input_ids"][0] for row in batch.examples]) for batch in second] == whole[5:]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_max_train_samples_means_the_same_rows_on_any_number_of_ranks(shards, size):
    data = DataConfig(train_file=str(shards), streaming=True, max_train_samples=15)
    train, _ = load_stream(data, never)
    parts = [ids(split_dataset_by_node(train, rank, size)) for rank in range(size)]
    assert sorted(row for part in parts for row in part) == list(range(15))


def test_other_splits_are_read_as_a_whole(shards, tmp_path):
    (tmp_path / "v.csv").write_text("text,id\nx,7\n")
    data = DataConfig(train_file=str(shards), validation_file=str(tmp_path / "v.csv"), streaming=True)
    _, others = load_stream(data, never)
    assert {split: rows["id"][:] for split, rows in others.items()} == {"validation": ["7"]}


def test_built_in_data_and_saved_folders(tmp_path):
    features = Features({"id": Value("int64"), "label": ClassLabel(names=["no", "yes"])})
    rows = Dataset.from_dict({"id": [0, 1, 2], "label": [1, 0, 1]}, features=features)
    own = DatasetDict({"train": rows, "dev": rows.select([0])})
    own.save_to_disk(tmp_path / "saved")
    rows.to_parquet(tmp_path / "a.parquet")
    named = DatasetDict({"train": rows, "validation": rows.select([0])})
    for data, others in (
        (DataConfig(streaming=True), ["validation"]),
        (DataConfig(train_file=str(tmp_path / "saved"), streaming=True), ["validation"]),
        (DataConfig(dataset_name=str(tmp_path / "saved"), streaming=True), ["validation"]),
        (DataConfig(train_file=str(tmp_path / "saved" / "train"), streaming=True), []),
        (DataConfig(train_file=str(tmp_path / "a.parquet"), streaming=True), []),
    ):
        train, rest = load_stream(data, lambda: named)
        assert list(train) == list(rows) and train.features == features
        assert sorted(rest) == others
    few, _ = load_stream(DataConfig(streaming=True, max_train_samples=2), lambda: named)
    assert ids(few) == [0, 1]


@pytest.mark.parametrize("most", [None, 3])
def test_a_data_set_by_name(tmp_path, most):
    (tmp_path / "train.jsonl").write_text(lines({"id": number, "text": "a"} for number in range(9)))
    (tmp_path / "dev.jsonl").write_text(lines({"id": number, "text": "b"} for number in range(5)))
    data = DataConfig(
        dataset_name=str(tmp_path), streaming=True, max_train_samples=most, max_eval_samples=most
    )
    train, others = load_stream(data, never)
    assert train.column_names == ["id", "text"]
    assert ids(train) == list(range(most or 9))
    assert others["validation"]["id"][:] == list(range(most or 5))


def test_a_data_set_by_name_without_types(tmp_path):
    """The datasets library does not say the columns of a CSV stream before it is read."""
    (tmp_path / "train.csv").write_text("text,score\na,1\nb,2\n")
    train, others = load_stream(DataConfig(dataset_name=str(tmp_path), streaming=True), never)
    assert train.column_names == ["text", "score"] and others == {}
    assert list(train) == [{"text": "a", "score": 1}, {"text": "b", "score": 2}]


def test_nothing_to_train_on(tmp_path):
    (tmp_path / "v.csv").write_text("text\nx\n")
    with pytest.raises(DataError, match="--streaming.*--train_file"):
        load_stream(DataConfig(validation_file=str(tmp_path / "v.csv"), streaming=True), never)


@pytest.mark.parametrize(
    "late, wanted",
    [
        ({"id": "x"}, r"line 1002: column id holds a string \(\"x\"\) where the first 1,000 rows .* a whole"),
        ({"id": 0.5}, "column id holds a fraction"),
        ({"id": 1, "more": 2}, "more is in none of the first 1,000 rows"),
        ({"id": 1, "chat": [{"role": "a", "name": "b"}]}, r"chat\[\].name is in none of"),
        ({"id": 1, "chat": ["a"]}, r"column chat\[\] holds a string"),
    ],
)
def test_a_row_that_does_not_fit_the_first_ones(tmp_path, late, wanted):
    path = tmp_path / "a.jsonl"
    rows = [{"id": number, "chat": [{"role": "a"}], "none": None, "score": 0.5} for number in range(1000)]
    fits = {"id": None, "none": "something", "score": 3}
    path.write_text(lines([*rows, fits, late]))
    train, _ = load_stream(DataConfig(train_file=str(path), streaming=True), never)
    assert list(islice(train, 1000, 1001)) == [{"id": None, "chat": None, "none": "something", "score": 3.0}]
    with pytest.raises(DataError, match=wanted):
        list(train)


def test_files_that_do_not_fit(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\na,x\n")
    (tmp_path / "b.csv").write_text("text,class\na,x\n")
    train, _ = load_stream(DataConfig(train_file=str(tmp_path), streaming=True), never)
    with pytest.raises(DataError, match=r"b.csv has other columns than .*a.csv: it lacks label"):
        list(train)
    (tmp_path / "b.csv").write_text("")
    with pytest.raises(DataError, match="b.csv is empty"):
        load_stream(DataConfig(train_file=str(tmp_path), streaming=True), never)


def test_all_formats_stream(tmp_path):
    """Every reader gives in a stream what it gives as a whole."""
    texts = {
        ".csv": "text\na\n",
        ".tsv": "text\na\n",
        ".json": '[{"text": "a"}]',
        ".jsonl": '{"text": "a"}\n',
        ".txt": "a\n",
        ".conll": "a O\n",
        ".bio": "a O\n",
        ".iob": "a O\n",
        ".iob2": "a O\n",
    }
    for ending in files.endings():
        path = tmp_path / f"rows{ending}"
        if ending in texts:
            path.write_text(texts[ending])
        elif ending == ".parquet":
            Dataset.from_list([{"text": "a"}]).to_parquet(path)
        else:
            Dataset.from_list([{"text": "a"}]).save_to_disk(tmp_path / "saved")
            (tmp_path / "saved" / "data-00000-of-00001.arrow").rename(path)
        train, _ = load_stream(DataConfig(train_file=str(path), streaming=True), never)
        assert list(train) == list(files.load_file(path)) != []
