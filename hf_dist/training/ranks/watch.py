"""Ranks that watch each other: one that dies, freezes or hangs ends the job with its name and the last step.

Without it the others wait silently in a collective call until the backend's time-out (half an hour by
default). A thread of each rank writes a beat to a small store (torch's TCPStore on rank 0) and reads that of
the next rank. The beats say two things: that the process lives, and how far its work is.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback

from hf_dist.errors import EngineError
from hf_dist.training.ranks.gather import on_main

logger = logging.getLogger("hf_dist")

_BEAT_SECONDS = 1.0
# A thread may be held up for a while (a large unpickling); from here on it is worth a word.
_WORD_SECONDS = 10.0
# Time that the other ranks have to write where they stand.
_ANSWER_SECONDS = 3.0
_CONNECT_SECONDS = 30.0
_FAULT = "fault"
# Files whose functions wait for the other ranks.
_WAITING = ("torch/distributed/", "deepspeed/comm/", "autograd/graph.py", "accelerate/utils/operations.py")


@dataclass
class _Beat:
    """What the next rank said last, and when that was on this rank's clock."""

    text: str = ""
    since: float = 0.0


class Progress(TrainerCallback):
    """Counts every sign of work; a callback, so that it sees steps, micro-batches and evaluation alike."""

    def __init__(self) -> None:
        self.step = 0
        self.count = 0

    def _note(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.step = state.global_step
        self.count += 1

    on_train_begin = on_epoch_begin = on_step_begin = on_substep_end = on_step_end = _note
    on_prediction_step = on_evaluate = on_save = on_log = _note


class Watch:
    """Watches the next rank from a thread of its own.

    Args:
        store: What the ranks write to; its server is on rank 0.
        progress: How far this rank is.
        rank_timeout: Seconds without a beat after which a rank counts as dead.
        hang_timeout: Seconds without any progress after which the job counts as hanging.
    """

    def __init__(
        self, store: dist.TCPStore, progress: Progress, *, rank_timeout: float, hang_timeout: float
    ) -> None:
        self._progress = progress
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._rank_timeout, self._hang_timeout = rank_timeout, hang_timeout
        # Known before the first beat, and also when the store has gone with rank 0.
        self._hosts: list[str] = [""] * self._world
        dist.all_gather_object(self._hosts, socket.gethostname())
        self._main = threading.main_thread().ident
        self._ends = threading.Event()
        self._store = store
        self._thread = threading.Thread(target=self._run, name="hf_dist-watch", daemon=True)
        self._thread.start()

    # ---- The thread ----

    def _run(self) -> None:
        neighbour = (self._rank + 1) % self._world
        seen = _Beat(since=time.monotonic())
        moved = (-1, time.monotonic())
        while not self._ends.wait(_BEAT_SECONDS):
            try:
                moved = self._beat(moved)
                self._look(neighbour, seen)
                if self._store.check([_FAULT]):
                    self._end(self._store.get(_FAULT).decode(), found_here=False)
            except (RuntimeError, OSError, ValueError) as error:
                if not self._ends.is_set():
                    self._lost_store(error)
                return

    def _beat(self, moved: tuple[int, float]) -> tuple[int, float]:
        now = time.monotonic()
        if self._progress.count != moved[0]:
            moved = (self._progress.count, now)
        beat = {"time": now, "step": self._progress.step}
        self._store.set(f"beat/{self._rank}", json.dumps(beat))
        if now - moved[1] > self._hang_timeout:
            self._hangs()
        return moved

    def _look(self, neighbour: int, seen: _Beat) -> None:
        key = f"beat/{neighbour}"
        text = self._store.get(key).decode() if self._store.check([key]) else ""
        now = time.monotonic()
        if text != seen.text:
            seen.text, seen.since = text, now
            return
        silent = now - seen.since
        if silent < min(_WORD_SECONDS, self._rank_timeout):
            return
        beat = json.loads(text) if text else {}
        name = f"rank {neighbour} on {self._hosts[neighbour]}"
        # The ranks work in step, and the last beat may be older than this rank's last step.
        behind = f"behind step {max(beat.get('step', 0), self._progress.step)}"
        if silent > self._rank_timeout:
            self._fail(
                f"{name} has not answered for {silent:.0f} s, {behind}: its process died or is frozen; look "
                "at its log and its host (memory?), then start again with the same command: it goes on from "
                "the last checkpoint"
            )
        elif silent - _BEAT_SECONDS < _WORD_SECONDS:
            logger.warning("%s has not answered for %.0f s, %s", name, silent, behind)

    def _hangs(self) -> None:
        """Finds out which rank does not wait for the others, and says so."""
        place, waits = self._place()
        mine = f"rank {self._rank} on {self._hosts[self._rank]} {'waits' if waits else 'stands'} in {place}"
        self._store.set(f"place/{self._rank}", json.dumps([mine, waits]))
        time.sleep(_ANSWER_SECONDS)
        said = []
        for rank in range(self._world):
            if self._store.check([f"place/{rank}"]):
                said.append(json.loads(self._store.get(f"place/{rank}")))
        # Those in a collective call wait for those that are not.
        stuck = [words for words, waiting in said if not waiting] or [words for words, _ in said]
        self._fail(
            f"no progress for {self._hang_timeout:.0f} s behind step {self._progress.step}: "
            f"{'; '.join(stuck[:8])}; if steps or saves take that long, raise --hang_timeout_seconds"
        )

    def _place(self) -> tuple[str, bool]:
        """Where the main thread stands, and whether that is in a call that waits for other ranks."""
        frame = sys._current_frames().get(self._main or 0)
        innermost = frame
        waits = False
        while frame is not None:
            waits = waits or any(part in frame.f_code.co_filename for part in _WAITING)
            frame = frame.f_back
        if innermost is None:
            return "an unknown place", False
        code = innermost.f_code
        return f"{code.co_name} ({os.path.basename(code.co_filename)}:{innermost.f_lineno})", waits

    def _fail(self, message: str) -> None:
        """Tells all ranks; the first message counts."""
        first = self._store.compare_set(_FAULT, "", message).decode()
        self._end(first or message, found_here=True)

    def _lost_store(self, error: Exception) -> None:
        # A job that ends on purpose, or whose launcher does, is over before this.
        if self._ends.wait(min(self._rank_timeout, 2 * _WORD_SECONDS)):
            return
        if self._rank == 1:
            _say(
                f"rank 0 on {self._hosts[0]} is gone, behind step {self._progress.step}: its process died; "
                "look at its log and its host, then start again with the same command "
                f"({type(error).__name__})"
            )
        os._exit(2)

    def _end(self, message: str, *, found_here: bool) -> None:
        """Ends this process: its main thread waits in a call that can't be interrupted."""
        if self._rank == 0 or (found_here and self._main_is_silent()):
            _say(message)
            # The store goes with rank 0: the others read there first why this ends.
            time.sleep(_ANSWER_SECONDS)
        os._exit(2)

    def _main_is_silent(self) -> bool:
        """Whether rank 0, which speaks for all, does not; its store is gone once it has."""
        end = time.monotonic() + _WORD_SECONDS
        try:
            while time.monotonic() < end:
                self._store.check([_FAULT])
                time.sleep(_BEAT_SECONDS)
        except (RuntimeError, OSError):
            return False
        return True

    # ---- The main thread ----

    def find_lost_rank(self) -> None:
        """Gives the thread a moment to end it all by name, once the connection to another rank broke."""
        self._rank_timeout = _ANSWER_SECONDS
        if threading.current_thread() is threading.main_thread():
            # A launcher ends the other ranks at once; it gives them longer than this takes.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._thread.join(timeout=3 * _WORD_SECONDS)

    def stop(self) -> None:
        """Ends the watch; all ranks call it at the end of their work."""
        dist.barrier()
        self._ends.set()
        self._thread.join(timeout=5)


def _say(message: str) -> None:
    print(f"error: {message}", file=sys.stderr, flush=True)


def _is_lost_connection(error: RuntimeError) -> bool:
    """Whether a collective call failed since another rank is gone."""
    words = ("Connection closed by peer", "Connection reset", "Broken pipe", "remote process exited")
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)


