"""Where a run writes: the choice of output_dir and the files beside the Trainer's own."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
from pathlib import Path
from typing import Any

from hf_dist.config import RunConfig
from hf_dist.errors import CheckpointError

# Written last by a run that trained to its end; its presence is what "finished" means.
FINISHED_FILE = "all_results.json"
RUN_FILE = "run.json"
RUNS_FOLDER = Path("runs")
_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "deepspeed", "peft", "evaluate", "numpy")


def check_output_dir(output_dir: str, *, trains: bool) -> None:
    """Refuses a folder that holds a finished run, or a path that can't be a folder.

    Raises:
        CheckpointError: If so.
    """
    folder = Path(output_dir)
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"--output_dir {folder} is a file; name a folder")
    if trains and (folder / FINISHED_FILE).exists():
        raise CheckpointError(
            f"--output_dir {folder} holds a finished run ({FINISHED_FILE}); name another folder, "
            "remove this one, or leave the flag out to get the next free one"
        )
    parent = folder
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    if not os.access(parent, os.W_OK):
        raise CheckpointError(f"--output_dir {folder}: {parent} is not writable; name another folder")


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
