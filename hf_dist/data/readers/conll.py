"""CoNLL: one token a line, its columns beside it, a blank line after each sentence.

The form of the CoNLL shared tasks since 2000, with the token in the first column and the tag in the last.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from hf_dist.data.readers.formats import Row, TextFormat
from hf_dist.data.readers.text import open_text
from hf_dist.errors import DataError

_DOCUMENT = "-DOCSTART-"
# Not str.split: tweets hold tokens of no-break spaces and other blanks of Unicode.
_BLANKS = re.compile("[ \t]+")
TAG = re.compile("O|[BIESLUMW]-.+")
"""A tag of an entity scheme."""
# Comments as CoNLL-U writes them: `# sent_id = 12`, `# newdoc`.
_COMMENT = re.compile(r"#[ \t]+(new(doc|par)\b|[\w.:-]+\s*=(\s|$))")
# So many tokens that count 1, 2, 3 ... at the start of a file are no sentence.
_NUMBERED = 3


def conll_rows(path: Path) -> Iterator[Row]:
    """One row a sentence: `tokens`, and `tags` of the last column (absent from a file of tokens alone).

    Columns are parted by single tabs where the first token's line has a tab, else by blanks. Lines that
    start a document (-DOCSTART-) are left out. So are comments: lines before the first token of a sentence
    that start with `#` and have another number of columns than the tokens (`#` itself may be a token), or
    that look like `# name = value`.

    Raises:
        DataError: a line with more or fewer columns than the first, an empty token or tag, or a line that
            may be a comment or a token.
    """
    shape = _shape(path)
    if shape is None:
        return
    tab, width, first = shape
    tokens: list[str] = []
    tags: list[str] = []
    start = 0
    seen: set[str] = set()

    def sentence() -> Row:
        if start == first and width > 2 and len(tokens) >= _NUMBERED and _is_numbering(tokens):
            raise DataError(
                f"{path}, line {start}: the first column counts the tokens (1, 2, 3 ...); expected "
                "the tokens there: remove that column"
            )
        row = {"tokens": tokens, "tags": tags} if width > 1 else {"tokens": tokens}
        return f"line {start}", row

    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            if is_blank(line) or starts_document(line):
                if tokens:
                    yield sentence()
                    tokens, tags = [], []
                continue
            cells = cells_of(line, tab)
            if not tokens and is_comment(line, cells, width):
                continue
            if len(cells) != width:
                raise DataError(
                    f"{path}, line {number}: {len(cells)} column(s) where line {first} has {width}; write "
                    f"the token first and the tag last, parted by {'tabs' if tab else 'blanks'}, and a blank "
                    "line between sentences"
                )
            if not cells[0].strip(" ") or not cells[-1]:
                missing = "tag" if cells[0].strip(" ") else "token"
                raise DataError(f"{path}, line {number}: the {missing} is empty; fill it in")
            if not tokens:
                start = number
                is_tag = cells[-1] in seen or TAG.fullmatch(cells[-1])
                if cells[0] == "#" and width > 1 and not tab and not is_tag:
                    raise DataError(
                        f"{path}, line {number} may be a comment, or the token # with the tag {cells[-1]}; "
                        "part the columns by tabs, or write the comment with more words"
                    )
            if cells[0] != "#":
                seen.add(cells[-1])
            tokens.append(cells[0])
            tags.append(cells[-1])
        if tokens:
            yield sentence()


def _shape(path: Path) -> tuple[bool, int, int] | None:
    with open_text(path) as file:
        return shape_of(file)


def shape_of(lines: Iterable[str]) -> tuple[bool, int, int] | None:
    """Whether tabs part the columns, how many columns there are, and the line that says so.

    None where there is no token. It is the first line that can't be a comment.
    """
    comment = None
    for number, line in enumerate(lines, 1):
        if is_blank(line) or starts_document(line):
            continue
        tab = "\t" in line
        shape = tab, len(cells_of(line, tab)), number
        if not line.startswith("#"):
            return shape
        if not _COMMENT.match(line):
            comment = comment or shape
    return comment


def is_comment(line: str, cells: Sequence[str], width: int) -> bool:
    """Whether a line before the first token of a sentence is none, where tokens have `width` columns."""
    if not line.startswith("#"):
        return False
    return len(cells) != width or (_COMMENT.match(line) is not None and not TAG.fullmatch(cells[-1]))


def is_blank(line: str) -> bool:
    """Whether a line ends a sentence."""
    return not line.strip(" \t\r\n")


def starts_document(line: str) -> bool:
    """Whether it is a -DOCSTART- line."""
    return line.startswith(_DOCUMENT)


def cells_of(line: str, tab: bool) -> list[str]:
    """The columns of a line. A token may hold blanks where tabs part them; a tag has none around it."""
    if not tab:
        return _BLANKS.split(line.strip(" \t\r\n"))
    cells = line.rstrip("\r\n").split("\t")
    return [*cells[:-1], cells[-1].strip(" ")] if len(cells) > 1 else cells


def _is_numbering(tokens: list[str]) -> bool:
    return tokens == [str(number) for number in range(1, len(tokens) + 1)]


FORMATS = (TextFormat(name="conll", endings=(".conll", ".bio", ".iob", ".iob2"), rows=conll_rows),)
