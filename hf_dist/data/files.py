"""Local data files: read once on a machine into an Arrow file, with the exact place of any fault.

Text formats go through the standard library's readers and not through an Arrow or pandas parser, because
those guess ("NA" is a null, "2020-01-01" is a date) and do not say in which line a fault lies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from datasets import Dataset
from datasets.arrow_writer import ArrowWriter

from hf_dist.data.arrow_files import (
    arrow_batches,
    arrow_schema,
    arrow_table,
    parquet_batches,
    parquet_schema,
    parquet_table,
)
from hf_dist.data.cache import build_once, cache_dir, key_of
from hf_dist.data.conll import conll_rows
from hf_dist.data.delimited import csv_rows, tsv_rows
from hf_dist.data.json_cells import JsonColumns, table_with_json_text, with_json_text
from hf_dist.data.json_files import json_lines, json_rows
from hf_dist.data.tables import table_of
from hf_dist.data.text_files import ARCHIVES, Row, suffixes, text_rows
from hf_dist.errors import DataError

# Part of the cache's key: raise it when the same file would be read differently.
_READER = 2


@dataclass(frozen=True, kw_only=True)
class TextFormat:
    """Files read line by line, packed or not.

    Attributes:
        rows: reads a file.
        text_only: all cells are strings.
        sparse: a row may leave cells out.
    """

    rows: Callable[[Path], Iterator[Row]]
    text_only: bool = False
    sparse: bool = False


@dataclass(frozen=True, kw_only=True)
class ColumnFormat:
    """Files that hold Arrow columns: the whole of one, its types, and batches of its rows."""

    schema: Callable[[Path], pa.Schema]
    table: Callable[[Path], pa.Table]
    batches: Callable[[Path], Iterator[pa.RecordBatch]]


_CONLL = TextFormat(rows=conll_rows)
FORMATS: dict[str, TextFormat | ColumnFormat] = {
    ".csv": TextFormat(rows=csv_rows, text_only=True),
    ".tsv": TextFormat(rows=tsv_rows, text_only=True),
    ".json": TextFormat(rows=json_rows, sparse=True),
    ".jsonl": TextFormat(rows=json_lines, sparse=True),
    ".txt": TextFormat(rows=text_rows, text_only=True),
    ".conll": _CONLL,
    ".bio": _CONLL,
    ".iob": _CONLL,
    ".iob2": _CONLL,
    ".parquet": ColumnFormat(schema=parquet_schema, table=parquet_table, batches=parquet_batches),
    ".arrow": ColumnFormat(schema=arrow_schema, table=arrow_table, batches=arrow_batches),
}


def load_file(name: str | Path, json_columns: JsonColumns = frozenset()) -> Dataset:
    """Reads a file of one of `FORMATS` into a memory-mapped data set.

    The cells of CSV and TSV are text, whatever they look like, and an empty one is null. JSON is one object
    a line, a list of objects, an object whose `data` is that list, or that of SQuAD. Text formats may be
    packed (.gz, .zst).

    Args:
        name: the file.
        json_columns: columns whose cells are kept as JSON text (see `json_cells`).

    Raises:
        DataError: no such file, nothing in it, another ending, or contents that are not what the ending
            says; with the line, row or byte of the fault.
    """
    path = Path(name).expanduser().absolute()
    form = format_of(path)
    try:
        stat = path.stat()
        open(path, "rb").close()

        def build(folder: Path) -> None:
            if isinstance(form, TextFormat):
                table = table_of(
                    path, lambda: form.rows(path), text_only=form.text_only, json_columns=json_columns
                )
            else:
                table = table_with_json_text(form.table(path), json_columns)
            if table.num_rows == 0:
                raise no_rows(path)
            with ArrowWriter(path=str(folder / "data.arrow")) as writer:
                writer.write_table(table)
                writer.finalize()

        key = key_of(_READER, str(path), stat.st_size, stat.st_mtime_ns, sorted(json_columns))
        return Dataset.from_file(str(build_once(cache_dir() / "files" / key, build) / "data.arrow"))
    except PermissionError as error:
        raise DataError(f"{path} can't be read ({error.strerror}); change its permissions") from error


def format_of(path: Path) -> TextFormat | ColumnFormat:
    """The format that a file's name says.

    Raises:
        DataError: it is no file, it is empty, or its ending is none that is read.
    """
    if not path.exists():
        raise DataError(f"there is no file {path}; check the path (relative ones start at {Path.cwd()})")
    if not path.is_file():
        raise DataError(f"{path} is not a file; name one of {', '.join(FORMATS)}")
    ending, archive = suffixes(path)
    form = FORMATS.get(ending)
    if form is None or (archive and isinstance(form, ColumnFormat)):
        if form is not None:
            raise DataError(f"{path}: {ending} files are packed inside; unpack it and drop {archive}")
        raise DataError(
            f"{path} ends in {ending + archive or 'no suffix'}; expected one of {', '.join(FORMATS)}, the "
            f"text formats also with {' or '.join(ARCHIVES)}"
        )
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty; expected a file with rows")
    return form


def is_readable(path: Path) -> bool:
    """Whether a file's ending is one that is read."""
    ending, archive = suffixes(path)
    form = FORMATS.get(ending)
    return form is not None and not (archive and isinstance(form, ColumnFormat))


def read_rows(path: Path, json_columns: JsonColumns = frozenset()) -> Iterator[Row]:
    """The rows of a file, one after another, with nothing kept of those before.

    Args:
        path: the file.
        json_columns: columns whose cells are given as JSON text.

    Raises:
        DataError: as `load_file`, when the row of the fault is reached.
    """
    form = format_of(path)
    count = 0
    try:
        if isinstance(form, TextFormat):
            for place, row in form.rows(path):
                count += 1
                yield place, with_json_text(row, json_columns)
        else:
            for batch in form.batches(path):
                table = table_with_json_text(pa.Table.from_batches([batch]), json_columns)
                for cells in table.to_pylist():
                    count += 1
                    yield f"row {count}", cells
    except PermissionError as error:
        raise DataError(f"{path} can't be read ({error.strerror}); change its permissions") from error
    if count == 0:
        raise no_rows(path)


def no_rows(path: Path) -> DataError:
    """What a file without rows is answered with."""
    return DataError(f"{path} has no rows; expected at least one (after the header, where it has one)")
