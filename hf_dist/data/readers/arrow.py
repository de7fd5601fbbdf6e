"""Files of Arrow columns: Parquet, and Arrow's own two forms (stream and file)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

from hf_dist.data.readers.formats import ColumnFormat
from hf_dist.errors import DataError

_FILE = b"ARROW1"  # what Arrow's file form starts with; its stream form, which datasets writes, has no name
_BATCH = 1_000


def parquet_schema(path: Path) -> pa.Schema:
    """The columns of a Parquet file and their types."""
    with _whole(path, "parquet"):
        return pyarrow.parquet.read_schema(path)


def parquet_table(path: Path) -> pa.Table:
    """A whole Parquet file, memory-mapped."""
    with _whole(path, "parquet"):
        return pyarrow.parquet.read_table(path, memory_map=True)


def parquet_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """A Parquet file in batches of rows."""
    with _whole(path, "parquet"), pyarrow.parquet.ParquetFile(path) as file:
        yield from file.iter_batches(batch_size=_BATCH)


def arrow_schema(path: Path) -> pa.Schema:
    """The columns of an Arrow file and their types."""
    return arrow_table(path).schema


def arrow_table(path: Path) -> pa.Table:
    """A whole Arrow file of either form, memory-mapped."""
    with _whole(path, "Arrow"):
        source = pa.memory_map(str(path))
        reader = pa.ipc.open_file(source) if _is_file(path) else pa.ipc.open_stream(source)
        return reader.read_all()


def arrow_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """An Arrow file of either form in batches of rows."""
    # Of a memory-mapped table only those pages are read that a batch lies in.
    yield from arrow_table(path).to_batches(max_chunksize=_BATCH)


def _is_file(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(len(_FILE)) == _FILE


@contextmanager
def _whole(path: Path, form: str) -> Iterator[None]:
    try:
        yield
    except PermissionError:
        raise
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{path} is not a whole {form} file ({reason}); write it again") from error


FORMATS = (
    ColumnFormat(
        name="parquet",
        endings=(".parquet",),
        schema=parquet_schema,
        table=parquet_table,
        batches=parquet_batches,
    ),
    ColumnFormat(
        name="arrow", endings=(".arrow",), schema=arrow_schema, table=arrow_table, batches=arrow_batches
    ),
)
