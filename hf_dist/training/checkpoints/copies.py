"""Copies of checkpoints somewhere else: an object store, another disk; any place that fsspec knows.

Each whole checkpoint is copied in the background, its manifest last, so that a copy with a manifest is whole
there, too. A run whose folder is gone (a new spot machine) gets the newest one back.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec

from hf_dist.errors import CheckpointError, ConfigError
from hf_dist.training.checkpoints import files

logger = logging.getLogger("hf_dist")


class Copies:
    """The place that a run's checkpoints are copied to; rank 0 holds it.

    Args:
        url: Folder of this run, as an fsspec URL (`s3://bucket/run`, `file:///mnt/run`); a path is a URL too.
        limit: Copies to keep, as `save_total_limit`; the newest and the best always stay.

    Raises:
        ConfigError: If the URL can't be used: another protocol, a package that isn't there, no access.
    """

    def __init__(self, url: str, *, limit: int | None) -> None:
        self._url = url.rstrip("/")
        self._limit = limit
        try:
            filesystem, path = fsspec.core.url_to_fs(self._url)
            filesystem.makedirs(path, exist_ok=True)
        except Exception as error:
            # Each protocol's package raises errors of its own.
            raise ConfigError(
                f"--checkpoint_copy {url} can't be used ({_words(error)}); name a writable folder, "
                "as an fsspec URL (file:///mnt/runs/a, s3://bucket/a with the package s3fs)"
            ) from error
        self._filesystem: Any = filesystem
        self._folder = str(path).rstrip("/")
        # One at a time and in order, so that the newest copy is never older than one that is there.
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hf_dist-copy")
        self._pending: dict[Path, Future[None]] = {}
        self._failed: str | None = None

    # ---- To the place ----

    def start(self, checkpoint: Path, best: Path | None) -> None:
        """Copies a whole checkpoint in the background; a failure is a warning until the end."""
        self._pending = {path: copy for path, copy in self._pending.items() if not copy.done()}
        self._pending[checkpoint] = self._pool.submit(self._copy, checkpoint, best)

    def pending(self) -> list[Path]:
        """Checkpoints that are not copied yet, and so must stay."""
        return [path for path, copy in self._pending.items() if not copy.done()]

    def finish(self) -> None:
        """Waits for all copies.

        Raises:
            CheckpointError: If the last one failed.
        """
        self._pool.shutdown(wait=True)
        if self._failed is not None:
            raise CheckpointError(self._failed)

    def _copy(self, checkpoint: Path, best: Path | None) -> None:
        target = f"{self._folder}/{checkpoint.name}"
        try:
            if self._filesystem.exists(target):
                self._filesystem.rm(target, recursive=True)
            names = [
                str(path.relative_to(checkpoint)) for path in sorted(checkpoint.rglob("*")) if path.is_file()
            ]
            for name in sorted(names, key=lambda name: name == files.MANIFEST):
                place = f"{target}/{name}"
                self._filesystem.makedirs(place.rsplit("/", 1)[0], exist_ok=True)
                self._filesystem.put_file(str(checkpoint / name), place)
            self._rotate(best)
            self._failed = None
            logger.info("%s is copied to %s", checkpoint.name, self._url)
        except Exception as error:
            self._failed = (
                f"{checkpoint} could not be copied to {self._url} ({_words(error)}); the local one is whole"
            )
            logger.warning("%s, and the next save tries again", self._failed)

    def _rotate(self, best: Path | None) -> None:
        if self._limit is None or self._limit < 1:
            return
        steps = sorted(self._steps(), reverse=True)
        kept = {steps[0]} | ({int(best.name.split("-")[-1])} if best is not None else set())
        others = [step for step in steps if step not in kept]
        for step in others[max(0, self._limit - len(kept)) :]:
            folder = f"{self._folder}/checkpoint-{step}"
            # Without its manifest it is no copy any more, should the removal be cut short.
            self._filesystem.rm_file(f"{folder}/{files.MANIFEST}")
            self._filesystem.rm(folder, recursive=True)

    # ---- And back ----

    def _steps(self) -> Iterator[int]:
        """Steps of the copies that have a manifest."""
        for entry in self._filesystem.ls(self._folder, detail=False):
            name = str(entry).rstrip("/").rsplit("/", 1)[-1]
            step = files.step_of(name)
            if step is not None and self._filesystem.exists(f"{self._folder}/{name}/{files.MANIFEST}"):
                yield step

    def refuse_old_ones(self) -> None:
        """Checks that a run that starts afresh would not mix its copies with those of another.

        Raises:
            CheckpointError: If there are any.
        """
        if any(True for _ in self._steps()):
            raise CheckpointError(
                f"--checkpoint_copy {self._url} holds checkpoints of a former run, and --resume never starts "
                "afresh; name another folder, or remove them"
            )

    def fetch(
        self, output_dir: Path, *, newer_than: files.Checkpoint | None = None
    ) -> files.Checkpoint | None:
        """Brings the newest whole copy back, if it is newer than what the folder of the run has.

        A copy that came damaged is named and passed over.

        Args:
            output_dir: Folder of the run.
            newer_than: The newest whole checkpoint there.

        Returns:
            What was brought back.

        Raises:
            CheckpointError: If the place can't be read.
        """
        try:
            for step in sorted(self._steps(), reverse=True):
                if newer_than is not None and newer_than.step >= step:
                    return None
                if (fetched := self._fetch(step, output_dir)) is not None:
                    return fetched
            return None
        except Exception as error:
            raise CheckpointError(
                f"--checkpoint_copy {self._url} can't be read ({_words(error)}); mend the access, or leave "
                "the flag out"
            ) from error

    def _fetch(self, step: int, output_dir: Path) -> files.Checkpoint | None:
        name = f"checkpoint-{step}"
        scratch = output_dir / files.SCRATCH / name
        shutil.rmtree(scratch, ignore_errors=True)
        source = f"{self._folder}/{name}"
        for remote in self._filesystem.find(source):
            place = scratch / str(remote)[len(source) :].lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            self._filesystem.get_file(remote, str(place))
        wrong = files.damage(scratch)
        if wrong is not None:
            logger.warning("%s/%s is passed over: %s", self._url, name, wrong)
            shutil.rmtree(scratch, ignore_errors=True)
            return None
        files.publish(scratch, output_dir / name)
        logger.info("%s/%s is copied back to %s", self._url, name, output_dir)
        return files.Checkpoint(output_dir / name, step)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".rstrip(": ")
