"""What a DeepSpeed configuration needs from the machine, checked before anything is loaded.

DeepSpeed compiles its CPU optimizers and its NVMe access the first time they are used; without a compiler,
a matching CUDA toolkit or libaio it fails deep inside the engine, and an interrupted compilation leaves a
lock that the next run waits for without end and without a word.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from hf_dist.presets.catalogue import NVME_PATH, NVME_PATH_VARIABLE
from hf_dist.presets.reading import nvme_paths, offload_device

logger = logging.getLogger("hf_dist")

STALE_AFTER_SECONDS = 600.0
"""An older lock that no process of this machine holds is stale, wherever the folder lies."""

STALE_WHEN_BUILT_SECONDS = 60.0
"""The same where the library is there already: its check takes less than a second."""

# fp32 master weight, two AdamW moments and the gradient, and the parameter itself.
NVME_BYTES_PER_PARAMETER = 4 + 8 + 4 + 4


def show_own_ninja(environ: MutableMapping[str, str]) -> None:
    """Puts this Python's own programs on PATH if ninja is only there.

    torch looks for ninja on PATH alone, so a virtual environment that isn't activated has none. Another
    ninja on PATH is left first: two versions of it rebuild each other's work (the log's format differs).
    """
    programs = Path(sys.executable).parent
    path = environ.get("PATH", os.defpath)
    if shutil.which("ninja", path=path) is None and (programs / "ninja").exists():
        environ["PATH"] = os.pathsep.join([path, str(programs)])


def missing_needs(config: Mapping[str, Any], environ: Mapping[str, str], *, on_cpu: bool) -> list[str]:
    """What this machine lacks for the configuration, one line each with the mend.

    Args:
        config: the DeepSpeed configuration.
        environ: the environment.
        on_cpu: whether DeepSpeed runs on the CPU, since there is no accelerator.
    """
    problems = []
    devices = {part: offload_device(config, part) for part in ("optimizer", "param")}
    operators = ["deepspeed_shm_comm"] if on_cpu else []
    if devices["optimizer"] != "none":
        operators.append("cpu_adam")
        problems += _compiler_problems(environ, on_cpu=on_cpu)
    if "nvme" in devices.values():
        operators += ["async_io", "pin_memory"]
        if not _has_libaio():
            problems.append(
                "NVMe offload needs libaio with its headers; install it: `make system-deps`, "
                "or `apt-get install libaio-dev`"
            )
        for path in nvme_paths(config):
            problems += nvme_path_problems(path)
    problems += stale_locks(operators)
    return problems


def _compiler_problems(environ: Mapping[str, str], *, on_cpu: bool) -> list[str]:
    """Whether CPUAdam can be compiled, as torch's and DeepSpeed's own checks will see it."""
    from deepspeed.git_version_info import installed_ops

    if installed_ops.get("cpu_adam"):
        return []
    problems = []
    compiler = environ.get("CXX", "c++")
    if shutil.which(compiler, path=environ.get("PATH")) is None:
        problems.append(
            f"optimizer offload compiles DeepSpeed's CPUAdam, and the C++ compiler {compiler!r} is not "
            "there; install one (`apt-get install g++`) or name it in CXX"
        )
    if shutil.which("ninja", path=environ.get("PATH")) is None:
        problems.append("optimizer offload compiles DeepSpeed's CPUAdam with ninja; `pip install ninja`")
    if not on_cpu:
        problems += _cuda_problems(environ)
    return problems


def _cuda_problems(environ: Mapping[str, str]) -> list[str]:
    import torch
    from torch.utils.cpp_extension import CUDA_HOME

    if torch.version.cuda is None:
        return []
    if CUDA_HOME is None or not Path(CUDA_HOME, "bin", "nvcc").exists():
        return [
            f"optimizer offload compiles CPUAdam against CUDA, and there is no nvcc; install the CUDA "
            f"{torch.version.cuda} toolkit and point CUDA_HOME at it"
        ]
    if environ.get("DS_SKIP_CUDA_CHECK") == "1":
        return []
    from deepspeed.ops.op_builder.builder import assert_no_cuda_mismatch, installed_cuda_version

    try:
        assert_no_cuda_mismatch()
    except Exception:  # DeepSpeed's own exception class moves between versions
        found = ".".join(map(str, installed_cuda_version()))
        return [
            f"the CUDA toolkit at {CUDA_HOME} is {found}, but torch was built with {torch.version.cuda}; "
            "install the matching toolkit and point CUDA_HOME at it (DS_SKIP_CUDA_CHECK=1 goes on anyway)"
        ]
    return []


def _has_libaio() -> bool:
    """Whether a program against libaio compiles and links: DeepSpeed's own check."""
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder("AsyncIOBuilder")
    return builder is not None and builder.has_function("io_submit", ("aio",))


def nvme_path_problems(path: str) -> list[str]:
    """Whether NVMe offload can swap to this folder, which is created where its parent allows it."""
    mend = f"name a folder on a local disk in {NVME_PATH_VARIABLE}"
    if path == NVME_PATH and not Path(path).is_dir():
        return [f"NVMe offload has no folder to swap to ({path}, the preset's own, doesn't exist); {mend}"]
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        return [f"NVMe offload can't write to {path} ({error.strerror}); {mend}, or mend its rights"]
    return []


def nvme_space_problem(config: Mapping[str, Any], parameters: int) -> str | None:
    """Whether the swap folder has room for a model.

    Args:
        config: the DeepSpeed configuration.
        parameters: the parameters that this machine's processes hold together.

    Returns:
        One line, or None where there is room or no NVMe offload.
    """
    needed = parameters * NVME_BYTES_PER_PARAMETER
    for path in nvme_paths(config):
        free = shutil.disk_usage(path).free
        if free < needed:
            return (
                f"NVMe offload of {parameters:,} parameters needs {needed / 1e9:.1f} GB in {path} "
                f"({NVME_BYTES_PER_PARAMETER} bytes each), and {free / 1e9:.1f} GB are free; free some or "
                f"name another folder in {NVME_PATH_VARIABLE}"
            )
    return None


def stale_locks(operators: list[str]) -> list[str]:
    """Locks that a killed process left behind, which the next one waits for without end.

    torch takes the lock for every load, also where nothing is left to compile. Where the library is there
    the lock is removed, with a line in the log; else the problem is returned with the command that
    removes it, since another machine may compile into a shared home folder.
    """
    from torch.utils import cpp_extension

    problems = []
    for name in operators:
        lock = Path(cpp_extension._get_build_directory(name, verbose=False), "lock")
        try:
            age = time.time() - lock.stat().st_mtime
        except OSError:
            continue
        built = lock.with_name(f"{name}.so").exists()
        if age < (STALE_WHEN_BUILT_SECONDS if built else STALE_AFTER_SECONDS) or _held(lock):
            continue
        if built:
            lock.unlink(missing_ok=True)
            logger.warning("removed %s: a process that was killed %.0f s ago had left it", lock, age)
        else:
            problems.append(
                f"a compilation of DeepSpeed's {name} was interrupted {age / 60:.0f} minutes ago, and its "
                f"lock would be waited for without end; remove it: rm {lock}"
            )
    return problems


def _held(lock: Path) -> bool:
    """Whether a process of this machine has the lock open, as torch keeps it while it holds it."""
    import psutil

    for process in psutil.process_iter():
        try:
            if any(file.path == str(lock) for file in process.open_files()):
                return True
        except (psutil.Error, OSError):
            continue
    return False
