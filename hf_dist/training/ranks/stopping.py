"""Stopping on purpose: a signal ends the run behind a whole step, a loss that is no number ends it at once.

Whether to stop is agreed on by all ranks in the reduction that every step makes anyway (the items of the
step), so that all of them stop behind the same step and none waits for the others.
"""

from __future__ import annotations

import logging
import math
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_dist.config import OnNaN
from hf_dist.data.device import to_device
from hf_dist.errors import HfDistError

logger = logging.getLogger("hf_dist")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class NotFiniteError(HfDistError):
    """The loss became NaN or infinite."""


class Interrupted(SystemExit):
    """A signal ended the run behind a whole step; the exit status is 128 + its number, as shells have it."""

    def __init__(self, number: int, step: int, output_dir: Path) -> None:
        super().__init__(128 + number)
        name = signal.Signals(number).name
        logger.warning(
            "%s: stopped behind step %d and saved; the same command goes on from there (%s)",
            name,
            step,
            output_dir,
        )


class Stopping:
    """Why this run should stop: a signal to any rank, or a loss of any rank that is no number.

    Attributes:
        signal: Number of the signal that the ranks agreed to stop for.
        skipped: Steps left out because of a gradient that is no number.
    """

    def __init__(self, on_nan: OnNaN) -> None:
        self.signal: int | None = None
        self.skipped = 0
        self._on_nan = on_nan
        self._came: int | None = None
        self._before: dict[int, Any] = {}
        self._bad: Tensor | None = None
        self._agreed: Tensor | None = None
        self._copied: Any = None
        self._nan = False

    # ---- Signals ----

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Takes over SIGTERM and SIGINT: the first is remembered, a second ends the process at once."""
        try:
            for listened in _SIGNALS:
                self._before[listened] = signal.signal(listened, self._note)
        except ValueError:
            # Not the main thread: whoever started it has the signals.
            self._before.clear()
        try:
            yield
        finally:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._came is not None:
            os._exit(128 + number)
        self._came = number

    # ---- Losses ----

    def watch(self, loss: Tensor) -> None:
        """Remembers, without waiting for the device, whether a loss is no number."""
        bad = ~torch.isfinite(loss.detach()).reshape(())
        self._bad = bad if self._bad is None else self._bad | bad

    def skips(self, norm: Any, *, half: bool) -> bool:
        """Whether this step's update is left out; in fp16 an infinite gradient is the scaler's affair."""
        if self._on_nan != "skip" or norm is None:
            return False
        value = float(norm)
        if not (math.isnan(value) or (math.isinf(value) and not half)):
            return False
        self.skipped += 1
        logger.warning("the gradient is %s: this step's update is left out (%d so far)", value, self.skipped)
        return True

    # ---- Agreement ----

    def flags(self, device: torch.device, counts: Sequence[int] = ()) -> Tensor:
        """What a rank brings to the step's reduction, in one copy to the device.

        Args:
            device: Where it is reduced.
            counts: What else is summed up over the ranks.

        Returns:
            (counts + 3,) int64: the counts, SIGTERM came, SIGINT came, a loss was no number since the last
            call.
        """
        came = [int(self._came == number) for number in _SIGNALS]
        bad = torch.zeros((), dtype=torch.int64, device=device)
        if self._bad is not None and self._on_nan == "stop":
            bad = self._bad.to(device=device, dtype=torch.int64)
        self._bad = None
        known = to_device(torch.tensor([*counts, *came], dtype=torch.int64), device)
        return torch.cat([known, bad[None]])

    def agree(self, total: Tensor) -> None:
        """Takes the sum of the flags over the ranks; it is read once the step is done."""
        if self._agreed is not None:
            self._read()
        self._agreed = total.to("cpu", non_blocking=True)
        if total.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def _read(self) -> None:
        if self._agreed is None:
            return
        if self._copied is not None:
            self._copied.synchronize()
        *signals, bad = self._agreed.tolist()
        self._agreed = None
        self._nan = self._nan or bool(bad)
        for number, count in zip(_SIGNALS, signals, strict=True):
            if count and self.signal is None:
                self.signal = int(number)

    def refuse(self, step: int) -> None:
        """Reads what was agreed on.

        Raises:
            NotFiniteError: If a loss of any rank was no number.
        """
        self._read()
        if self._nan:
            raise NotFiniteError(
                f"the loss was NaN or infinite at or before step {step}; nothing was saved since: lower "
                "--learning_rate, set --max_grad_norm, look at the rows of that step (--dump_batches), or "
                "leave such steps out with --on_nan skip; the next start goes on from the last checkpoint"
            )


class StopBehindStep(TrainerCallback):
    """Ends the training behind the step in which the ranks agreed to stop: saved, not evaluated."""

    def __init__(self, stopping: Stopping) -> None:
        """`stopping` holds what all ranks agreed on."""
        self._stopping = stopping

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Asks for a checkpoint and for the end.

        Raises:
            NotFiniteError: If a loss of any rank was no number.
        """
        self._stopping.refuse(state.global_step)
        if self._stopping.signal is not None:
            control.should_save = True
            control.should_training_stop = True
            control.should_evaluate = False

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """The end of an epoch would evaluate and save as well; the step before it has saved."""
        if self._stopping.signal is not None:
            control.should_evaluate = False
            control.should_save = False
