"""Checkpoint folders on disk: which are whole, how one becomes visible, which are removed.

A checkpoint is written beside its place, flushed, closed by a manifest of all its files, and then renamed.
So `checkpoint-N` with a manifest whose digests hold is whole, and anything else is not: it is named and
passed over, and never deleted. Nothing here needs torch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from hf_dist.errors import CheckpointError

MANIFEST = "manifest.json"
SCRATCH = ".saving"
_FORMAT = 1
_NAME = re.compile(r"checkpoint-(\d+)$")


@dataclass(frozen=True)
class Checkpoint:
    """A folder `checkpoint-<step>`."""

    path: Path
    step: int

    @property
    def facts(self) -> dict[str, Any]:
        """What the manifest says of the run that wrote it."""
        return facts_of(self.path)


def facts_of(checkpoint: Path) -> dict[str, Any]:
    """What the manifest of a whole checkpoint says of the run that wrote it; nothing without a manifest."""
    manifest = checkpoint / MANIFEST
    if not manifest.is_file():
        return {}
    return dict(json.loads(manifest.read_text(encoding="utf-8"))["facts"])


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)


def _digest(path: Path) -> str:
    found = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            found.update(chunk)
    return found.hexdigest()


def _digest_of_manifest(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _flush(path: Path) -> None:
    """Brings a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def seal(folder: Path, facts: Mapping[str, Any]) -> None:
    """Flushes all files of a folder, then writes their manifest.

    Args:
        folder: Everything of the checkpoint is in it.
        facts: JSON-serialisable: what must agree when a run resumes, and what a person wants to know.
    """
    files = {}
    for path in _files(folder):
        _flush(path)
        files[str(path.relative_to(folder))] = {"bytes": path.stat().st_size, "xxh3_128": _digest(path)}
    manifest = folder / MANIFEST
    content = {"format": _FORMAT, "facts": json.loads(json.dumps(facts, default=str)), "files": files}
    content["xxh3_128"] = _digest_of_manifest(content)
    manifest.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    _flush(manifest)
    _flush(folder)


def publish(scratch: Path, place: Path) -> None:
    """Renames a sealed folder to its place; what stood there (a damaged one) is kept under another name."""
    if place.exists():
        number = 1
        while (aside := place.with_name(f"{place.name}.replaced-{number}")).exists():
            number += 1
        place.rename(aside)
    scratch.rename(place)
    _flush(place.parent)


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, in a few words that name the file; None for a whole one."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = dict(manifest["files"])
        if manifest.pop("xxh3_128") != _digest_of_manifest(manifest):
            return f"{MANIFEST} is damaged (its digest differs)"
        if manifest["format"] != _FORMAT or not isinstance(manifest["facts"], dict):
            return f"{MANIFEST} is of another format"
    except FileNotFoundError:
        return f"{MANIFEST} is missing: it was never finished, or another program wrote it"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is damaged"
    wrong = (_damage_of(folder, name, expected) for name, expected in files.items())
    return next((found for found in wrong if found is not None), None)


def _damage_of(folder: Path, name: str, expected: Mapping[str, Any]) -> str | None:
    path = folder / name
    try:
        size = path.stat().st_size
        if size != expected["bytes"]:
            return f"{name} has {size} bytes of {expected['bytes']}"
        return None if _digest(path) == expected["xxh3_128"] else f"{name} is damaged (its digest differs)"
    except FileNotFoundError:
        return f"{name} is missing"
    except (OSError, KeyError, TypeError) as error:
        return f"{name} can't be checked ({error})"


def step_of(name: str) -> int | None:
    """The step in the name of a checkpoint's folder; None for any other name."""
    match = _NAME.match(name)
    return None if match is None else int(match[1])


def checkpoints(output_dir: Path) -> list[Checkpoint]:
    """All folders named as checkpoints, whole or not, the newest first."""
    if not output_dir.is_dir():
        return []
    found = [
        Checkpoint(path, step)
        for path in output_dir.iterdir()
        if path.is_dir() and (step := step_of(path.name)) is not None
    ]
    return sorted(found, key=lambda one: -one.step)


def newest_whole(output_dir: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint, and one line for each newer one that was passed over."""
    passed: list[str] = []
    for checkpoint in checkpoints(output_dir):
        wrong = damage(checkpoint.path)
        if wrong is None:
            return checkpoint, passed
        passed.append(f"{checkpoint.path} is passed over: {wrong}")
    return None, passed


def named(path: Path) -> Checkpoint:
    """The checkpoint at a path that the user named.

    Raises:
        CheckpointError: If it isn't there, or isn't whole.
    """
    step = step_of(path.name)
    if not path.is_dir() or step is None:
        raise CheckpointError(
            f"--resume {path}: there is no checkpoint; name a folder checkpoint-N of a run, or say auto or "
            "never"
        )
    wrong = damage(path)
    if wrong is not None:
        raise CheckpointError(f"--resume {path}: {wrong}; name another checkpoint, or say auto")
    return Checkpoint(path, step)


def rotate(output_dir: Path, limit: int | None, keep: Iterable[Path]) -> list[Path]:
    """Removes the oldest finished checkpoints beyond a limit; returns those that went.

    Args:
        output_dir: Folder of the run.
        limit: Finished checkpoints to keep, those of `keep` included; None for all.
        keep: Ones that stay (the best).
    """
    if limit is None or limit < 1:
        return []
    finished = [one.path for one in checkpoints(output_dir) if (one.path / MANIFEST).exists()]
    kept = {path.resolve() for path in keep}
    # The newest always stays: it is what the run would resume from.
    staying = [path for path in finished if path.resolve() in kept or path == finished[0]]
    others = [path for path in finished if path not in staying]
    room = max(0, limit - len(staying))
    removed = []
    for path in others[room:]:
        # Without its manifest it is no checkpoint any more, should the removal be cut short.
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
        removed.append(path)
    return removed


def size_of(folder: Path) -> int:
    """Bytes of all files of a folder."""
    return sum(path.stat().st_size for path in _files(folder))


def differences(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """One line for each of `wanted` that a checkpoint's facts contradict."""
    return [
        f"{name}: the checkpoint has {saved.get(name)}, this run {value}"
        for name, value in wanted.items()
        if saved.get(name) != value
    ]


def refuse_other_run(checkpoint: Checkpoint, wanted: Mapping[str, Any]) -> None:
    """Checks that a checkpoint is of the same model, data, tokenizer and plan.

    Raises:
        CheckpointError: With all differences.
    """
    found = differences(checkpoint.facts, wanted)
    if found:
        raise CheckpointError(
            f"{checkpoint.path} is of another run ({'; '.join(found)}); resume with the settings it was made "
            "with, name another --output_dir, or say --resume never"
        )
