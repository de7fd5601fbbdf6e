"""Where raw splits come from: the hub, local files or the built-in data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
from datasets import DatasetDict

from hf_dist.config import DataConfig
from hf_dist.data.loading.hub import load_hub
from hf_dist.data.loading.named import files_by_split, is_builtin, load_local, named_folder
from hf_dist.data.loading.saved import is_saved, load_saved, load_saved_split
from hf_dist.data.loading.streams import first_of_stream, load_stream
from hf_dist.data.readers.json_cells import JsonColumns
from hf_dist.errors import DataError, nearest

logger = logging.getLogger(__name__)


def load_splits(
    data: DataConfig, builtin: Callable[[], DatasetDict], *, json_columns: JsonColumns = frozenset()
) -> DatasetDict:
    """Loads the raw splits that `data` names: some of `train`, `validation` and `test`.

    A file for a split replaces that split of a data set. Nothing is checked but that it can be read. Where
    the training data is to be streamed, `train` holds its first rows only, to find columns and classes in.

    Args:
        data: the configuration; without data set and files, `builtin` is called.
        builtin: makes the built-in data of the task.
        json_columns: columns of local files whose cells are kept as JSON text (see `json_cells`).

    Raises:
        DataError: a file or data set that can't be read.
    """
    if data.streaming:
        stream, others = load_stream(data, builtin, json_columns=json_columns)
        return DatasetDict({"train": first_of_stream(stream), **others})
    if is_builtin(data):
        return builtin()
    files = files_by_split(data)
    splits = DatasetDict()
    if data.dataset_name is not None:
        splits = load_saved(named_folder(data), data) if is_saved(data.dataset_name) else load_hub(data)
    for split, name in files.items():
        if not is_saved(name):
            splits[split] = load_local(name, data, json_columns)
        elif split == "train":
            splits.update(load_saved(name, data))
        else:
            splits[split] = load_saved_split(name, split, data)
    for split, rows in splits.items():
        if len(rows) == 0:
            raise DataError(f"the {split} split of {data.dataset_name or files.get(split)} has no rows")
    return splits


def hold_out(splits: DatasetDict, data: DataConfig, strata: np.ndarray | None = None) -> DatasetDict:
    """Splits a validation set off the training rows where there is none.

    The choice depends on the labels and the number of rows alone. Every stratum gives its share, rounded,
    and keeps at least one row for training.

    Args:
        splits: with `train`; returned as it is where it also has `validation`.
        data: `validation_fraction` is the share of the rows held out; none are of a stream.
        strata: (rows,) class of each training row, for shares that are the same in both splits; None takes
            rows whatever they are.

    Raises:
        DataError: too few rows.
    """
    if "train" not in splits or "validation" in splits or data.streaming:
        return splits
    fraction = data.validation_fraction
    if strata is None:
        strata = np.zeros(len(splits["train"]), dtype=np.int64)
    order = np.random.default_rng(0).permutation(len(strata))
    order = order[np.argsort(strata[order], kind="stable")]
    groups = np.split(order, np.flatnonzero(np.diff(strata[order])) + 1)
    held = [rows[: min(round(fraction * len(rows)), len(rows) - 1)] for rows in groups]
    if not any(len(rows) for rows in held):
        # Classes of a few rows each: single rows of those that have more than one.
        spare = [rows[:1] for rows in groups if len(rows) > 1]
        held = spare[: max(1, round(fraction * len(strata)))]
    if not held:
        raise DataError(
            f"{len(strata)} training row(s) with {len(groups)} label(s) leave none to hold out for "
            "validation; "
            "add rows, or give --validation_file"
        )
    validation = np.sort(np.concatenate(held))
    train = np.setdiff1d(np.arange(len(strata)), validation)
    logger.info("no validation split: %d of %d training rows held out", len(validation), len(strata))
    parts = {"train": splits["train"].select(train), "validation": splits["train"].select(validation)}
    return DatasetDict({**splits, **parts})


def first_rows(splits: DatasetDict, data: DataConfig) -> DatasetDict:
    """Keeps the first `max_*_samples` rows of each split."""
    most = {
        "train": data.max_train_samples,
        "validation": data.max_eval_samples,
        "test": data.max_predict_samples,
    }
    return DatasetDict(
        {
            split: rows if (limit := most[split]) is None else rows.select(range(min(limit, len(rows))))
            for split, rows in splits.items()
        }
    )


def first_split(splits: DatasetDict) -> str:
    """The split that the others are held to: the training rows, if there are any."""
    return next(split for split in ("train", "validation", "test") if split in splits)


def check_same_columns(splits: DatasetDict, columns: Sequence[str], labels: Sequence[str] = ()) -> None:
    """Checks that all splits have the columns that were found in the first one.

    Args:
        splits: raw splits.
        columns: those that every split needs.
        labels: those that a test split may lack.

    Raises:
        DataError: one isn't there; the message lists the columns of that split.
    """
    first = first_split(splits)
    for split, rows in splits.items():
        for name in [*columns, *(labels if split != "test" else ())]:
            if name not in rows.column_names:
                raise DataError(
                    f"the {split} data has no column {name}{nearest(name, rows.column_names)}, which the "
                    f"{first} data has; it has {', '.join(rows.column_names)}"
                )


def find_column(columns: list[str], wanted: str | None, usual: tuple[str, ...], *, flag: str) -> str:
    """Returns the column that the user `wanted`, or else the first of the `usual` names that is there.

    Upper and lower case count only in what the user wrote.

    Args:
        columns: the columns that are there.
        wanted: the flag's value.
        usual: names to look for, best first, in lower case.
        flag: name of the flag, for the message.

    Raises:
        DataError: it isn't there; the message lists the columns.
    """
    if wanted is not None:
        if wanted not in columns:
            raise DataError(
                f"--{flag} {wanted}: there is no such column{nearest(wanted, columns)}; the data has "
                f"{', '.join(columns)}"
            )
        return wanted
    found = usual_column(columns, usual)
    if found is None:
        raise DataError(
            f"no column is named {', '.join(usual[:-1])} or {usual[-1]}; the data has {', '.join(columns)}: "
            "name "
            f"one with --{flag}"
        )
    return found


def usual_column(columns: list[str], usual: tuple[str, ...]) -> str | None:
    """The first of the `usual` names (lower case) among `columns`, as it is written there."""
    by_name = {column.strip().lower(): column for column in reversed(columns)}
    return next((by_name[name] for name in usual if name in by_name), None)
