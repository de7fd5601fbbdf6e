"""Starts a recipe as a user does, in real processes."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent

# A run small enough for a test: 2 narrow steps, no checkpoints.
SMALL = (
    "--max_steps=2",
    "--max_train_samples=64",
    "--max_eval_samples=32",
    "--max_tokens_per_device=1024",
    "--max_length=32",
    "--logging_steps=1",
    "--save_strategy=no",
)


def start(
    recipe: str, *flags: str, nproc: int = 1, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs `recipes/<recipe>.py` to its end, as the make targets do."""
    script = str(ROOT / "recipes" / f"{recipe}.py")
    launcher = [sys.executable]
    if nproc > 1:
        launcher = [str(BIN / "torchrun"), "--standalone", "--nproc_per_node", str(nproc)]
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [*launcher, script, *flags],
        cwd=cwd or ROOT,
        env={**inherited, "HF_DIST_NPROC": str(nproc), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def run(recipe: str, *flags: str, output_dir: Path, nproc: int = 1) -> dict[str, Any]:
    """Runs a recipe that must succeed; returns its all_results.json."""
    done = start(recipe, *flags, f"--output_dir={output_dir}", nproc=nproc)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[:6000]
    return json.loads((output_dir / "all_results.json").read_text())


def call(main: Callable[[], None], *flags: str) -> int:
    """Runs a recipe's `main` in this process with these flags; returns its exit status.

    Quicker than `start` by the import of torch and transformers; for runs that need no process of their own.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["recipe", *flags])
        try:
            main()
        except SystemExit as stop:
            return int(stop.code or 0)
    return 0


@contextmanager
def logged() -> Iterator[list[str]]:
    """What hf_dist logs within it, in this process, whatever run has set the logger up before."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hf_dist")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def only_error(stderr: str) -> str:
    """The one-line error in what a failed run printed, checked to be one."""
    assert "Traceback" not in stderr, stderr[-4000:]
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, stderr[-4000:]
    return errors[0]


def losses(folder: Path) -> list[float]:
    """The logged losses of a run, in the order of its steps."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]
