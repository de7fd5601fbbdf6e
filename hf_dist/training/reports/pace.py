"""How fast a run trains and how long it will still take, by the clock of the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

# Weight of the newest interval in the seconds that a step takes: the first ones, in which memory is
# allocated and graphs are compiled, are forgotten after a few.
_NEWEST = 0.3


@dataclass
class _Pauses:
    count: int = 0
    seconds: float = 0.0


class Pace:
    """Times the intervals between two logged steps.

    Evaluations and saves are pauses: they count in no interval, and in the time left as often as they are
    still due. Before the first of a kind its length is unknown, and it is left out.

    Args:
        clock: Seconds, as `time.perf_counter` gives them.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._pauses: dict[str, _Pauses] = {}
        self._seconds_per_step: float | None = None
        self.start(0)

    def start(self, step: int) -> None:
        """A training begins behind optimizer step `step`: another one than 0 where it is resumed."""
        self._step, self._tokens = step, 0
        self._since = self._trained_until = self._clock()
        self._seconds_per_step = None
        self._pauses = {}

    def trained(self) -> None:
        """A step is done: what comes until the next `pause` may be one."""
        self._trained_until = self._clock()

    def pause(self, kind: str) -> None:
        """An evaluation or a save has ended, which began when the last step, log or pause did end."""
        now = self._clock()
        seconds = now - self._trained_until
        pauses = self._pauses.setdefault(kind, _Pauses())
        pauses.count += 1
        pauses.seconds += seconds
        # The interval began as much later.
        self._since += seconds
        self._trained_until = now

    def log(self, step: int, tokens: int) -> float:
        """Ends the interval at a step that is logged, and begins the next one.

        Args:
            step: The step.
            tokens: Tokens trained since `start`.

        Returns:
            Tokens a second of the interval, pauses left out.
        """
        now = self._clock()
        seconds = max(now - self._since, 1e-9)
        newest = seconds / max(step - self._step, 1)
        before = self._seconds_per_step
        self._seconds_per_step = newest if before is None else before + _NEWEST * (newest - before)
        rate = (tokens - self._tokens) / seconds
        self._step, self._tokens = step, tokens
        self._since = self._trained_until = now
        return rate

    def seconds_left(self, steps: int, due: Mapping[str, int]) -> float:
        """What `steps` more steps will take, with so many pauses of each kind still due."""
        paused = sum(
            count * self._pauses[kind].seconds / self._pauses[kind].count
            for kind, count in due.items()
            if kind in self._pauses
        )
        return steps * (self._seconds_per_step or 0.0) + paused
