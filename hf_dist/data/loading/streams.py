"""Training rows as a stream: read while the run trains, never held as a whole, with no length.

Evaluation needs the same rows each time and their number, so the other splits are read as a whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset, DatasetDict, DatasetInfo, Features, IterableDataset
from datasets.table import InMemoryTable

from hf_dist.config import DataConfig
from hf_dist.data.loading.hub import stream_faults, stream_hub
from hf_dist.data.loading.named import files_by_split, load_local, named_folder
from hf_dist.data.loading.saved import is_saved, load_saved, load_saved_split
from hf_dist.data.loading.shards import check_columns, files_of, formats_of
from hf_dist.data.readers.cells import FixedKinds
from hf_dist.data.readers.files import read_rows
from hf_dist.data.readers.formats import AnyFormat, TextFormat
from hf_dist.data.readers.json_cells import JsonColumns, schema_with_json_text
from hf_dist.data.readers.tables import few_rows
from hf_dist.errors import DataError

# Columns and their types are those that so many rows of the first file show.
_SHOWN_ROWS = 1_000


def first_of_stream(stream: IterableDataset) -> Dataset:
    """The first rows of a stream as a data set with the stream's features."""
    rows = list(stream.take(_SHOWN_ROWS))
    if not rows:
        raise DataError("--streaming: the training data has no rows; give a file with some")
    return Dataset.from_list(rows, features=stream.features)


def load_stream(
    data: DataConfig,
    builtin: Callable[[], DatasetDict],
    *,
    train_only: bool = False,
    json_columns: JsonColumns = frozenset(),
) -> tuple[IterableDataset, DatasetDict]:
    """Opens the training split that `data` names as a stream, and loads its other splits.

    The stream has features (`column_names`), is in the order of the data, and its position can be saved
    (`state_dict`). Shuffle it by `stream.shuffle(seed=, buffer_size=)`, whose buffer is not part of the
    position. Every file is a shard of its own: where their number is a multiple of that of the ranks
    (`split_dataset_by_node`), a rank opens its own files only, else it reads all and keeps its share.

    `max_train_samples` is applied here, to the order of the data; `max_eval_samples` and
    `max_predict_samples` are where they spare reading. No validation rows are held out of a stream.

    Args:
        data: the configuration; without data set and files, `builtin` is called.
        builtin: makes the built-in data of the task.
        train_only: leave the other splits unread.
        json_columns: columns of local files whose cells are given as JSON text (see `json_cells`).

    Raises:
        DataError: as `load_splits`, or there is no training split; faults of later rows are raised when
            they are reached.
    """
    files = files_by_split(data)
    limit = data.max_train_samples
    others = DatasetDict()
    train: IterableDataset | None = None
    if data.dataset_name is not None and not is_saved(data.dataset_name):
        train, others = _from_hub(data, files, train_only=train_only)
    else:
        splits = DatasetDict()
        if data.dataset_name is not None:
            splits = load_saved(named_folder(data), data)
        elif not files:
            splits = builtin()
        elif "train" in files and is_saved(files["train"]):
            splits = load_saved(files["train"], data)
        elif "train" in files:
            paths = files_of(files["train"], data.file_format)
            train = stream_files(paths, limit, data.file_format, json_columns=json_columns)
        others = DatasetDict({split: rows for split, rows in splits.items() if split != "train"})
        if "train" in splits:
            rows = splits["train"]
            train = rows.select(range(min(limit or len(rows), len(rows)))).to_iterable_dataset()
    if train is None:
        raise DataError("--streaming: there are no training rows to stream; give --train_file")
    return train, DatasetDict() if train_only else _other_splits(others, files, data, json_columns)


def _other_splits(
    others: DatasetDict, files: dict[str, str], data: DataConfig, json_columns: JsonColumns
) -> DatasetDict:
    """The splits beside the stream: those that came with it, and those of files in their place."""
    for split, name in files.items():
        if split != "train":
            saved = is_saved(name)
            others[split] = (
                load_saved_split(name, split, data) if saved else load_local(name, data, json_columns)
            )
    for split, rows in others.items():
        if len(rows) == 0:
            raise DataError(f"the {split} split of {data.dataset_name or files.get(split)} has no rows")
    return others


