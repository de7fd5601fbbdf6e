"""Lengths against len() of every row."""

from __future__ import annotations

import time

import datasets
import numpy as np
import pyarrow as pa
import pytest

from hf_dist.batching.lengths import lengths_of
from hf_dist.errors import DataError


@pytest.fixture(scope="module")
def data() -> datasets.Dataset:
    rng = np.random.default_rng(0)
    sizes = rng.integers(0, 20, 500)
    return datasets.Dataset.from_dict(
        {
            "input_ids": [list(range(size)) for size in sizes],
            "labels": [[1] * int(size) for size in sizes[::-1]],
            "n": sizes.tolist(),
            "text": ["x"] * 500,
        }
    )


def by_hand(dataset: datasets.Dataset, column: str = "input_ids") -> list[int]:
    return [len(row[column]) for row in dataset]


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d,
        lambda d: d.shuffle(seed=3),
        lambda d: d.select([7, 7, 3, 499]),
        lambda d: d.select(range(100, 250)),
        lambda d: d.shuffle(seed=1).select(range(50)).shuffle(seed=2),
        lambda d: d.sort("n"),
        lambda d: d.select([]),
        lambda d: datasets.concatenate_datasets([d.select([5, 4]), d]),
        lambda d: d.filter(lambda row: row["n"] > 9),
        lambda d: d.with_format("torch"),
        lambda d: d.train_test_split(test_size=0.3, seed=0)["test"],
    ],
)
def test_every_view_of_the_data(data, change):
    view = change(data)
    assert lengths_of(view).tolist() == by_hand(view)
    assert lengths_of(view).dtype == np.int64


def test_kinds_of_columns(data):
    assert lengths_of(data, "n").tolist() == by_hand(data)
    both = lengths_of(data, ("input_ids", "labels"))
    assert both.tolist() == [list(pair) for pair in zip(by_hand(data), by_hand(data, "labels"), strict=True)]
    large = data.cast_column("input_ids", datasets.LargeList(datasets.Value("int32")))
    assert lengths_of(large).tolist() == by_hand(data)
    fixed = datasets.Dataset.from_dict(
        {"input_ids": [[1, 2, 3]] * 4},
        features=datasets.Features({"input_ids": datasets.List(datasets.Value("int32"), length=3)}),
    )
    assert lengths_of(fixed).tolist() == [3] * 4
    assert lengths_of(pa.table({"input_ids": [[1], [1, 2]]})).tolist() == [1, 2]


def test_on_disk(data, tmp_path):
    data.save_to_disk(tmp_path / "data")
    assert lengths_of(datasets.load_from_disk(tmp_path / "data")).tolist() == by_hand(data)


def test_kept_by_fingerprint(data):
    view = data.select([3, 1])
    assert lengths_of(view) is lengths_of(view)
    assert lengths_of(view) is not lengths_of(data.select([1, 3]))
    with pytest.raises(ValueError, match="read-only"):
        lengths_of(view)[0] = 7


def test_errors(data):
    with pytest.raises(DataError, match=r"no column 'inputs_ids' \(did you mean input_ids\?\)"):
        lengths_of(data, "inputs_ids")
    with pytest.raises(DataError, match="column 'text' holds string"):
        lengths_of(data, "text")
    with pytest.raises(DataError, match="1 rows have no value"):
        lengths_of(datasets.Dataset.from_dict({"input_ids": [[1], None]}))
    with pytest.raises(DataError, match="can't be read from a list"):
        lengths_of([[1, 2]])


def test_tokens_are_not_touched():
    """A million rows of a hundred tokens in well under the time it takes to look at each row once."""
    offsets = pa.array(np.arange(0, 100_000_001, 100, dtype=np.int32))
    tokens = pa.array(np.zeros(100_000_000, dtype=np.int8))
    table = pa.table({"input_ids": pa.ListArray.from_arrays(offsets, tokens)})
    before = time.perf_counter()
    lengths = lengths_of(table)
    assert time.perf_counter() - before < 1.0
    assert len(lengths) == 1_000_000 and lengths.min() == lengths.max() == 100
