"""What the data flags name: files by split, folders, or nothing."""

from __future__ import annotations

from datasets import Dataset

from hf_dist.config import DataConfig
from hf_dist.data.loading.saved import is_saved
from hf_dist.data.loading.shards import files_of, load_files
from hf_dist.data.readers.json_cells import JsonColumns
from hf_dist.errors import DataError


def load_local(name: str, data: DataConfig, json_columns: JsonColumns = frozenset()) -> Dataset:
    """The rows of a flag's files: one, a folder of them, or a pattern."""
    return load_files(files_of(name, data.file_format), data.file_format, json_columns=json_columns)


def is_builtin(data: DataConfig) -> bool:
    """Whether neither a data set nor a file is named."""
    return data.dataset_name is None and not files_by_split(data)


def files_by_split(data: DataConfig) -> dict[str, str]:
    """The flags for files that are given, by split, `train` first.

    Raises:
        DataError: a split of a data set is named, and nothing that has splits; or the format of files, and
            there is none.
    """
    named = {"train": data.train_file, "validation": data.validation_file, "test": data.test_file}
    files = {split: name for split, name in named.items() if name is not None}
    for split in named:
        wanted = getattr(data, f"{split}_split")
        if wanted is not None and data.dataset_name is None and not any(map(is_saved, files.values())):
            raise DataError(
                f"--{split}_split {wanted} names a split, and no data set with splits is given: name one "
                "with --dataset_name, or drop it"
            )
    if data.file_format is not None and all(map(is_saved, files.values())):
        raise DataError(
            f"--file_format {data.file_format} says what local files hold, and none is given: name one with "
            "--train_file, or drop it"
        )
    return files


def named_folder(data: DataConfig) -> str:
    """`data.dataset_name`, where it is a folder of save_to_disk.

    Raises:
        DataError: a configuration or revision is asked for, which such a folder has not.
    """
    assert data.dataset_name is not None
    for flag, value in (
        ("dataset_config_name", data.dataset_config_name),
        ("dataset_revision", data.dataset_revision),
    ):
        if value is not None:
            raise DataError(
                f"--{flag} {value}: {data.dataset_name} is a folder of save_to_disk, which has none; drop it"
            )
    return data.dataset_name
