"""Data sets by name: on the hub, in a cache of it, or a local folder that `load_dataset` can read.

datasets 5 runs no code that a data set ships, and refuses one that needs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from datasets import (
    Dataset,
    DatasetDict,
    IterableDataset,
    IterableDatasetDict,
    get_dataset_config_names,
    load_dataset,
)
from datasets.exceptions import DatasetNotFoundError, DatasetsError

from hf_dist.config import DataConfig
from hf_dist.data.loading.split_names import named_splits
from hf_dist.data.progress import progress_bars
from hf_dist.errors import DataError


def load_hub(data: DataConfig) -> DatasetDict:
    """Loads the splits of `data.dataset_name` into memory-mapped files.

    Raises:
        DataError: it isn't there, can't be read, or has none of the splits.
    """
    with _faults(data):
        loaded = load_dataset(
            data.dataset_name,
            data.dataset_config_name,
            revision=data.dataset_revision,
            cache_dir=data.dataset_cache_dir,
            streaming=False,
        )
        if isinstance(loaded, Dataset):
            loaded = DatasetDict({"train": loaded})
        return DatasetDict(named_splits(loaded, _source(data), data))


def stream_hub(data: DataConfig) -> dict[str, IterableDataset]:
    """The splits of `data.dataset_name` as streams; nothing but the first rows is read.

    Raises:
        DataError: as `load_hub`.
    """
    with _faults(data):
        loaded = load_dataset(
            data.dataset_name,
            data.dataset_config_name,
            revision=data.dataset_revision,
            cache_dir=data.dataset_cache_dir,
            streaming=True,
        )
        if isinstance(loaded, IterableDataset):
            loaded = IterableDatasetDict({"train": loaded})
        return named_splits(loaded, _source(data), data)


@contextmanager
def stream_faults(data: DataConfig) -> Iterator[None]:
    """Faults while rows are read from a stream of the hub, as DataErrors."""
    with _faults(data):
        yield


def _source(data: DataConfig) -> str:
    return f"--dataset_name {data.dataset_name}"


@contextmanager
def _faults(data: DataConfig) -> Iterator[None]:
    try:
        with progress_bars():
            yield
    except DatasetNotFoundError as error:
        raise DataError(f"{_source(data)}: {_one_line(error)}") from error
    except ConnectionError as error:
        raise DataError(
            f"{_source(data)}: it is in no cache here and the hub can't be reached ({_one_line(error)}); "
            "check the network (and HF_HUB_OFFLINE), or give --train_file"
        ) from error
    except (DatasetsError, ValueError, OSError, RuntimeError) as error:
        raise DataError(f"{_source(data)}: {_one_line(error)}{_configs(data)}") from error


def _configs(data: DataConfig) -> str:
    try:
        known = get_dataset_config_names(data.dataset_name)
    except Exception:
        return ""
    config = data.dataset_config_name
    if config in known or (config is None and len(known) <= 1):
        return ""
    return f"; --dataset_config_name is one of {', '.join(known[:20])}"


def _one_line(error: BaseException) -> str:
    causes = [error] if error.__cause__ is None else [error, error.__cause__]
    return ": ".join(
        " ".join(str(cause).split())[:300].rstrip(".") or type(cause).__name__ for cause in causes
    )
