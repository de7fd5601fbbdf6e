"""Runs of a small recipe that `faults.py` kills: real processes, forked from one that has imported it all.

A fork saves the ten seconds of imports that a start of the recipe costs; what runs in it is the recipe's
`main`.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hf_dist.training.run import building
from hf_dist.training.run.trainer import ExactTrainer
from recipes import text_classification

PHASES = ("start", "step", "save", "evaluation", "end")
FLAGS = (
    "--max_train_samples=300",
    "--max_eval_samples=60",
    "--max_length=32",
    "--max_tokens_per_device=512",
    "--tokens_per_step=1024",
    "--max_steps=24",
    "--save_strategy=steps",
    "--save_steps=4",
    "--eval_strategy=steps",
    "--eval_steps=6",
    "--logging_steps=1",
    "--save_total_limit=3",
    "--rank_timeout_seconds=5",
)


class Moment:
    """What a run is doing, seen from the process that will kill it: rank 0 writes, the parent reads."""

    def __init__(self) -> None:
        self._phase = multiprocessing.RawValue(ctypes.c_int, 0)
        self._count = multiprocessing.RawValue(ctypes.c_int, 0)

    def enter(self, phase: str) -> None:
        """Says that the run has come to a phase."""
        self._phase.value = PHASES.index(phase)
        self._count.value += 1

    @property
    def phase(self) -> str:
        """The phase that the run is in."""
        return PHASES[self._phase.value]

    @property
    def count(self) -> int:
        """How many phases it has come to."""
        return self._count.value


def _watched(moment: Moment, on_step: Callable[[ExactTrainer], None] | None) -> type[ExactTrainer]:
    class Watched(ExactTrainer):
        def training_step(self, *arguments, **named):
            moment.enter("step")
            if on_step is not None:
                on_step(self)
            return super().training_step(*arguments, **named)

        def _save_checkpoint(self, *arguments, **named):
            moment.enter("save")
            super()._save_checkpoint(*arguments, **named)
            moment.enter("step")

        def evaluation_loop(self, *arguments, **named):
            moment.enter("evaluation")
            return super().evaluation_loop(*arguments, **named)

        def save_model(self, *arguments, **named):
            if not self.is_in_train:
                moment.enter("end")
            super().save_model(*arguments, **named)

    return Watched


@dataclass
class Run:
    """A started run: one process a rank."""

    pids: list[int]
    moment: Moment
    log: Path

    def kill(self, number: int = signal.SIGKILL, ranks: Sequence[int] | None = None) -> None:
        """Sends a signal to the processes of these ranks (default: all)."""
        for rank in range(len(self.pids)) if ranks is None else ranks:
            try:
                os.kill(self.pids[rank], number)
            except ProcessLookupError:
                continue

    def wait(self, seconds: float = 300) -> list[int]:
        """Waits for all processes; exit statuses by rank (minus the signal's number where one ended it)."""
        end = time.monotonic() + seconds
        codes: dict[int, int] = {}
        while len(codes) < len(self.pids):
            for rank, pid in enumerate(self.pids):
                if rank in codes:
                    continue
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[rank] = os.waitstatus_to_exitcode(status)
            if time.monotonic() > end:
                self.kill()
                end = float("inf")
            time.sleep(0.01)
        return [codes[rank] for rank in range(len(self.pids))]


def start(
    folder: Path,
    *flags: str,
    processes: int = 1,
    preset: str = "none",
    on_step: Callable[[ExactTrainer], None] | None = None,
) -> Run:
    """Starts the recipe in forked processes; their output goes to `<folder>.log`."""
    moment = Moment()
    log = folder.with_name(folder.name + ".log")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    pids = []
    sys.stdout.flush()
    sys.stderr.flush()
    for rank in range(processes):
        pid = os.fork()
        if pid == 0:
            _child(rank, processes, port, moment, on_step, log, [*FLAGS, *flags], folder, preset)
        pids.append(pid)
    return Run(pids, moment, log)


def _child(
    rank: int,
    processes: int,
    port: int,
    moment: Moment,
    on_step: Callable[[ExactTrainer], None] | None,
    log: Path,
    flags: list[str],
    folder: Path,
    preset: str,
) -> None:
    code = 1
    try:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        if processes > 1:
            os.environ.update(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(processes),
                LOCAL_WORLD_SIZE=str(processes),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            )
        torch.set_num_threads(1)
        building.ExactTrainer = _watched(moment if rank == 0 else Moment(), on_step)
        sys.argv = ["text_classification", *flags, f"--output_dir={folder}", f"--preset={preset}"]
        text_classification.main()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def kill_at_random(run: Run, chosen: random.Random, phase: str, ranks: Sequence[int] | None) -> str | None:
    """Waits until the run is in a phase, for the n-th time, and kills it somewhere inside.

    Returns:
        The phase it was killed in; None if it ended before.
    """
    wanted = chosen.randrange(1, 4) if phase in ("save", "evaluation") else chosen.randrange(1, 12)
    seen, count = 0, -1
    while seen < wanted:
        if run.moment.count != count:
            count = run.moment.count
            seen += run.moment.phase == phase
        # Without taking its status away from `wait`.
        if os.waitid(os.P_PID, run.pids[0], os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return None
        time.sleep(0.0005)
    # A step, a save and an evaluation of this recipe take 20 to 100 ms.
    time.sleep(chosen.random() * 0.06)
    struck = run.moment.phase
    run.kill(ranks=ranks)
    return struck
