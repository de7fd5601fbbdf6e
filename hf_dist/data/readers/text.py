"""Text files as UTF-8 lines, packed or not, with the place of a byte that is none."""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO, cast

import pyarrow as pa

from hf_dist.data.readers.formats import ARCHIVES, Row, TextFormat, suffixes
from hf_dist.errors import DataError

_BLOCK = 1 << 20


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """Opens a UTF-8 file, with or without byte order mark, line ends kept.

    Raises:
        DataError: it is UTF-16; while it is read: a byte that isn't UTF-8, with its line, or an archive that
            is broken.
    """
    with open_bytes(path) as file:
        refuse_utf16(path, file.peek(4))
        try:
            yield io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
        except UnicodeDecodeError as error:
            raise wrong_encoding(path) from error


def refuse_utf16(path: Path, head: bytes) -> None:
    """Raises a DataError where the first bytes are those of UTF-16 or UTF-32 text.

    Without a byte order mark ASCII letters show it: every other byte is 0. Such text is valid UTF-8, and
    would be read with a NUL in front of each letter.
    """
    if head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        raise DataError(f"{path} is UTF-16 (its byte order mark says so); save it as UTF-8")
    if len(head) >= 4 and (head[0] == head[2] == 0 or head[1] == head[3] == 0):
        raise DataError(f"{path} is UTF-16 or no text (every other byte is 0); save it as UTF-8")


@contextmanager
def open_bytes(path: Path) -> Iterator[io.BufferedReader]:
    """The bytes of a file, those inside of an archive.

    Raises:
        DataError: while it is read: the archive is broken.
    """
    archive = suffixes(path)[1]
    with open(path, "rb") as packed:
        if not archive:
            yield packed
            return
        try:
            # Arrow's stream has no buffer of its own: lines would be read in pieces of 8 KiB.
            unpacked = pa.CompressedInputStream(packed, ARCHIVES[archive])
            yield io.BufferedReader(cast(io.RawIOBase, unpacked), _BLOCK)
        except OSError as error:
            reason = " ".join(str(error).split())
            raise DataError(
                f"{path} is not a whole {ARCHIVES[archive]} archive ({reason}); pack it again, or drop "
                f"{archive} from the name of a file that isn't packed"
            ) from error


def wrong_encoding(path: Path) -> DataError:
    """Where the first byte stands that isn't UTF-8."""
    # The error that a text file raises counts from the start of its buffer and not of the file.
    decoder = codecs.getincrementaldecoder("utf-8")()
    position = pending = 0
    lines = 1
    with open_bytes(path) as file:
        while True:
            chunk = file.read(_BLOCK)
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                # What the decoder kept back from the chunk before stands in front of this one.
                at = position - pending + error.start
                line = lines + error.object.count(b"\n", 0, error.start)
                return DataError(
                    f"{path}, line {line} is not UTF-8: byte {at} (from 0) is "
                    f"0x{error.object[error.start]:02x}; save the file as UTF-8"
                )
            if not chunk:
                break
            position += len(chunk)
            lines += chunk.count(b"\n")
            pending = len(decoder.getstate()[0])
    return DataError(f"{path} is not UTF-8, or it changed while it was read; save the file as UTF-8")


def no_rows(path: Path) -> DataError:
    """What a file without rows is answered with."""
    return DataError(f"{path} has no rows; expected at least one (after the header, where it has one)")


def text_rows(path: Path) -> Iterator[Row]:
    """One row a line that isn't blank: column `text`, the line without its line end."""
    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"line {number}", {"text": line.rstrip("\r\n")}


FORMATS = (TextFormat(name="txt", endings=(".txt",), rows=text_rows, text_only=True),)
