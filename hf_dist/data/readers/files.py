"""Local data files: read once on a machine into an Arrow file, with the exact place of any fault.

Text formats go through the standard library's readers and not through an Arrow or pandas parser, because
those guess ("NA" is a null, "2020-01-01" is a date) and do not say in which line a fault lies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from datasets import Dataset
from datasets.arrow_writer import ArrowWriter

from hf_dist.config import FileFormat
from hf_dist.data.cache import build_once, cache_dir, key_of
from hf_dist.data.readers.arrow import (
    arrow_batches,
    arrow_schema,
    arrow_table,
    parquet_batches,
    parquet_schema,
    parquet_table,
)
from hf_dist.data.readers.conll import conll_rows
from hf_dist.data.readers.delimited import csv_rows, tsv_rows
from hf_dist.data.readers.json_cells import JsonColumns, table_with_json_text, with_json_text
from hf_dist.data.readers.json_files import json_lines, json_rows
from hf_dist.data.readers.sniffing import sniff
from hf_dist.data.readers.tables import table_of
from hf_dist.data.readers.text import ARCHIVES, Row, no_rows, suffixes, text_rows
from hf_dist.errors import DataError

# Part of the cache's key: raise it when the same file would be read differently.
_READER = 3


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


FORMATS: dict[FileFormat, TextFormat | ColumnFormat] = {
    "conll": TextFormat(rows=conll_rows),
    "csv": TextFormat(rows=csv_rows, text_only=True),
    "tsv": TextFormat(rows=tsv_rows, text_only=True),
    "json": TextFormat(rows=json_rows, sparse=True),
    "jsonl": TextFormat(rows=json_lines, sparse=True),
    "txt": TextFormat(rows=text_rows, text_only=True),
    "parquet": ColumnFormat(schema=parquet_schema, table=parquet_table, batches=parquet_batches),
    "arrow": ColumnFormat(schema=arrow_schema, table=arrow_table, batches=arrow_batches),
}
ENDINGS: dict[str, FileFormat] = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".json": "json",
    ".jsonl": "jsonl",
    ".txt": "txt",
    ".conll": "conll",
    ".bio": "conll",
    ".iob": "conll",
    ".iob2": "conll",
    ".parquet": "parquet",
    ".arrow": "arrow",
}


def load_file(
    name: str | Path,
    file_format: FileFormat | None = None,
    *,
    json_columns: JsonColumns = frozenset(),
) -> Dataset:
    """Reads a file of one of `FORMATS` into a memory-mapped data set.

    The cells of CSV and TSV are text, whatever they look like, and an empty one is null. JSON is one object
    a line, a list of objects, an object whose `data` is that list, or that of SQuAD. Text formats may be
    packed (.gz, .zst).

    Args:
        name: the file.
        file_format: what it holds; None as `format_of` finds it.
        json_columns: columns whose cells are kept as JSON text (see `json_cells`).

    Raises:
        DataError: as `format_of`, nothing in it, or contents that are not of the format; with the line, row
            or byte of the fault.
    """
    path = Path(name).expanduser().absolute()
    file_format = format_of(path, file_format)
    form = FORMATS[file_format]
    with _permission(path):
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

        facts = (file_format, str(path), stat.st_size, stat.st_mtime_ns, sorted(json_columns))
        key = key_of(_READER, *facts)
        return Dataset.from_file(str(build_once(cache_dir() / "files" / key, build) / "data.arrow"))


def format_of(path: Path, file_format: FileFormat | None = None) -> FileFormat:
    """The format that the user says, or else the file's name, or else its contents.

    Raises:
        DataError: it is no file, it is empty, it is of columns and packed, or neither name nor contents say
            what it is.
    """
    if not path.exists():
        raise DataError(f"there is no file {path}; check the path (relative ones start at {Path.cwd()})")
    if not path.is_file():
        raise DataError(f"{path} is not a file; name one of {', '.join(FORMATS)}")
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty; expected a file with rows")
    ending, archive = suffixes(path)
    with _permission(path):
        found = file_format or ENDINGS.get(ending) or sniff(path)
    if found is None:
        raise DataError(
            f"{path}: neither its ending ({ending + archive or 'none'}) nor its contents say what it holds "
            f"(plain text is never guessed); say it with --file_format {'|'.join(FORMATS)}, or end its name "
            f"in one of {', '.join(ENDINGS)}, for text formats also with {' or '.join(ARCHIVES)}"
        )
    if archive and isinstance(FORMATS[found], ColumnFormat):
        raise DataError(f"{path}: {found} files are packed inside; unpack it and drop {archive}")
    return found


def has_known_ending(path: Path) -> bool:
    """Whether a file's ending says a format that can be read (columns are not, in an archive)."""
    ending, archive = suffixes(path)
    form = ENDINGS.get(ending)
    return form is not None and not (archive and isinstance(FORMATS[form], ColumnFormat))


def read_rows(
    path: Path, file_format: FileFormat, *, json_columns: JsonColumns = frozenset()
) -> Iterator[Row]:
    """The rows of a file, one after another, with nothing kept of those before.

    Args:
        path: the file.
        file_format: what it holds.
        json_columns: columns whose cells are given as JSON text.

    Raises:
        DataError: as `load_file`, when the row of the fault is reached.
    """
    form = FORMATS[file_format]
    count = 0
    with _permission(path):
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
    if count == 0:
        raise no_rows(path)


@contextmanager
def _permission(path: Path) -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        raise DataError(f"{path} can't be read ({error.strerror}); change its permissions") from error
