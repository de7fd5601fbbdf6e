"""Things that are built once per machine and then only read, however many processes start together.

No process group exists yet when data is prepared, so processes agree through a file lock; a finished
entry appears by one rename, and is therefore whole or absent.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from hf_dist.errors import DataError


def cache_dir() -> Path:
    """The folder of everything cached: `$HF_DIST_CACHE`, else `~/.cache/hf_dist`.

    Raises:
        DataError: the folder can't be made or written.
    """
    folder = Path(os.environ.get("HF_DIST_CACHE") or "~/.cache/hf_dist").expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    return folder


def _unwritable(folder: Path, error: OSError) -> DataError:
    reason = error.strerror or error
    return DataError(
        f"the cache folder {folder} can't be written ({reason}); set HF_DIST_CACHE to a folder that can"
    )


def key_of(*parts: Any) -> str:
    """A short hexadecimal name for JSON-serialisable `parts`; the same on every machine and run."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:20]


def locked(path: Path) -> FileLock:
    """A lock between the processes of a machine (or of a shared file system) for the cache entry `path`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path.parent, error) from error
    return FileLock(path.with_name(path.name + ".lock"))


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Returns `folder`, filled by `build(new_empty_folder)` unless an earlier call has finished it.

    Processes that come meanwhile wait for the lock and find the entry there. A `build` that raises or is
    killed leaves no entry, and the next call builds again.

    Raises:
        DataError: the cache can't be written.
    """
    if folder.is_dir():
        return folder
    try:
        with locked(folder):
            if not folder.is_dir():
                # One name is enough under the lock, and what a killed process left there goes away.
                scratch = folder.with_name(folder.name + ".tmp")
                shutil.rmtree(scratch, ignore_errors=True)
                scratch.mkdir()
                try:
                    build(scratch)
                    os.replace(scratch, folder)
                finally:
                    shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise _unwritable(folder.parent, error) from error
    return folder
