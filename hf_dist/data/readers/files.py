"""Local data files: read once on a machine into an Arrow file, with the exact place of any fault.

Text formats go through the standard library's readers and not through an Arrow or pandas parser, because
those guess ("NA" is a null, "2020-01-01" is a date) and do not say in which line a fault lies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from pathlib import Path

import pyarrow as pa
from datasets import Dataset
from datasets.arrow_writer import ArrowWriter

from hf_dist.data.cache import build_once, cache_dir, key_of
from hf_dist.data.readers.formats import ARCHIVES, AnyFormat, ColumnFormat, Row, TextFormat, suffixes
from hf_dist.data.readers.json_cells import JsonColumns, table_with_json_text, with_json_text
from hf_dist.data.readers.sniffing import sniff
from hf_dist.data.readers.tables import table_of
from hf_dist.data.readers.text import no_rows
from hf_dist.errors import ConfigError, DataError, nearest

# Part of the cache's key, beside a format's own version: raise it when any file would be read differently.
_READER = 3


# The modules of this folder that have FORMATS: a new format is one more of them, and its line here.
_READERS = (
    "conll",
    "delimited",
    "json_files",
    "text",
    "arrow",
)
_BUILT_IN: tuple[AnyFormat, ...] = tuple(
    form for name in _READERS for form in import_module(f"hf_dist.data.readers.{name}").FORMATS
)
# Those of the `file_formats` that this code runs within.
_MORE: ContextVar[tuple[AnyFormat, ...]] = ContextVar("more_file_formats", default=())


def formats() -> dict[str, AnyFormat]:
    """All formats that can be read here, by name."""
    return {form.name: form for form in (*_BUILT_IN, *_MORE.get())}


def endings() -> dict[str, AnyFormat]:
    """The format that an ending says."""
    return {ending: form for form in formats().values() for ending in form.endings}


@contextmanager
def file_formats(*more: AnyFormat) -> Iterator[None]:
    """Within it files of further formats are read, by `--file_format` and by their endings.

    Rows that are read later, as those of a stream, are read all the same: it only has to be open while flags
    are parsed and data is loaded.

    Args:
        *more: Formats from outside; none of their names and endings may be taken.

    Raises:
        ConfigError: One is.
    """
    added = _MORE.get()
    for form in more:
        known = (*_BUILT_IN, *added)
        if any(form.name == other.name for other in known):
            raise ConfigError(
                f"there is a file format {form.name} already; give the new one another name than "
                f"{', '.join(other.name for other in known)}"
            )
        taken = {ending: other.name for other in known for ending in other.endings}
        if both := [ending for ending in form.endings if ending in taken]:
            raise ConfigError(
                f"the file format {form.name} has the ending {both[0]}, which stands for {taken[both[0]]}; "
                f"leave it out, and say --file_format {form.name} for such files"
            )
        added = (*added, form)
    token = _MORE.set(added)
    try:
        yield
    finally:
        _MORE.reset(token)


def load_file(
    name: str | Path,
    file_format: str | None = None,
    *,
    json_columns: JsonColumns = frozenset(),
) -> Dataset:
    """Reads a file of one of the `formats` into a memory-mapped data set.

    The cells of CSV and TSV are text, whatever they look like, and an empty one is null. JSON is one object
    a line, a list of objects, an object whose `data` is that list, or that of SQuAD. Text formats may be
    packed (.gz, .zst).

    Args:
        name: the file.
        file_format: name of what it holds; None as `format_of` finds it.
        json_columns: columns whose cells are kept as JSON text (see `json_cells`).

    Raises:
        DataError: as `format_of`, nothing in it, or contents that are not of the format; with the line, row
            or byte of the fault.
    """
    path = Path(name).expanduser().absolute()
    form = format_of(path, file_format)
    with _permission(path):
        stat = path.stat()
        open(path, "rb").close()

        def build(folder: Path) -> None:
            if isinstance(form, TextFormat):
                table = table_of(
                    path, lambda: form.rows(path), text_only=form.text_only, json_columns=json_columns
                )
            else:
                table = table_with_json_text(form.table(path), json_columns)
            if table.num_rows == 0:
                raise no_rows(path)
            with ArrowWriter(path=str(folder / "data.arrow")) as writer:
                writer.write_table(table)
                writer.finalize()

        facts = (form.name, form.version, str(path), stat.st_size, stat.st_mtime_ns, sorted(json_columns))
        key = key_of(_READER, *facts)
        return Dataset.from_file(str(build_once(cache_dir() / "files" / key, build) / "data.arrow"))


def format_of(path: Path, file_format: str | None = None) -> AnyFormat:
    """The format that the user says, or else the file's name, or else its contents.

    Raises:
        DataError: there is no such format; it is no file, it is empty, it is of columns and packed, or
            neither name nor contents say what it is.
    """
    known = formats()
    if file_format is not None and file_format not in known:
        raise DataError(
            f"--file_format {file_format}: there is no such format{nearest(file_format, known)}; expected "
            f"one of {', '.join(known)}"
        )
    if not path.exists():
        raise DataError(f"there is no file {path}; check the path (relative ones start at {Path.cwd()})")
    if not path.is_file():
        raise DataError(f"{path} is not a file; name one of {', '.join(known)}")
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty; expected a file with rows")
    ending, archive = suffixes(path)
    with _permission(path):
        name = file_format
        if name is None:
            told = endings().get(ending)
            name = told.name if told is not None else sniff(path)
    if name is None:
        raise DataError(
            f"{path}: neither its ending ({ending + archive or 'none'}) nor its contents say what it holds "
            f"(plain text is never guessed); say it with --file_format {'|'.join(known)}, or end its name "
            f"in one of {', '.join(endings())}, for text formats also with {' or '.join(ARCHIVES)}"
        )
    if archive and isinstance(known[name], ColumnFormat):
        raise DataError(f"{path}: {name} files are packed inside; unpack it and drop {archive}")
    return known[name]


def has_known_ending(path: Path) -> bool:
    """Whether a file's ending says a format that can be read (columns are not, in an archive)."""
    ending, archive = suffixes(path)
    form = endings().get(ending)
    return form is not None and not (archive and isinstance(form, ColumnFormat))


def read_rows(path: Path, form: AnyFormat, *, json_columns: JsonColumns = frozenset()) -> Iterator[Row]:
    """The rows of a file, one after another, with nothing kept of those before.

    Args:
        path: the file.
        form: what it holds.
        json_columns: columns whose cells are given as JSON text.

    Raises:
        DataError: as `load_file`, when the row of the fault is reached.
    """
    count = 0
    with _permission(path):
        if isinstance(form, TextFormat):
            for place, row in form.rows(path):
                count += 1
                yield place, with_json_text(row, json_columns)
        else:
            for batch in form.batches(path):
                table = table_with_json_text(pa.Table.from_batches([batch]), json_columns)
                for cells in table.to_pylist():
                    count += 1
                    yield f"row {count}", cells
    if count == 0:
        raise no_rows(path)


@contextmanager
def _permission(path: Path) -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        raise DataError(f"{path} can't be read ({error.strerror}); change its permissions") from error
