"""Where a data set has its texts and its labels."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from datasets import Dataset, DatasetDict

from hf_dist.config import at_least, option
from hf_dist.data import labels
from hf_dist.data.loading import sources
from hf_dist.errors import ConfigError, DataError
from hf_dist.tasks.items import Problem

logger = logging.getLogger(__name__)

TEXT_COLUMNS = ("text", "sentence", "content", "review", "document", "body", "tweet", "comment")
PAIR_COLUMNS = (
    ("sentence1", "sentence2"),
    ("sentence_a", "sentence_b"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("text1", "text2"),
    ("text", "text_pair"),
)
LABEL_COLUMNS = ("label", "labels", "class", "target", "category", "score")


@dataclass(frozen=True, kw_only=True)
class TextClassificationSettings:
    """The flags of text classification."""

    text_column: str | None = option(None, "Column with the text; default: found by the usual names.")
    text_pair_column: str | None = option(None, "Column with the second text of a pair.")
    text_columns: list[str] | None = option(
        None, "Columns that are joined into one text (a pair is not: the model sees where its second begins)."
    )
    text_delimiter: str = option(" ", "What stands between the joined columns.")
    label_column: str | None = option(None, "Column with the label; default: found by the usual names.")
    label_columns: list[str] | None = option(
        None, "Columns of 0 and 1, one a label, instead of a label column (multi-label)."
    )
    label_separator: str | None = option(
        None, "What stands between the labels of a cell, such as , or | (multi-label)."
    )
    problem: Problem | None = option(
        None,
        "What a label is; default: multi_label for lists, regression for a column of fractions, else "
        "single_label.",
    )
    threshold: float = option(0.5, "Probability from which a label is predicted (multi-label).")

    def __post_init__(self) -> None:
        at_least(self, "threshold", 0.0)
        if self.threshold >= 1:
            raise ConfigError(f"--threshold is {self.threshold}; it must be less than 1")
        if self.text_columns and (self.text_column or self.text_pair_column):
            raise ConfigError(
                "--text_columns conflicts with --text_column and --text_pair_column; drop one of them"
            )
        several = self.label_columns or self.label_separator
        if several and self.problem not in (None, "multi_label"):
            raise ConfigError(
                f"--problem {self.problem} conflicts with --label_columns and --label_separator, which give "
                "a row several labels; drop one of them"
            )
        if self.label_columns and (self.label_column or self.label_separator):
            raise ConfigError(
                "--label_columns conflicts with --label_column and --label_separator; drop one of them"
            )


@dataclass(frozen=True)
class Columns:
    """Where the data has what the task needs.

    Attributes:
        text: the text.
        pair: the second text of a pair.
        labels: one column, or several of 0 and 1, or none (a test split).
        more: what is joined to the text, with `delimiter` between.
    """

    text: str
    pair: str | None
    labels: tuple[str, ...]
    more: tuple[str, ...] = ()
    delimiter: str = " "

    @property
    def texts(self) -> dict[str, str]:
        """Our names of the text columns by those of the data."""
        return {self.text: "text"} if self.pair is None else {self.text: "text", self.pair: "text_pair"}


def find_columns(splits: DatasetDict, settings: TextClassificationSettings) -> Columns:
    """Finds the columns in the first split; the others must have the same.

    Raises:
        DataError: one isn't there, or two are the same.
    """
    first = sources.first_split(splits)
    there = splits[first].column_names
    text, pair = settings.text_column, settings.text_pair_column
    more: list[str] = []
    if settings.text_columns:
        text, *more = (
            sources.find_column(there, name, (), flag="text_columns") for name in settings.text_columns
        )
    elif text is None and pair is None:
        lower = {name.lower(): name for name in reversed(there)}
        text, pair = next(
            ((lower[a], lower[b]) for a, b in PAIR_COLUMNS if a in lower and b in lower), (None, None)
        )
    text = sources.find_column(there, text, TEXT_COLUMNS, flag="text_column")
    pair = None if pair is None else sources.find_column(there, pair, (), flag="text_pair_column")
    found = _find_labels(there, settings, needed=first != "test")
    named = [text, *more, *([pair] if pair is not None else []), *found]
    if len(set(named)) < len(named):
        raise DataError(
            f"text {', '.join([text, *more])}, text pair {pair} and label {', '.join(found)} must be "
            "different columns"
        )
    sources.check_same_columns(splits, [name for name in named if name not in found], found)
    shown = ", ".join(found) or "none"
    whole = " + ".join([text, *more])
    logger.info("columns: text %s, %slabel %s", whole, f"pair {pair}, " if pair else "", shown)
    return Columns(text, pair, found, tuple(more), settings.text_delimiter)


def _find_labels(there: list[str], settings: TextClassificationSettings, *, needed: bool) -> tuple[str, ...]:
    if settings.label_columns:
        if not needed and not set(settings.label_columns) & set(there):
            return ()
        return tuple(
            sources.find_column(there, name, (), flag="label_columns") for name in settings.label_columns
        )
    if not needed and settings.label_column is None:
        usual = sources.usual_column(there, LABEL_COLUMNS)
        return () if usual is None else (usual,)
    return (sources.find_column(there, settings.label_column, LABEL_COLUMNS, flag="label_column"),)


def check_texts(rows: Dataset, columns: Columns, *, split: str) -> None:
    """Checks that every row has its texts; blank ones are kept and counted.

    Raises:
        DataError: a text is missing, or no text.
    """
    for column in (*columns.texts, *columns.more):
        blank = labels.check_text(rows, column, split=split)
        if blank:
            logger.warning("%s: %d rows with a blank %s are kept", split, blank, column)


def joined(rows: Dataset, columns: Columns) -> Dataset:
    """The text columns by our names, those that are to be joined as one."""
    texts = columns.texts
    if not columns.more:
        return rows.select_columns(list(texts)).rename_columns(
            {theirs: ours for theirs, ours in texts.items() if theirs != ours}
        )
    parts = zip(*(rows[name] for name in (columns.text, *columns.more)), strict=True)
    return Dataset.from_dict({"text": [columns.delimiter.join(part) for part in parts]})
