"""Kinds of cells in words, and the first cell that is of another kind than its column."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