def _connect() -> dist.TCPStore | None:
    """A store that all ranks reach; None if one of them can't."""
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    patience = timedelta(seconds=_CONNECT_SECONDS)
    found: list[dist.TCPStore] = []

    def serve() -> int:
        # Port 0: the system picks a free one.
        found.append(dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=patience))
        return int(found[0].port)

    port = on_main(serve)
    problem = None
    if not found:
        try:
            found.append(dist.TCPStore(address, port, is_master=False, timeout=patience))
        except RuntimeError as error:
            problem = f"{socket.gethostname()}: {str(error).splitlines()[0]}"
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    if not any(problems):
        return found[0]
    logger.warning(
        "ranks that die or hang won't be named: port %d of %s can't be reached from everywhere (%s)",
        port,
        address,
        next(filter(None, problems)),
    )
    return None


@contextmanager
def watching(progress: Progress, *, rank_timeout: float, hang_timeout: float) -> Iterator[None]:
    """Watches the other ranks inside the block; a single process has nobody to watch.

    Raises:
        EngineError: If the connection to another rank broke and it isn't known to which.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        yield
        return
    store = _connect()
    if store is None:
        yield
        return
    watch = Watch(store, progress, rank_timeout=rank_timeout, hang_timeout=hang_timeout)
    try:
        yield
    except RuntimeError as error:
        if not _is_lost_connection(error):
            raise
        watch.find_lost_rank()
        raise EngineError(
            f"the connection to another rank broke behind step {progress.step}: its process died; look at "
            "the launcher's report and start again with the same command"
        ) from error
    # Behind an error the ranks don't meet again: the process ends, and the thread with it.
    watch.stop()
