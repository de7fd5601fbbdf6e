"""What a file holds, told by its first bytes: for files whose ending says nothing.

Only what can hardly be anything else is recognised. Plain text never is: any file would be some.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path

from hf_dist.data.readers.conll import TAG, cells_of, is_blank, is_comment, shape_of, starts_document
from hf_dist.data.readers.formats import suffixes
from hf_dist.data.readers.text import no_rows, open_bytes, refuse_utf16, wrong_encoding
from hf_dist.errors import DataError

_HEAD = 1 << 18
# A file with a few faulty lines is still what it is: its reader says which line is wrong.
_MOST = 0.9

_COLUMNS: tuple[tuple[bytes, str], ...] = (
    (b"PAR1", "parquet"),
    (b"ARROW1", "arrow"),
    (b"\xff\xff\xff\xff", "arrow"),  # the stream form: the mark in front of each of its messages
)
_PACKED = ((b"\x1f\x8b", "gzip", ".gz"), (b"\x28\xb5\x2f\xfd", "zstd", ".zst"))
_FEW = 100  # lines that show whether it is JSON
_JSON = re.compile(r'\{\s*["}]|\[\s*[{\]]')
# Parts of speech and the like: upper-case codes and punctuation.
_CODE = re.compile(r"[A-Z][A-Z0-9$|:_.+*-]*|[^\w\s]+")
_NAME = re.compile(r"[^\W\d][\w .()/#-]{0,63}")
# Names of columns that tell a header from a row.
_USUAL = re.compile(
    "id|idx|title|(text|sentence|question)[12]?|text_pair|premise|hypothesis|content|review|document|body|"
    "tweet|comment|labels?|class|target|category|score|tokens|words|(ner_)?tags|summary|highlights|article|"
    "source|translation|context|answers?|prompt|completion|response|instruction|input|output|messages|"
    "conversations"
)


def sniff(path: Path) -> str | None:
    """The name of a file's format by its contents, or None where they could be several.

    Columns of tags (CoNLL) are known by a -DOCSTART- line, by tags such as B-LOC and O, or by sentences of
    several lines whose last column holds codes that come again. A table is known by a header whose names are
    usual, or by rows that all have as many cells as the header; a table of tabs without either a usual name
    or a cell of several words could be CoNLL without its blank lines.

    Raises:
        DataError: it is no text (UTF-16, another encoding, something binary), or packed under a name that
            doesn't say so.
    """
    with open_bytes(path) as file:
        head = file.read(_HEAD)
        whole = len(head) < _HEAD
    for mark, archive, ending in _PACKED:
        if head.startswith(mark):
            twice = " twice" if suffixes(path)[1] else ""
            raise DataError(f"{path} is packed{twice} by {archive}; unpack it, or end its name in {ending}")
    for mark, form in _COLUMNS:
        if head.startswith(mark):
            return form
    lines = _lines(path, head, whole=whole)
    start = "".join(lines[:_FEW]).lstrip()
    if _JSON.match(start):
        return _json(lines)
    if _is_conll(lines):
        return "conll"
    if _is_table(lines, "\t"):
        return "tsv"
    return "csv" if _is_table(lines, ",") else None


def _lines(path: Path, head: bytes, *, whole: bool) -> list[str]:
    """The lines of a text's head, without the last one where it may be cut."""
    refuse_utf16(path, head)
    if b"\0" in head:
        raise DataError(f"{path} is no text, and no parquet or Arrow file either; expected one of these")
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(head, final=whole)
    except UnicodeDecodeError:
        raise wrong_encoding(path) from None
    if whole and not text.strip():
        raise no_rows(path)
    lines = list(io.StringIO(text, newline=""))
    return lines if whole or len(lines) < 2 else lines[:-1]


def _json(lines: Sequence[str]) -> str:
    """JSON lines where the first two are objects; what reads .json also reads a single one."""
    first = [line for line in lines[:_FEW] if line.strip()][:2]
    try:
        found = [json.loads(line) for line in first]
    except json.JSONDecodeError:
        return "json"
    return "jsonl" if len(found) == 2 and all(isinstance(row, dict) for row in found) else "json"


def _is_conll(lines: Sequence[str]) -> bool:
    if any(starts_document(line) for line in lines):
        return True
    shape = shape_of(lines)
    if shape is None or shape[1] < 2:
        return False
    tab, width, _ = shape
    rows, sentences, inside = [], 0, False
    for line in lines:
        if is_blank(line):
            inside = False
            continue
        cells = cells_of(line, tab)
        if not inside and is_comment(line, cells, width):
            continue
        sentences += not inside
        inside = True
        rows.append(cells)
    tags = [cells[-1] for cells in rows if len(cells) == width and cells[0] and cells[-1]]
    first = rows[0][-1]
    if sum(TAG.fullmatch(tag) is not None for tag in tags) >= _MOST * len(rows):
        # Where the first line has none, it is a header.
        return TAG.fullmatch(first) is not None
    return (
        len(tags) == len(rows)
        and sum(_CODE.fullmatch(tag) is not None for tag in tags) >= _MOST * len(rows)
        and sentences >= 2
        and len(rows) >= 2 * sentences
        and len(set(tags)) <= len(rows) / 2
        and first in tags[1:]
        and not _has_usual_name([first])
    )


def _is_table(lines: Sequence[str], delimiter: str) -> bool:
    rows: list[list[str]] = []
    broken = False
    try:
        for cells in csv.reader(lines, delimiter=delimiter, strict=True):
            if cells:
                rows.append(cells)
    except csv.Error:
        broken = True  # or a quoted cell that the head's end cuts
    if len(rows) < 2 or len(rows[0]) < 2:
        return False
    header, body = rows[0], rows[1:]
    # pandas leaves the name of its index empty.
    names = header[1:] if header[0] == "" else header
    if len(set(names)) < len(names) or not all(_NAME.fullmatch(name) and name[-1] != " " for name in names):
        return False
    fitting = sum(len(cells) == len(header) for cells in body)
    if _has_usual_name(names):
        return fitting >= _MOST * len(body)
    several_words = any(" " in cell.strip() for cells in body for cell in cells)
    return not broken and fitting == len(body) and len(body) >= 2 and (delimiter == "," or several_words)


def _has_usual_name(cells: Sequence[str]) -> bool:
    return any(_USUAL.fullmatch(cell.strip().lower()) for cell in cells)
