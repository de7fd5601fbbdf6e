"""Arrow tables of rows, in batches, so that Python objects of a whole file never exist."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from hf_dist.data.readers.cells import Kinds, short
from hf_dist.data.readers.formats import Row
from hf_dist.data.readers.json_cells import JsonColumns, is_json_column, json_text, with_json_text
from hf_dist.errors import DataError

_BATCH = 10_000
_UNFIT = (pa.ArrowException, UnicodeError, OverflowError)


def table_of(
    path: Path,
    rows: Callable[[], Iterator[Row]],
    *,
    text_only: bool,
    json_columns: JsonColumns = frozenset(),
) -> pa.Table:
    """Makes Arrow columns of rows; a cell that a row lacks is null.

    Args:
        path: for messages.
        rows: starts to read; called once more where a fault has to be found.
        text_only: all cells are strings, also in a column without any.
        json_columns: those whose cells become JSON text, whatever they hold.

    Raises:
        DataError: a cell of another kind than its column, or one that Arrow can't hold.
    """
    batches: list[pa.Table] = []
    pending: list[dict[str, Any]] = []
    try:
        for _, row in rows():
            pending.append(row)
            if len(pending) == _BATCH:
                batches.append(_columns(pending, text_only, json_columns))
                pending.clear()
        if pending:
            batches.append(_columns(pending, text_only, json_columns))
        return pa.concat_tables(batches, promote_options="permissive") if batches else pa.table({})
    except _UNFIT as error:
        _find_fault(path, rows(), json_columns)
        raise DataError(f"{path} can't be read as a table: {' '.join(str(error).split())}") from error


def few_rows(
    path: Path, rows: Iterable[Row], *, text_only: bool, json_columns: JsonColumns = frozenset()
) -> pa.Table:
    """The table of rows that are all in memory."""
    kept = list(rows)
    return table_of(path, lambda: iter(kept), text_only=text_only, json_columns=json_columns)


def _columns(rows: list[dict[str, Any]], text_only: bool, json_columns: JsonColumns) -> pa.Table:
    columns = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        cells = [row.get(name) for row in rows]
        if is_json_column(name, json_columns):
            columns[name] = pa.array(map(json_text, cells), pa.string())
        else:
            columns[name] = pa.array(cells, pa.string() if text_only else None)
    return pa.table(columns)


def _find_fault(path: Path, rows: Iterator[Row], json_columns: JsonColumns) -> None:
    kinds = Kinds()
    for place, cells in rows:
        row = with_json_text(cells, json_columns)
        kinds.check(path, place, row)
        for name, value in row.items():
            try:
                pa.array([value])
            except _UNFIT as error:
                # UnicodeError: half a surrogate pair, which JSON can write and UTF-8 can't.
                reason = " ".join(str(error).split())
                raise DataError(
                    f"{path}, {place}: column {name} holds {short(value)}, which has no place in a table "
                    f"({reason}); write it otherwise"
                ) from error
