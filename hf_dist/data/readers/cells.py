"""Kinds of cells in words, and the first cell that is of another kind than its column."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from hf_dist.errors import DataError


def kind_of(value: Any) -> str:
    """What a JSON value is, as a message says it."""
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    names = {str: "a string", list: "a list", dict: "an object", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def short(value: Any) -> str:
    """A value as JSON, cut to 40 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 40 else text[:37] + "..."


def parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A cell and what lies in it, by a path: `answers`, `answers.text`, `answers.text[]`; no nulls."""
    if value is None:
        return
    yield name, value
    if isinstance(value, list):
        for item in value:
            yield from parts(f"{name}[]", item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from parts(f"{name}.{key}", item)


class Kinds:
    """The kind of every column, and of the parts of its cells, as rows show them."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, str, Any]] = {}

    def check(self, path: Path | str, place: str, row: dict[str, Any]) -> None:
        """Raises a DataError for the first cell of another kind than the same column had before."""
        for column, cell in row.items():
            for name, value in parts(column, cell):
                kind = kind_of(value)
                before, first_place, first = self._seen.setdefault(name, (kind, place, value))
                if kind != before:
                    raise DataError(
                        f"{path}, {place}: column {name} holds {kind} ({short(value)}) where {first_place} "
                        f"holds {before} ({short(first)}); write one kind"
                    )


class FixedKinds:
    """The kinds that the type of a table says; nothing else may come. A part without a type takes all."""

    def __init__(self, schema: pa.Schema, shown_by: str) -> None:
        self._shown_by = shown_by
        self._kinds = {
            name: kind for field in schema for name, kind in _kinds_of_type(field.name, field.type)
        }

    def check(self, path: Path | str, place: str, row: dict[str, Any]) -> None:
        """Raises a DataError for the first cell that the types don't allow."""
        for column, cell in row.items():
            self._check(path, place, column, cell)

    def _check(self, path: Path | str, place: str, name: str, value: Any) -> None:
        if name not in self._kinds:
            raise DataError(
                f"{path}, {place}: {name} is in none of {self._shown_by}, which show a stream what columns "
                "there are; write it (null) in the first of them"
            )
        expected = self._kinds[name]
        if value is None or expected is None:
            return
        kind = kind_of(value)
        if kind == "a number":
            kind = _FRACTION if isinstance(value, float) else _WHOLE
        if kind != expected and (kind, expected) != (_WHOLE, _FRACTION):
            raise DataError(
                f"{path}, {place}: column {name} holds {kind} ({short(value)}) where {self._shown_by} hold "
                f"{expected}; write one kind"
            )
        if isinstance(value, list):
            for item in value:
                self._check(path, place, f"{name}[]", item)
        elif isinstance(value, dict):
            for key, item in value.items():
                self._check(path, place, f"{name}.{key}", item)


_WHOLE, _FRACTION = "a whole number", "a fraction"


def _kinds_of_type(name: str, kind: pa.DataType) -> Iterator[tuple[str, str | None]]:
    if pa.types.is_list(kind):
        yield name, "a list"
        yield from _kinds_of_type(f"{name}[]", kind.value_type)
    elif pa.types.is_struct(kind):
        yield name, "an object"
        for field in kind:
            yield from _kinds_of_type(f"{name}.{field.name}", field.type)
    elif pa.types.is_boolean(kind):
        yield name, kind_of(True)
    elif pa.types.is_integer(kind):
        yield name, _WHOLE
    elif pa.types.is_floating(kind):
        yield name, _FRACTION
    else:
        yield name, kind_of("") if pa.types.is_string(kind) else None
