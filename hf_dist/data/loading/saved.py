"""Folders that `save_to_disk` wrote: a Dataset, or a DatasetDict of splits."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
from datasets import Dataset, DatasetDict, load_from_disk

from hf_dist.config import DataConfig
from hf_dist.data.loading.split_names import named_splits
from hf_dist.errors import DataError


def is_saved(name: str) -> bool:
    """Whether a name is a folder that `save_to_disk` wrote."""
    return _is_dict(_folder(name)) or (_folder(name) / "state.json").is_file()


def load_saved(name: str, data: DataConfig) -> DatasetDict:
    """The splits of a saved folder, memory-mapped; a saved Dataset is a training split.

    `data` may name the splits.

    Raises:
        DataError: a file of the folder is missing or broken, or no split has a usual name.
    """
    saved = _load(name)
    if isinstance(saved, Dataset):
        saved = DatasetDict({"train": saved})
    return DatasetDict(named_splits(saved, str(_folder(name)), data))


def load_saved_split(name: str, split: str, data: DataConfig) -> Dataset:
    """One split of a saved DatasetDict, or a saved Dataset whatever split it is for.

    Raises:
        DataError: as `load_saved`, or it has no such split.
    """
    saved = _load(name)
    if isinstance(saved, Dataset):
        return saved
    splits = named_splits(saved, str(_folder(name)), data)
    if split not in splits:
        raise DataError(
            f"{_folder(name)} has no {split} split, only {', '.join(saved)}; name the folder of one of them "
            f"({_folder(name) / next(iter(saved))})"
        )
    return splits[split]


def _load(name: str) -> Dataset | DatasetDict:
    folder = _folder(name)
    try:
        saved = load_from_disk(str(folder))
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{folder} is no whole folder of save_to_disk ({reason}); save it again") from error
    return saved.with_format(None)


def _is_dict(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file()


def _folder(name: str) -> Path:
    return Path(name).expanduser().absolute()
