"""CSV and TSV: a header, then rows of as many cells."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path

from hf_dist.data.readers.formats import Row, TextFormat
from hf_dist.data.readers.text import open_text
from hf_dist.errors import DataError


def csv_rows(path: Path) -> Iterator[Row]:
    """The rows of a file with commas."""
    return _rows(path, ",")


def tsv_rows(path: Path) -> Iterator[Row]:
    """The rows of a file with tabs."""
    return _rows(path, "\t")


def _rows(path: Path, delimiter: str) -> Iterator[Row]:
    limit = csv.field_size_limit(sys.maxsize)  # the default refuses a cell of more than 131,072 characters
    try:
        with open_text(path) as file:
            lines = csv.reader(file, delimiter=delimiter, strict=True)
            try:
                header = next((line for line in lines if line), [])
                names = [name or f"unnamed_{place}" for place, name in enumerate(header)]
                if twice := sorted({name for name in names if names.count(name) > 1}):
                    raise DataError(f"{path}, line 1: two columns are named {twice[0]}; rename one of them")
                for cells in lines:
                    if not cells:
                        continue  # a blank line
                    place = f"line {lines.line_num}"
                    if len(cells) != len(names):
                        raise DataError(
                            f"{path}, {place}: {len(cells)} cells where the header has {len(names)}; put "
                            "cells that hold a delimiter or a quote in double quotes"
                        )
                    yield place, dict(zip(names, (cell or None for cell in cells), strict=True))
            except csv.Error as error:
                raise DataError(
                    f"{path}, line {lines.line_num}: {error}; write a double quote inside a quoted cell twice"
                ) from error
    finally:
        csv.field_size_limit(limit)


FORMATS = (
    TextFormat(name="csv", endings=(".csv",), rows=csv_rows, text_only=True),
    TextFormat(name="tsv", endings=(".tsv",), rows=tsv_rows, text_only=True),
)
