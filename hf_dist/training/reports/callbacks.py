"""What a person sees while it trains."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_dist.data.progress import duration
from hf_dist.training.reports.pace import Pace


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


class _Counters(Protocol):
    """Token counts of all ranks so far; to read one, the host waits for the device."""

    @property
    def real_tokens(self) -> int: ...

    @property
    def computed_tokens(self) -> int: ...


class TrainingProgress(TrainerCallback):
    """How far a training is: a bar on a terminal, else a line at each logged step; rank 0 only.

    The tokens a second are real ones, of all ranks, since the step that was logged before. An evaluation
    prints one line of scores in either case.
    """

    def __init__(self, counters: _Counters, clock: Callable[[], float] = time.perf_counter) -> None:
        """`counters` count the tokens; `clock` gives seconds."""
        self._counters = counters
        self._pace = Pace(clock)
        self._bar: tqdm | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Opens the bar, or says which steps are to come."""
        self._pace.start(state.global_step)
        if not state.is_world_process_zero:
            return
        if sys.stderr.isatty() and not args.disable_tqdm:
            self._bar = tqdm(
                total=state.max_steps,
                initial=state.global_step,
                unit="step",
                dynamic_ncols=True,
                desc="training",
            )
        elif state.global_step < state.max_steps:
            every = f", logged every {state.logging_steps:,}" if args.logging_strategy == "steps" else ""
            _print(f"training: steps {state.global_step + 1:,} to {state.max_steps:,}{every}")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Moves the bar by one optimizer step."""
        self._pace.trained()
        if self._bar is not None:
            self._bar.update(state.global_step - self._bar.n)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """What an epoch ends with is no training."""
        self._pace.trained()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Shows the figures of the steps since the last log."""
        if not state.is_world_process_zero or logs is None or "loss" not in logs:
            return
        real = self._counters.real_tokens
        rate = self._pace.log(state.global_step, real)
        if self._bar is not None:
            padding = 1 - real / max(self._counters.computed_tokens, 1)
            self._bar.set_postfix(
                {"loss": f"{logs['loss']:.4g}", "tok/s": f"{rate:,.0f}", "padding": f"{padding:.1%}"}
            )
            return
        step, last = state.global_step, state.max_steps
        left = self._pace.seconds_left(last - step, _due(args, state))
        _print(
            f"step {step:,}/{last:,} ({100 * step // last} %): loss {logs['loss']:#.4g}, "
            f"lr {logs['learning_rate']:.3g}, {rate:,.0f} tokens/s, {duration(left)} left"
        )

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Prints the scores of an evaluation on one line."""
        self._pace.pause("evaluation")
        if not state.is_world_process_zero or not metrics:
            return
        technical = ("_runtime", "_per_second", "_preparation_time")
        scores = [
            f"{name} {value:.4g}"
            for name, value in metrics.items()
            if isinstance(value, (int, float)) and not name.endswith(technical) and name != "epoch"
        ]
        _print(f"step {state.global_step:,}: " + ", ".join(scores))

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """A save is no training."""
        self._pace.pause("save")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Closes the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _print(line: str) -> None:
    """Prints above an open bar, if there is one."""
    tqdm.write(line, file=sys.stderr)


def _due(args: TrainingArguments, state: TrainerState) -> dict[str, int]:
    """Evaluations and saves still to come, the ones of the step that is being logged included."""
    return {
        "evaluation": _times_due(args.eval_strategy, state.eval_steps, state),
        "save": _times_due(args.save_strategy, state.save_steps, state),
    }


def _times_due(strategy: str, every: int, state: TrainerState) -> int:
    if strategy == "steps" and every > 0:
        # The last step has one as well.
        return math.ceil(state.max_steps / every) - (state.global_step - 1) // every
    if strategy == "epoch":
        # A stream has one epoch, and the Trainer (transformers 5.24) says that it has sys.maxsize.
        several = state.epoch is not None and state.num_train_epochs <= state.max_steps
        return math.ceil(state.num_train_epochs) - math.ceil(state.epoch or 0) + 1 if several else 1
    return 0
