"""The class list of a run: the labels of the training rows, and those that only other splits have.

It is made of whole splits alone, so that it is the same on every machine and process.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hf_dist.config import DataConfig
from hf_dist.data.labels import sorted_names
from hf_dist.errors import DataError, nearest

logger = logging.getLogger(__name__)

_SHOWN = 5

FIRST_ROWS = "the first part of the training data"
"""What shows the classes of a stream."""


def shown_by(data: DataConfig) -> str:
    """The rows that show which labels there are."""
    return FIRST_ROWS if data.streaming else "the training data"


@dataclass(frozen=True)
class SplitLabels:
    """The labels of a split by name, and the row that each stands in.

    Attributes:
        names: all labels, in the order of the rows; nulls don't count.
        ends: (rows + 1,) where each row's labels start; None where a row has one.
    """

    names: pa.ChunkedArray
    ends: np.ndarray | None = None

    def found(self) -> set[str]:
        """The labels that occur."""
        return set(pc.unique(self.names).drop_null().to_pylist())

    def rows_with(self, labels: Sequence[str]) -> np.ndarray:
        """Numbers of the rows that have one of `labels`, counted from 0."""
        has = pc.is_in(self.names, value_set=pa.array(list(labels), pa.string()))
        places = np.flatnonzero(has.to_numpy())
        return (
            places if self.ends is None else np.unique(np.searchsorted(self.ends, places, side="right") - 1)
        )


@dataclass(frozen=True, kw_only=True)
class Words:
    """What messages call things.

    Attributes:
        column: where the labels are from.
        train: the rows that show which labels there are.
        label: what one is.
    """

    column: str
    train: str = "the training data"
    label: str = "label"

    def labels(self, number: int) -> str:
        """`1 label`, `2 labels`."""
        return f"{number} {self.label}{'' if number == 1 else 's'}"


def learned(order: Sequence[str], known: Sequence[str]) -> Sequence[str]:
    """The classes that training is about: those a model knows, if it knows all of the training rows."""
    return known if set(order) <= set(known) else order


def all_classes(
    splits: Mapping[str, SplitLabels],
    order: Sequence[str],
    known: Sequence[str],
    *,
    words: Words,
    keeps_order: bool = False,
) -> tuple[str, ...]:
    """The classes of a run with training rows, in the order of their ids.

    A model's own list stays where it has all labels of the training rows; labels that only other splits have
    come behind it. Else they are sorted in with those of the training rows, or come behind them where
    those have an order of their own (a ClassLabel, columns). Such labels are never learned, and a warning
    counts them.

    Args:
        splits: the labels of each split, `train` among them.
        order: the classes of the training rows, in their order.
        known: the classes of the model that training starts from.
        words: what messages call things.
        keeps_order: `order` isn't made by sorting.

    Raises:
        DataError: a split has no label that the training rows show or the model knows.
    """
    trained = learned(order, known) is known
    shown = splits["train"].found() | (set(known) if trained else set())
    more: set[str] = set()
    for split, found in splits.items():
        unseen = sorted_names(found.found() - shown)
        if split == "train" or not unseen:
            continue
        if len(unseen) == len(found.found()):
            check_seen(found, sorted_names(shown), split=split, words=words, by=words.train)
        rows = len(found.rows_with(unseen))
        logger.warning(
            "%s occur%s only in the %s data (%d row%s) and never in %s: %s (classes, but not learned ones)",
            words.labels(len(unseen)),
            "s" if len(unseen) == 1 else "",
            split,
            rows,
            "" if rows == 1 else "s",
            words.train,
            _shown(unseen),
        )
        more.update(unseen)
    if trained:
        return (*known, *sorted_names(more - set(known)))
    if keeps_order:
        return (*order, *sorted_names(more - set(order)))
    return tuple(sorted_names({*order, *more}))


def check_seen(found: SplitLabels, seen: Sequence[str], *, split: str, words: Words, by: str) -> None:
    """Refuses labels of a split that are not among those `seen`.

    Args:
        found: the labels of the split.
        seen: those that are known.
        split: its name.
        words: what messages call things.
        by: who knows them.

    Raises:
        DataError: with the first ones and the row of the first.
    """
    unseen = sorted_names(found.found() - set(seen))
    if unseen:
        row = found.rows_with(unseen[:1])[0] + 1
        hint = nearest(unseen[0], seen) if len(unseen) == 1 else ""
        which = f"only {words.label}s" if len(unseen) == len(found.found()) else f"{words.label}s"
        raise DataError(
            f"column {words.column} of the {split} data has {which} that {by} never shows: "
            f"{_shown(unseen)}{hint}, first in row {row}; add training rows of them, or remove these rows"
        )


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
