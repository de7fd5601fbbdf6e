"""What a person sees while it trains."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class BeforeFirstStep(TrainerCallback):
    """Calls `check` once the engine is up and before anything is trained."""

    def __init__(self, check: Callable[[], object]) -> None:
        """`check` raises what must stop the run."""
        self._check = check

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Runs the check."""
        self._check()


class ProgressBar(TrainerCallback):
    """A bar with loss, tokens a second, padding and time left; rank 0 only, and only on a terminal.

    Where the output is no terminal (a log file), one line is printed an evaluation and nothing else.
    """

    def __init__(self, counters: Any) -> None:
        """`counters` has `real_tokens` and `computed_tokens`, of all ranks so far (ints)."""
        self._counters = counters
        self._bar: tqdm | None = None
        self._started = 0.0
        self._loss: float | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Opens the bar."""
        self._started = time.perf_counter()
        if state.is_world_process_zero and sys.stderr.isatty() and not args.disable_tqdm:
            self._bar = tqdm(
                total=state.max_steps,
                initial=state.global_step,
                unit="step",
                dynamic_ncols=True,
                desc="training",
            )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Moves the bar by one optimizer step."""
        if self._bar is None:
            return
        real, computed = self._counters.real_tokens, self._counters.computed_tokens
        shown = {} if self._loss is None else {"loss": f"{self._loss:.4g}"}
        shown["tok/s"] = f"{real / max(time.perf_counter() - self._started, 1e-9):,.0f}"
        shown["padding"] = f"{1 - real / max(computed, 1):.1%}"
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update(state.global_step - self._bar.n)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Remembers the last loss for the bar."""
        if logs and "loss" in logs:
            self._loss = logs["loss"]

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Prints the scores of an evaluation on one line."""
        if not state.is_world_process_zero or not metrics:
            return
        technical = ("_runtime", "_per_second", "_preparation_time")
        scores = [
            f"{name} {value:.4g}"
            for name, value in metrics.items()
            if isinstance(value, (int, float)) and not name.endswith(technical) and name != "epoch"
        ]
        line = f"step {state.global_step}: " + ", ".join(scores)
        tqdm.write(line, file=sys.stderr)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Closes the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
