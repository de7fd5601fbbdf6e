"""JSON: one object a line, a list of objects, an object whose `data` is that list, or SQuAD's nesting."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_dist.data.readers.cells import kind_of
from hf_dist.data.readers.formats import Row, TextFormat
from hf_dist.data.readers.squad import is_squad, squad_rows
from hf_dist.data.readers.text import open_text
from hf_dist.errors import DataError


def json_rows(path: Path) -> Iterator[Row]:
    """The rows of a .json file, whichever of the four forms it has; all but the first is read whole."""
    with open_text(path) as file:
        head = ""
        while not head.strip() and (line := file.readline()):
            head += line
        document = _parsed(head)
        rest = ""
        if isinstance(document, dict):
            if not isinstance(document.get("data"), list) or (rest := file.read()).strip():
                yield from json_lines(path)
                return
        else:
            rest = file.read()
            try:
                document = json.loads(head + rest)
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{path}, line {error.lineno}, column {error.colno}: broken JSON ({error.msg}); expected "
                    "one object a line, or one list of objects"
                ) from error
    if is_squad(document):
        yield from squad_rows(path, document)
        return
    rows = document.get("data") if isinstance(document, dict) else document
    if not isinstance(rows, list):
        raise DataError(
            f"{path} holds one JSON value and no rows; expected one object a line, or a list of them"
        )
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise DataError(f"{path}, item {number}: expected an object, found {kind_of(row)}")
        yield f"item {number}", row


def json_lines(path: Path) -> Iterator[Row]:
    """The rows of a file with one object a line; blank lines don't count."""
    with open_text(path) as file:
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
                raise DataError(f"{path}, line {number}: expected an object, found {kind_of(row)}")
            yield f"line {number}", row


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


FORMATS = (
    TextFormat(name="json", endings=(".json",), rows=json_rows, sparse=True),
    TextFormat(name="jsonl", endings=(".jsonl",), rows=json_lines, sparse=True),
)
