"""What the splits of other people's data sets are called."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import TypeVar

from hf_dist.config import DataConfig
from hf_dist.errors import DataError, nearest

logger = logging.getLogger(__name__)

T = TypeVar("T")

# In the order in which they are taken where a data set has several.
_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev", "validation_matched", "eval"),
    "test": ("test", "testing", "test_matched"),
}

_ENDINGS = {**_NAMES, "validation": (*_NAMES["validation"], "testa"), "test": (*_NAMES["test"], "testb")}


def named_splits(loaded: Mapping[str, T], source: str, data: DataConfig) -> dict[str, T]:
    """Those of the loaded splits that are `train`, `validation` or `test`.

    Args:
        loaded: splits by their own names.
        source: what the messages start with.
        data: `train_split`, `validation_split` and `test_split` name them; else their usual names do.

    Raises:
        DataError: there is none, or none of a name that `data` gives; the message lists those there are.
    """
    splits = {}
    for split, names in _NAMES.items():
        wanted = getattr(data, f"{split}_split")
        if wanted is not None and wanted not in loaded:
            raise DataError(
                f"{source} has no split {wanted} (--{split}_split){nearest(wanted, loaded)}; it has "
                f"{', '.join(loaded)}"
            )
        found = wanted or next((known for known in names if known in loaded), None)
        if found is not None:
            splits[split] = loaded[found]
            if found != split:
                logger.info("%s: its split %s is used for %s", source, found, split)
    if not splits:
        raise DataError(
            f"{source} has the splits {', '.join(loaded)}; expected train, "
            "validation or test: name them with --train_split, --validation_split and --test_split"
        )
    return splits


def split_of_file(stem: str) -> str | None:
    """The split that a file's name starts with: `train` for `train-00000-of-00002`, None for `part-3`."""
    word = re.split(r"[-_.]", stem.lower(), maxsplit=1)[0]
    return next((split for split, names in _NAMES.items() if word in names), None)


def split_of_ending(ending: str) -> str | None:
    """The split that a file's ending names: `test` for `.testb`, as CoNLL-2003 calls its files."""
    word = ending.lower().removeprefix(".")
    return next((split for split, names in _ENDINGS.items() if word in names), None)
