"""Rows of words and tags: where a data set has them, and what can be wrong with them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Value

from hf_dist.config import option
from hf_dist.data import labels
from hf_dist.data.class_list import SplitLabels
from hf_dist.data.loading import sources
from hf_dist.errors import DataError
from hf_dist.tasks.token_classification.schemes import WantedScheme

logger = logging.getLogger(__name__)

TOKEN_COLUMNS = ("tokens", "words", "token", "sentence", "text")
TAG_COLUMNS = ("tags", "ner_tags", "labels", "pos_tags", "upos", "label", "chunk_tags")


@dataclass(frozen=True, kw_only=True)
class TokenClassificationSettings:
    """The flags of token classification."""

    tokens_column: str | None = option(
        None, "Column with the list of words; default: found by the usual names."
    )
    tags_column: str | None = option(
        None, "Column with the list of tags, one a word; default: found by the usual names."
    )
    tag_scheme: WantedScheme = option(
        "auto", "How tags make entities, or plain: each tag by itself; auto: as the training data shows."
    )
    entity_mode: Literal["default", "strict"] = option(
        "default", "Count entities as conlleval does, or only those that are well formed in the scheme."
    )
    label_all_tokens: bool = option(
        False, "Train on every sub-word of a word and not only on its first; predictions stay with the first."
    )


@dataclass(frozen=True)
class TagColumns:
    """Where the data has words and tags; a test split may have no tags."""

    tokens: str
    tags: str | None


def find_columns(splits: DatasetDict, settings: TokenClassificationSettings) -> TagColumns:
    """Finds the columns in the first split; the others must have the same.

    Raises:
        DataError: one isn't there, or both are the same.
    """
    first = sources.first_split(splits)
    there = splits[first].column_names
    tokens = sources.find_column(there, settings.tokens_column, TOKEN_COLUMNS, flag="tokens_column")
    tags: str | None
    if first == "test" and settings.tags_column is None:
        tags = sources.usual_column(there, TAG_COLUMNS)
    else:
        tags = sources.find_column(there, settings.tags_column, TAG_COLUMNS, flag="tags_column")
    if tokens == tags:
        raise DataError(f"--tokens_column and --tags_column both name {tokens}; they must be different")
    sources.check_same_columns(splits, [tokens], [] if tags is None else [tags])
    logger.info("columns: tokens %s, tags %s", tokens, tags or "none")
    return TagColumns(tokens, tags)


@dataclass(frozen=True)
class TaggedRows:
    """A checked split: all its words in a row, and where each row starts.

    Attributes:
        words: the words of all rows.
        ends: (rows + 1,) where each row's words start; the last entry is their number.
        tags: the name of each word's tag; None for a test split without.
    """

    words: pa.Array
    ends: np.ndarray
    tags: pa.ChunkedArray | None

    def row_of(self, word: int) -> int:
        """Number of the row, counted from 1, that the word is in."""
        return int(np.searchsorted(self.ends, word, side="right"))

    @property
    def labels(self) -> SplitLabels:
        """The tags, each in its row."""
        assert self.tags is not None
        return SplitLabels(self.tags, self.ends)

    def as_dataset(self, classes: Sequence[str]) -> Dataset:
        """The columns `tokens` and, where there are tags, `tags` (their ids)."""
        offsets = pa.array(self.ends, pa.int32())
        table = {"tokens": pa.ListArray.from_arrays(offsets, self.words)}
        features: dict[str, Any] = {"tokens": List(Value("string"))}
        if self.tags is not None:
            ids = pa.array(labels.label_ids(self.tags, classes), pa.int64())
            table["tags"] = pa.ListArray.from_arrays(offsets, ids)
            features["tags"] = List(ClassLabel(names=list(classes)))
        return Dataset(pa.table(table)).cast(Features(features))


def read_rows(rows: Dataset, columns: TagColumns, split: str) -> TaggedRows:
    """Reads and checks a split.

    Raises:
        DataError: a row without words, a word that is null or empty, a word without a tag, lists of different
            lengths, or a column that holds something else; with the number of the row.
    """
    words, ends = _flat(rows, columns.tokens, split, "words", flag="tokens_column")
    if not (pa.types.is_string(words.type) or pa.types.is_large_string(words.type)):
        if not pa.types.is_null(words.type):
            raise DataError(
                f"column {columns.tokens} of the {split} data holds lists of {words.type}; expected lists of "
                "words: name another with --tokens_column, or write the words as strings"
            )
        words = words.cast(pa.string())
    words = words.cast(pa.string())
    found = TaggedRows(words, ends, None)
    empty = np.flatnonzero(np.diff(ends) == 0)
    if len(empty):
        raise DataError(
            f"column {columns.tokens} of the {split} data has no words in {labels.rows_of(empty)}; remove "
            "the rows"
        )
    blank = np.flatnonzero(pc.fill_null(pc.equal(words, ""), True).to_numpy(zero_copy_only=False))
    if len(blank):
        raise DataError(
            f"column {columns.tokens} of the {split} data, row {found.row_of(int(blank[0]))} (counted from "
            f"1): word {blank[0] - ends[found.row_of(int(blank[0])) - 1] + 1} is empty; fill it in or remove "
            "it and its tag"
        )
    names = _tags(rows, columns, split, found)
    return found if names is None else TaggedRows(words, ends, names)


def _tags(rows: Dataset, columns: TagColumns, split: str, found: TaggedRows) -> pa.ChunkedArray | None:
    column = columns.tags
    if column is None or column not in rows.column_names:
        return None
    if split == "test" and rows.data.column(column).null_count == len(rows.data):
        return None
    flat, ends = _flat(rows, column, split, "tags", flag="tags_column")
    differ = np.flatnonzero(np.diff(ends) != np.diff(found.ends))
    if len(differ):
        row = int(differ[0])
        more = f" (and {len(differ) - 1} more rows)" if len(differ) > 1 else ""
        raise DataError(
            f"the {split} data, row {row + 1} (counted from 1): {np.diff(found.ends)[row]} words in "
            f"{columns.tokens} and {np.diff(ends)[row]} tags in {column}{more}; write one tag a word"
        )
    inner = rows.features[column].feature
    values = Dataset(pa.table({column: flat}))
    if isinstance(inner, ClassLabel):
        values = values.cast(Features({column: inner}))
    names = labels.label_names(values, column)
    missing = np.flatnonzero(pc.is_null(names).to_numpy())
    if len(missing):
        row = found.row_of(int(missing[0]))
        word = found.words[int(missing[0])].as_py()
        raise DataError(
            f"column {column} of the {split} data, row {row} (counted from 1): the word {word!r:.40} has no "
            "tag; fill it in (O outside entities)"
        )
    return names


def _flat(rows: Dataset, column: str, split: str, what: str, *, flag: str) -> tuple[pa.Array, np.ndarray]:
    """The items of all lists of a column, and where each row's start."""
    values = labels.arrow_column(rows, column)
    kind = values.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        if not pa.types.is_null(kind):
            raise DataError(
                f"column {column} of the {split} data holds {labels.describe(rows, column)}; expected a list "
                f"of {what} a row: name another with --{flag}, or give JSON lines, parquet or CoNLL"
            )
        raise DataError(f"column {column} of the {split} data has no {what} in any row")
    if values.null_count:
        missing = np.flatnonzero(pc.is_null(values).to_numpy())
        raise DataError(
            f"column {column} of the {split} data has no {what} in {labels.rows_of(missing)}; fill them in "
            "or remove the rows"
        )
    lengths = pc.list_value_length(values).to_numpy().astype(np.int64)
    flat = pc.list_flatten(values)
    return flat.combine_chunks(), np.concatenate([[0], np.cumsum(lengths)])


def class_order(rows: Dataset, column: str, names: pa.ChunkedArray) -> tuple[list[str], bool]:
    """The tags in the order of `labels.class_order`, and whether that is a ClassLabel's own."""
    inner = rows.features[column].feature
    if isinstance(inner, ClassLabel):
        return list(inner.names), True
    values = Dataset(pa.table({column: names.combine_chunks()}))
    return labels.class_order(values, column, names), False
