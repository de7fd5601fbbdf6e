"""Local data files: read once on a machine into an Arrow file, with the exact place of any fault.

Text formats go through the standard library's readers and not through an Arrow or pandas parser, because
those guess ("NA" is a null, "2020-01-01" is a date) and do not say in which line a fault lies.
"""

from __future__ import annotations

import codecs
import csv
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.parquet
from datasets import Dataset
from datasets.arrow_writer import ArrowWriter

from hf_dist.data.cache import build_once, cache_dir, key_of
from hf_dist.errors import DataError

# Part of the cache's key: raise it when the same file would be read differently.
_READER = 1
_BATCH = 10_000

_Row = tuple[int, dict[str, Any]]  # line in the file (from 1), and the cells by column


def load_file(name: str) -> Dataset:
    """Reads a .csv, .tsv, .json, .jsonl or .parquet file into a memory-mapped data set.

    The cells of CSV and TSV are text, whatever they look like, and an empty one is null. JSON is either
    one object a line, or a list of objects, or an object whose `data` is that list.

    Raises:
        DataError: no such file, nothing in it, another ending, or contents that are not what the ending
            says; with the line, row or byte of the fault.
    """
    path = Path(name).expanduser().absolute()
    if not path.exists():
        raise DataError(f"there is no file {path}; check the path (relative ones start at {Path.cwd()})")
    if not path.is_file():
        raise DataError(f"{path} is not a file; name one of {', '.join(READERS)}")
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{path} ends in {path.suffix or 'no suffix'}; expected one of {', '.join(READERS)}")
    try:
        stat = path.stat()
        if stat.st_size == 0:
            raise DataError(f"{path} is empty; expected a file with rows")
        open(path, "rb").close()

        def build(folder: Path) -> None:
            table = reader(path)
            if table.num_rows == 0:
                raise DataError(f"{path} has no rows; expected at least one after the header")
            with ArrowWriter(path=str(folder / "data.arrow")) as writer:
                writer.write_table(table)
                writer.finalize()

        key = key_of(_READER, str(path), stat.st_size, stat.st_mtime_ns)
        return Dataset.from_file(str(build_once(cache_dir() / "files" / key, build) / "data.arrow"))
    except PermissionError as error:
        raise DataError(f"{path} can't be read ({error.strerror}); change its permissions") from error


def _read_csv(path: Path) -> pa.Table:
    return _table(path, lambda: _csv_rows(path, ","), text_only=True)


def _read_tsv(path: Path) -> pa.Table:
    return _table(path, lambda: _csv_rows(path, "\t"), text_only=True)


def _read_json(path: Path) -> pa.Table:
    return _table(path, lambda: _json_rows(path), text_only=False)


def _read_json_lines(path: Path) -> pa.Table:
    return _table(path, lambda: _json_lines(path), text_only=False)


def _read_parquet(path: Path) -> pa.Table:
    try:
        return pyarrow.parquet.read_table(path, memory_map=True)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{path} is not a whole parquet file ({reason}); write it again") from error


READERS: dict[str, Callable[[Path], pa.Table]] = {
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".json": _read_json,
    ".jsonl": _read_json_lines,
    ".parquet": _read_parquet,
}


