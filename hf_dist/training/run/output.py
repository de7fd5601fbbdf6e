"""Where a run writes: the choice of output_dir and the files beside the Trainer's own."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import platform
import re
import shutil
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from transformers import TrainingArguments

from hf_dist.config import RunConfig
from hf_dist.errors import CheckpointError
from hf_dist.training.checkpoints.files import MANIFEST, checkpoints
from hf_dist.training.ranks.gather import on_main

logger = logging.getLogger("hf_dist")

# Written last by a run that trained to its end; its presence is what "finished" means.
FINISHED_FILE = "all_results.json"
RUN_FILE = "run.json"
LOCK_FILE = ".lock"
RUNS_FOLDER = Path("runs")
# Results and weights that a new run would write again, or leave out.
_LEFT_BEHIND = (
    "train_results.json",
    "eval_results.json",
    "predict_results.json",
    "predictions.jsonl",
    "trainer_state.json",
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "adapter_model.safetensors",
    "adapter_config.json",
)
_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "deepspeed", "peft", "evaluate", "numpy")


def check_output_dir(output_dir: str) -> None:
    """Refuses a path that can't be a folder, or can't be written to.

    Raises:
        CheckpointError: If so.
    """
    folder = Path(output_dir)
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"--output_dir {folder} is a file; name a folder")
    parent = folder
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    if not os.access(parent, os.W_OK):
        raise CheckpointError(f"--output_dir {folder}: {parent} is not writable; name another folder")


def choose(config: RunConfig, name: str, arguments: TrainingArguments) -> tuple[Path, FileLock | None]:
    """Rank 0 claims the folder of the run and tells the others.

    It is the one the user named; or that of an unfinished run with the same settings, which goes on; or the
    next free one.

    Args:
        config: the resolved config.
        name: of the recipe.
        arguments: their `output_dir` is set.

    Returns:
        The folder, and on rank 0 its lock.

    Raises:
        CheckpointError: If it can't be used, or another run writes to it.
    """
    locks: list[FileLock] = []

    def claim() -> str:
        named = config.training_arguments.get("output_dir")
        folder = Path(named) if named is not None else None
        if folder is None and arguments.do_train and config.training.resume == "auto":
            folder = unfinished_run(name, config)
            if folder is not None:
                logger.info("%s was not finished and has the same settings: it goes on", folder)
        if folder is None:
            folder = claim_next_run(name)
        folder.mkdir(parents=True, exist_ok=True)
        locks.append(lock(folder))
        return str(folder)

    arguments.output_dir = on_main(claim)
    return Path(arguments.output_dir), (locks[0] if locks else None)


def begin(output_dir: Path, *, afresh: bool, recipe: str, config: RunConfig, seed: int) -> None:
    """Makes the folder that of a run which isn't finished; the last thing before the first step, on rank 0.

    Args:
        output_dir: its lock is held.
        afresh: remove what an earlier run of ours left, so that nothing of it is taken for this one's.
            Checkpoints without our manifest and all other files stay.
        recipe: name of the recipe.
        config: goes into run.json.
        seed: the same.
    """
    (output_dir / FINISHED_FILE).unlink(missing_ok=True)
    if afresh:
        for checkpoint in checkpoints(output_dir):
            if (checkpoint.path / MANIFEST).is_file():
                # Without its manifest it is no checkpoint any more, should the removal be cut short.
                (checkpoint.path / MANIFEST).unlink()
                shutil.rmtree(checkpoint.path)
        for pattern in _LEFT_BEHIND:
            for path in output_dir.glob(pattern):
                path.unlink()
    write_run_file(output_dir, recipe=recipe, config=config, seed=seed)


def claim_next_run(recipe: str, runs: Path = RUNS_FOLDER) -> Path:
    """Creates and returns the next free `runs/<recipe>-NNN`; two runs at once get two folders."""
    pattern = re.compile(re.escape(recipe) + r"-(\d+)$")
    try:
        runs.mkdir(parents=True, exist_ok=True)
        taken = [int(match[1]) for entry in runs.iterdir() if (match := pattern.match(entry.name))]
        number = max(taken, default=0) + 1
        while True:
            folder = runs / f"{recipe}-{number:03d}"
            try:
                folder.mkdir()
            except FileExistsError:
                number += 1
            else:
                return folder
    except OSError as error:
        raise CheckpointError(
            f"can't create a folder in {runs.absolute()}: {error.strerror}; name one with --output_dir"
        ) from None


def lock(output_dir: Path) -> FileLock:
    """Claims a folder for this process until the lock is released or the process ends.

    Raises:
        CheckpointError: If another run writes to it.
    """
    claimed = FileLock(output_dir / LOCK_FILE)
    try:
        claimed.acquire(timeout=0)
    except Timeout:
        raise CheckpointError(
            f"another run is writing to {output_dir}; wait for it, or name another --output_dir"
        ) from None
    return claimed


def unfinished_run(recipe: str, config: RunConfig, runs: Path = RUNS_FOLDER) -> Path | None:
    """The newest unnamed run of this recipe that has the same config, a checkpoint, and no end."""
    wanted = json.loads(json.dumps(config.as_dict(), default=str))
    for folder in sorted(runs.glob(f"{recipe}-*"), reverse=True):
        if (folder / FINISHED_FILE).exists() or not checkpoints(folder):
            continue
        try:
            found = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))["config"]
        except (OSError, ValueError, KeyError):
            continue
        if found == wanted and not _is_locked(folder):
            return folder
    return None


def _is_locked(folder: Path) -> bool:
    try:
        lock(folder).release()
    except CheckpointError:
        return True
    return False


def package_versions() -> dict[str, str]:
    """Versions of the packages that decide what a run computes."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def write_json(path: Path, content: Any) -> None:
    """Writes JSON beside `path` and renames it into place, so that no half file is ever seen."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".tmp")
    scratch.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")
    scratch.replace(path)


def write_run_file(output_dir: Path, *, recipe: str, config: RunConfig, **facts: Any) -> None:
    """Writes run.json: the resolved config, package versions and facts such as engine and seed."""
    content = {"recipe": recipe, **facts, "config": config.as_dict(), "versions": package_versions()}
    write_json(output_dir / RUN_FILE, content)
