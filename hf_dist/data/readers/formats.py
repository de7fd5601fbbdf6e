"""What a file format is: a name for `--file_format`, endings, and functions that read a file.

A module of this folder that reads one has a tuple `FORMATS` of it; `files` has the list of these modules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from hf_dist.errors import ConfigError

# Arrow brings both, so that reading them needs no further package.
ARCHIVES = {".gz": "gzip", ".zst": "zstd"}

Row = tuple[str, dict[str, Any]]
"""Where a row stands in its file, as a message says it ("line 3"), and its cells by column."""

_NAME = re.compile("[a-z][a-z0-9_]*")
_ENDING = re.compile(r"\.[a-z0-9_-]+")


@dataclass(frozen=True, kw_only=True)
class FileFormat:
    """What both kinds of formats say of themselves.

    Attributes:
        name: what `--file_format` takes.
        endings: of files that hold it, as `.csv`; none for one that is always asked for by its name.
        version: part of the cache's key: raise it when the same file would be read differently.

    Raises:
        ConfigError: A name that is no word, or an ending that no file can be found by.
    """

    name: str
    endings: tuple[str, ...] = ()
    version: int = 1

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"a file format is named {self.name!r}; expected a word of lower-case letters, as csv"
            )
        for ending in self.endings:
            if not _ENDING.fullmatch(ending) or ending in ARCHIVES:
                raise ConfigError(
                    f"the file format {self.name} has the ending {ending!r}; expected one dot and lower-case "
                    f"letters behind it, as .csv, without that of an archive ({', '.join(ARCHIVES)})"
                )


@dataclass(frozen=True, kw_only=True)
class TextFormat(FileFormat):
    """Files read row by row; packed ones too, if they are opened by `open_text` or `open_bytes`.

    Attributes:
        rows: reads a file. A module-level function, which other processes find by its name.
        text_only: all cells are strings.
        sparse: a row may leave cells out.
    """

    rows: Callable[[Path], Iterator[Row]]
    text_only: bool = False
    sparse: bool = False


@dataclass(frozen=True, kw_only=True)
class ColumnFormat(FileFormat):
    """Files that hold Arrow columns: the whole of one, its types, and batches of its rows."""

    schema: Callable[[Path], pa.Schema]
    table: Callable[[Path], pa.Table]
    batches: Callable[[Path], Iterator[pa.RecordBatch]]


AnyFormat = TextFormat | ColumnFormat


def suffixes(path: Path) -> tuple[str, str]:
    """The ending that says the format and that of the archive around it; `.csv.gz` gives `.csv`, `.gz`."""
    last = path.suffix.lower()
    if last in ARCHIVES:
        return Path(path.stem).suffix.lower(), last
    return last, ""