@contextmanager
def _text(path: Path) -> Iterator[TextIO]:
    """Opens a UTF-8 file, with or without byte order mark, line ends kept; a wrong byte is located."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            yield file
    except UnicodeDecodeError as error:
        raise _wrong_encoding(path) from error


def _wrong_encoding(path: Path) -> DataError:
    # The error that a text file raises counts from the start of its buffer and not of the file.
    decoder = codecs.getincrementaldecoder("utf-8")()
    position = pending = 0
    with open(path, "rb") as file:
        head = file.read(2)
        if head in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            return DataError(f"{path} is UTF-16 (its byte order mark says so); save it as UTF-8")
        file.seek(0)
        while True:
            chunk = file.read(1 << 20)
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                # What the decoder kept back from the chunk before stands in front of this one.
                at = position - pending + error.start
                file.seek(at)
                byte = file.read(1).hex()
                return DataError(f"{path} is not UTF-8: byte {at} (from 0) is 0x{byte}; save it as UTF-8")
            if not chunk:
                break
            position += len(chunk)
            pending = len(decoder.getstate()[0])
    return DataError(f"{path} is not UTF-8, or it changed while it was read; save the file as UTF-8")


def _csv_rows(path: Path, delimiter: str) -> Iterator[_Row]:
    limit = csv.field_size_limit(sys.maxsize)  # the default refuses a cell of more than 131,072 characters
    try:
        with _text(path) as file:
            lines = csv.reader(file, delimiter=delimiter, strict=True)
            try:
                header = next((line for line in lines if line), [])
                names = [name or f"unnamed_{place}" for place, name in enumerate(header)]
                if twice := sorted({name for name in names if names.count(name) > 1}):
                    raise DataError(f"{path}, line 1: two columns are named {twice[0]}; rename one of them")
                for cells in lines:
                    if not cells:
                        continue  # a blank line
                    if len(cells) != len(names):
                        raise DataError(
                            f"{path}, line {lines.line_num}: {len(cells)} cells where the header has "
                            f"{len(names)}; put cells that hold a delimiter or a quote in double quotes"
                        )
                    yield lines.line_num, dict(zip(names, (cell or None for cell in cells), strict=True))
            except csv.Error as error:
                raise DataError(
                    f"{path}, line {lines.line_num}: {error}; write a double quote inside a quoted cell twice"
                ) from error
    finally:
        csv.field_size_limit(limit)


def _json_rows(path: Path) -> Iterator[_Row]:
    with _text(path) as file:
        first = file.readline()
        while first and not first.strip():
            first = file.readline()
        starts_list = first.lstrip().startswith("[")
        if not starts_list and _is_json(first):
            document = json.loads(first)
            if not (isinstance(document.get("data"), list) and not file.read().strip()):
                yield from _json_lines(path)
                return
        else:
            file.seek(0)
            try:
                document = json.load(file)
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{path}, line {error.lineno}, column {error.colno}: broken JSON ({error.msg}); expected "
                    "one object a line, or one list of objects"
                ) from error
    rows = document.get("data") if isinstance(document, dict) else document
    if not isinstance(rows, list):
        raise DataError(
            f"{path} holds one JSON value and no rows; expected one object a line, or a list of them"
        )
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise DataError(f"{path}, item {number}: expected an object, found {_kind(row)}")
        yield number, row


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except json.JSONDecodeError:
        return False


def _json_lines(path: Path) -> Iterator[_Row]:
    with _text(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{path}, line {number}: broken JSON at column {error.colno} ({error.msg}); expected one "
                    "object a line"
                ) from error
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {number}: expected an object, found {_kind(row)}")
            yield number, row


def _table(path: Path, rows: Callable[[], Iterator[_Row]], *, text_only: bool) -> pa.Table:
    """Makes Arrow columns of rows, in batches, so that Python objects of a whole file never exist."""
    batches: list[pa.Table] = []
    pending: list[dict[str, Any]] = []

    def flush() -> None:
        names = list(dict.fromkeys(name for row in pending for name in row))
        columns = {
            name: pa.array([row.get(name) for row in pending], pa.string() if text_only else None)
            for name in names
        }
        batches.append(pa.table(columns))
        pending.clear()

    try:
        for _, row in rows():
            pending.append(row)
            if len(pending) == _BATCH:
                flush()
        if pending:
            flush()
        return pa.concat_tables(batches, promote_options="permissive") if batches else pa.table({})
    except (pa.ArrowException, UnicodeError, OverflowError) as error:
        # UnicodeError: half a surrogate pair, which JSON can write and UTF-8 can't.
        reason = " ".join(str(error).split())
        raise _mixed(path, rows()) or DataError(f"{path} can't be read as a table: {reason}") from error


def _mixed(path: Path, rows: Iterator[_Row]) -> DataError | None:
    """Finds the first cell of another kind than its column had before."""
    seen: dict[str, tuple[str, int, Any]] = {}
    for line, row in rows:
        for name, value in row.items():
            if value is None:
                continue
            kind = _kind(value)
            before, first_line, first = seen.setdefault(name, (kind, line, value))
            if kind != before:
                return DataError(
                    f"{path}, line {line}: column {name} holds {kind} ({_short(value)}) where line "
                    f"{first_line} "
                    f"holds {before} ({_short(first)}); write one kind"
                )
    return None


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    names = {str: "a string", list: "a list", dict: "an object", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else text[:37] + "..."
