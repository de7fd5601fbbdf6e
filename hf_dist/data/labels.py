"""Class labels: one name a class, in an order that is the same on every machine and run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import ClassLabel, Dataset, Value

from hf_dist.errors import DataError

_SHOWN = 5


def arrow_column(dataset: Dataset, column: str) -> pa.ChunkedArray:
    """The column's values in the order of the rows."""
    return dataset.select_columns([column]).with_format("arrow")[:].column(0)


def label_names(dataset: Dataset, column: str) -> pa.ChunkedArray:
    """The label of each row as the name of its class, null where there is none.

    Integers become their decimal digits, truth values `False` and `True`, fractions without a fractional
    part integers (pandas makes them of a column with gaps); a ClassLabel gives its names, and -1, which
    hidden test labels have, a null. An empty string is a null.

    Raises:
        DataError: the column holds something that is no class.
    """
    values = arrow_column(dataset, column)
    feature = dataset.features[column]
    if isinstance(feature, ClassLabel):
        known = pc.if_else(pc.greater_equal(values, 0), values, None)
        return pa.chunked_array([pa.array(feature.names, pa.string()).take(known.combine_chunks())])
    kind = values.type
    if pa.types.is_dictionary(kind):
        values, kind = values.cast(kind.value_type), kind.value_type
    if pa.types.is_null(kind):
        return values.cast(pa.string())
    if pa.types.is_floating(kind):
        known = values.drop_null()
        if len(known) and not pc.all(pc.equal(known, pc.round(known))).as_py():
            raise _fractions(column, next(value for value in known.to_pylist() if value != round(value)))
        return values.cast(pa.int64()).cast(pa.string())
    if pa.types.is_boolean(kind):
        return pc.if_else(values, "True", "False")
    if pa.types.is_integer(kind):
        return values.cast(pa.string())
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        text = values.cast(pa.string())
        names = pc.if_else(pc.equal(text, ""), pa.scalar(None, pa.string()), text)
        _refuse_fractions(pc.unique(names).drop_null().to_pylist(), column)
        return names
    raise DataError(
        f"column {column} holds {describe(dataset, column)}; expected one class a row: an integer, a string "
        "or a "
        "truth value"
    )


def _refuse_fractions(names: list[str], column: str) -> None:
    """The cells of a CSV are text: numbers in them are seen only here."""
    try:
        numbers = [float(name) for name in names]
    except ValueError:
        return
    for name, number in zip(names, numbers, strict=True):
        if math.isfinite(number) and number != round(number):
            raise _fractions(column, name)


def _fractions(column: str, found: Any) -> DataError:
    return DataError(
        f"column {column} holds fractions ({found}); expected classes: integers, strings or truth values"
    )


def class_order(dataset: Dataset, column: str, names: pa.ChunkedArray) -> list[str]:
    """The names of the classes of a training set, in the order of their ids.

    A ClassLabel keeps its own order. Else the names are sorted as numbers if all of them are integers, and
    by code point if not.
    """
    feature = dataset.features[column]
    if isinstance(feature, ClassLabel):
        return list(feature.names)
    return sorted_names(pc.unique(names).drop_null().to_pylist())


def sorted_names(names: Iterable[str]) -> list[str]:
    """Names in the order of the ids they get: as numbers if all are integers, else by code point."""
    found = list(names)
    try:
        return sorted(found, key=int)
    except ValueError:
        return sorted(found)


def label_ids(names: pa.ChunkedArray, classes: Sequence[str]) -> np.ndarray:
    """(rows,) int64 ids of the named classes; -1 where the name is null or none of `classes`."""
    ids = pc.index_in(names, value_set=pa.array(list(classes), pa.string()))
    return pc.fill_null(ids, -1).to_numpy().astype(np.int64)


def check_labelled(names: pa.ChunkedArray, *, column: str, split: str) -> None:
    """Raises a DataError that gives the first row numbers where the label is null."""
    missing = np.flatnonzero(pc.is_null(names).to_numpy())
    if len(missing):
        raise DataError(
            f"column {column} of the {split} data has no label in {rows_of(missing)}; fill them in or remove "
            "the rows"
        )


def check_text(dataset: Dataset, column: str, *, split: str) -> int:
    """Checks that every row has a text, and returns how many of them are blank.

    Raises:
        DataError: the column holds something else, or nulls.
    """
    feature = dataset.features[column]
    values = arrow_column(dataset, column)
    if pa.types.is_null(values.type):
        raise DataError(f"column {column} of the {split} data has no text in any row; expected strings")
    if not (isinstance(feature, Value) and feature.dtype in ("string", "large_string")):
        raise DataError(
            f"column {column} of the {split} data holds {describe(dataset, column)}; expected text: name "
            "another "
            "with --text_column, or write its values as strings"
        )
    if values.null_count:
        missing = np.flatnonzero(pc.is_null(values).to_numpy())
        raise DataError(
            f"column {column} of the {split} data has no text in {rows_of(missing)}; fill it in or remove "
            "the rows"
        )
    return int(pc.sum(pc.equal(pc.utf8_trim_whitespace(values), "")).as_py() or 0)


def rows_of(numbers: np.ndarray) -> str:
    """`row 3` or `rows 3, 5 and 7 more`, counted from 1, of row numbers counted from 0."""
    shown = ", ".join(str(number + 1) for number in numbers[:_SHOWN].tolist())
    more = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
    return f"{'row' if len(numbers) == 1 else 'rows'} {shown}{more} (counted from 1)"


def describe(dataset: Dataset, column: str) -> str:
    """The type of a column in words, for a message."""
    feature = dataset.features[column]
    if isinstance(feature, Value):
        return {"string": "text", "bool": "truth values"}.get(feature.dtype, f"numbers ({feature.dtype})")
    return {"List": "lists", "dict": "objects"}.get(type(feature).__name__, type(feature).__name__)
