"""Columns whose cells have no common type, such as conversations: each cell is kept as JSON text.

Arrow gives a column one type. Objects in it get the keys of all others, filled with null; whole numbers
become fractions where another row has those; and a list where others have a string can't be held at all.
None of that may happen to what a chat template writes out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

JsonColumns = frozenset[str]
"""Names of columns in lower case."""


def is_json_column(name: str, columns: JsonColumns) -> bool:
    """Whether a column is one of those whose cells are kept as JSON text."""
    return name.strip().lower() in columns


def json_text(cell: Any) -> str | None:
    """A cell as JSON text; a string is taken for such text already, and a null stays one."""
    # Letters stay as they are, so that half a surrogate pair is found where the table is made.
    return cell if cell is None or isinstance(cell, str) else json.dumps(cell, ensure_ascii=False)


def with_json_text(row: dict[str, Any], columns: JsonColumns) -> dict[str, Any]:
    """A row of a text file, with JSON text in those of `columns` that it has."""
    if not columns:
        return row
    return {name: json_text(cell) if is_json_column(name, columns) else cell for name, cell in row.items()}


def table_with_json_text(table: pa.Table, columns: JsonColumns) -> pa.Table:
    """A table with JSON text in those of `columns` that hold lists or objects."""
    for at, field in enumerate(table.schema):
        if is_json_column(field.name, columns) and not is_text(field.type):
            texts = [pa.array(map(json_text, plain_cells(part)), pa.string()) for part in table[at].chunks]
            table = table.set_column(at, field.name, pa.chunked_array(texts, pa.string()))
    return table


def schema_with_json_text(schema: pa.Schema, columns: JsonColumns) -> pa.Schema:
    """The types of `table_with_json_text`."""
    return table_with_json_text(schema.empty_table(), columns).schema


def plain_cells(values: pa.Array | pa.ChunkedArray) -> list[Any]:
    """The cells of a column as Python values.

    Keys of objects that are null are left out: Arrow fills them in. Arrow's JSON type and maps become what
    they stand for.
    """
    return [_plain(cell, values.type) for cell in values.to_pylist()]


def is_text(kind: pa.DataType) -> bool:
    """Whether cells of a type are strings."""
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _plain(cell: Any, kind: pa.DataType) -> Any:
    if cell is None:
        return None
    if isinstance(kind, pa.BaseExtensionType) and kind.extension_name == "arrow.json":
        return json.loads(cell)
    if pa.types.is_map(kind):
        return {key: _plain(value, kind.item_type) for key, value in cell}
    if isinstance(cell, list):
        return [_plain(value, kind.value_type) for value in cell]
    if isinstance(cell, Mapping):
        return {
            field.name: _plain(cell[field.name], field.type) for field in kind if cell[field.name] is not None
        }
    return cell
