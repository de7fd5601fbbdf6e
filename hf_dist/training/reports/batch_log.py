"""`--dump_batches`: which rows were trained when, one JSON line per rank and micro-batch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from hf_dist.batching.sampler import BatchKey
from hf_dist.errors import ConfigError

_ORDER = ("epoch", "step", "micro_batch", "rank")


def _place(record: dict[str, Any]) -> tuple[int, ...]:
    return tuple(record[name] for name in _ORDER)


def _read(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the records of a file; a last line cut off by a kill is left out."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield json.loads(line)


class BatchLog:
    """Writes a rank's micro-batches into a part file; rank 0 joins the parts at the end.

    A resumed run keeps the lines of the steps before the one it resumes at and replaces the rest, so
    that the file always tells the steps that made the weights.

    Args:
        path: The joined file.
        rank: Data-parallel rank of this process.
        writes: False for a process that sees the same data as another one (tensor parallelism).
        main: True on the one process that joins.
        barrier: Waits for all processes.

    Raises:
        ConfigError: If the file can't be written.
    """

    def __init__(
        self, path: str | Path, *, rank: int, writes: bool, main: bool, barrier: Callable[[], None]
    ) -> None:
        self._path = Path(path)
        self._rank = rank
        self._writes = writes
        self._main = main
        self._barrier = barrier
        self._file: TextIO | None = None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--dump_batches {path}: {error.strerror}; name a file that can be written"
            ) from None

    def _parts(self) -> list[Path]:
        return sorted(self._path.parent.glob(f"{self._path.name}.rank*.part"))

    def start(self, epoch: int, step: int) -> None:
        """Opens this rank's part; lines from (`epoch`, `step`) on are those of a lost run and go."""
        if self._main:
            self._fold(lambda record: (record["epoch"], record["step"]) < (epoch, step))
        self._barrier()
        if self._writes:
            part = self._path.parent / f"{self._path.name}.rank{self._rank:05d}.part"
            # Line buffering: what was trained is on disk even if the process is killed.
            self._file = part.open("w", encoding="utf-8", buffering=1)

    def write(self, key: BatchKey) -> None:
        """Records a micro-batch that is about to reach the model."""
        if self._file is None:
            return
        record = {
            "epoch": key.epoch,
            "step": key.step,
            "micro_batch": key.micro_batch,
            "rank": self._rank,
            "rows": list(key.rows),
            "computed_tokens": key.computed_tokens,
            "real_tokens": key.real_tokens,
            "weight": key.weight,
        }
        self._file.write(json.dumps(record) + "\n")

    def join(self) -> None:
        """Closes the parts and joins them into the one file, in the order of training."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._barrier()
        if self._main:
            self._fold(lambda _: True)
        self._barrier()

    def _fold(self, keep: Callable[[dict[str, Any]], bool]) -> None:
        files = [path for path in (self._path, *self._parts()) if path.exists()]
        records: Iterable[dict[str, Any]] = (record for path in files for record in _read(path))
        kept = sorted((record for record in records if keep(record)), key=_place)
        unfinished = self._path.with_name(self._path.name + ".joining")
        with unfinished.open("w", encoding="utf-8") as lines:
            lines.writelines(json.dumps(record) + "\n" for record in kept)
        unfinished.replace(self._path)
        for part in self._parts():
            part.unlink()
