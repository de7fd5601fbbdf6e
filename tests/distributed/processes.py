"""Starts real processes for tests, as a user's shell does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
SECONDS = 850
"""DeepSpeed's CPU operators are compiled once, which takes minutes on a busy machine."""


def clean_environment(**more: str) -> dict[str, str]:
    """This process's environment without what a launcher would set."""
    drop = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "ACCELERATE_", "DS_ACCELERATOR", "HF_DIST_NPROC")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
    path = os.pathsep.join([str(ROOT), kept.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **more}


def start(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, from the repository's root."""
    return subprocess.run(
        command,
        env=clean_environment(**environment),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def torchrun(script: Path, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a script in two processes."""
    return start(*TORCHRUN, str(script), *flags, **environment)


def accelerate(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `accelerate launch ...`."""
    return start(str(BIN / "accelerate"), "launch", *words, **environment)