def stream_files(
    files: Sequence[Path],
    limit: int | None,
    file_format: str | None = None,
    *,
    json_columns: JsonColumns = frozenset(),
) -> IterableDataset:
    """A stream of the rows of files, one file after the other.

    Args:
        files: each a shard.
        limit: most rows, over all files; the files are then one shard, so that it means the same rows on
            any number of ranks.
        file_format: what they hold; None as `format_of` finds it.
        json_columns: columns whose cells are given as JSON text.

    Raises:
        DataError: the first rows of the first file can't be read, or another file is none of a known format;
            while it is read: as `load_file`, or a file or a row does not fit the first rows.
    """
    formats = dict(zip(files, formats_of(files, file_format), strict=True))
    first = files[0]
    form = formats[first]
    if isinstance(form, TextFormat):
        head = itertools.islice(read_rows(first, form, json_columns=json_columns), _SHOWN_ROWS)
        schema = few_rows(first, head, text_only=form.text_only, json_columns=json_columns).schema
    else:
        schema = schema_with_json_text(form.schema(first), json_columns)
    features = Features.from_arrow_schema(schema)
    # A list is what datasets takes for shards; a tuple is one value.
    shards: Any = list(files) if limit is None else tuple(files)
    rows = _FileRows(first=first, formats=formats, features=features, limit=limit, json_columns=json_columns)
    return IterableDataset.from_generator(rows, features=features, gen_kwargs={"files": shards})


@dataclass(frozen=True, kw_only=True)
class _FileRows:
    """The generator of a stream; an object, so that it can be pickled, with all that reading needs."""

    first: Path
    formats: Mapping[Path, AnyFormat]
    features: Features
    limit: int | None
    json_columns: JsonColumns

    def __call__(self, files: Sequence[Path]) -> Iterator[dict[str, Any]]:
        rows = (row for path in files for row in self._of(path))
        return itertools.islice(rows, self.limit)

    def _of(self, path: Path) -> Iterator[dict[str, Any]]:
        form = self.formats[path]
        columns = list(self.features)
        kinds = FixedKinds(self.features.arrow_schema, f"the first {_SHOWN_ROWS:,} rows of {self.first.name}")
        rows = read_rows(path, form, json_columns=self.json_columns)
        for number, (place, row) in enumerate(rows):
            # Only rows of JSON may leave cells out: elsewhere the first one shows all columns.
            if number == 0 and not (isinstance(form, TextFormat) and form.sparse):
                check_columns(path, list(row), self.first, columns)
            if isinstance(form, TextFormat) and not form.text_only:
                kinds.check(path, place, row)
            yield {column: row.get(column) for column in columns}


def _from_hub(
    data: DataConfig, files: dict[str, str], *, train_only: bool
) -> tuple[IterableDataset | None, DatasetDict]:
    streams = stream_hub(data)
    others = DatasetDict()
    limits = {"validation": data.max_eval_samples, "test": data.max_predict_samples}
    for split, stream in streams.items():
        if split != "train" and split not in files and not train_only:
            with stream_faults(data):
                others[split] = _all_rows(stream, limits[split])
    train = streams.get("train")
    if train is None:
        return None, others
    if train.features is None:
        with stream_faults(data):
            shown = _all_rows(train, _SHOWN_ROWS)
        train = train.cast(shown.features)
    return (train if data.max_train_samples is None else train.take(data.max_train_samples)), others


def _all_rows(stream: IterableDataset, limit: int | None) -> Dataset:
    """The first rows of a stream, or all, in memory."""
    if limit is not None:
        stream = stream.take(limit)
    tables = list(stream.with_format("arrow").iter(batch_size=_SHOWN_ROWS))
    table = pa.concat_tables(tables, promote_options="permissive") if tables else pa.table({})
    return Dataset(InMemoryTable(table), info=DatasetInfo(features=stream.features))
