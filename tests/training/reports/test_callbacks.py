"""The lines of a training without a terminal, by a clock that is set by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from hf_dist.config import RunConfig
from hf_dist.data.progress import duration
from hf_dist.training.reports.callbacks import TrainingProgress
from hf_dist.training.steps.plan import default_logging_steps, with_logging_steps


class Run:
    """A training of which only the clock is real: steps, logs and pauses as the Trainer calls them."""

    def __init__(self, folder, state: dict, **arguments) -> None:
        self.now = 1000.0
        self.counters = SimpleNamespace(real_tokens=0, computed_tokens=0)
        self.args = TrainingArguments(output_dir=str(folder), use_cpu=True, **arguments)
        self.state = TrainerState(**{"is_world_process_zero": True, **state})
        self.shown = TrainingProgress(self.counters, clock=lambda: self.now)
        self._call("on_train_begin")

    def _call(self, event: str, **more) -> None:
        getattr(self.shown, event)(self.args, self.state, TrainerControl(), **more)

    def train(self, steps: int, *, seconds: float, tokens: int, epochs: float = 0.0) -> None:
        """Trains steps of so many seconds and tokens each, and logs the last."""
        for _ in range(steps):
            self.now += seconds
            self.counters.real_tokens += tokens
            self.state.global_step += 1
            self._call("on_step_end")
        self.state.epoch = (self.state.epoch or 0.0) + epochs
        self._call("on_log", logs={"loss": 1.5, "learning_rate": 1e-4})

    def pause(self, event: str, seconds: float) -> None:
        self.now += seconds
        self._call(event)


def lines(capsys) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_a_resumed_run_with_evaluations(tmp_path, capsys):
    state = {"global_step": 40, "max_steps": 100, "logging_steps": 10, "eval_steps": 20}
    run = Run(tmp_path, state, eval_strategy="steps", eval_steps=20, save_strategy="no", logging_steps=10)
    run.train(10, seconds=1, tokens=500)
    run.train(10, seconds=1, tokens=1000)
    run.pause("on_evaluate", 30)
    run.train(10, seconds=1, tokens=500)
    run.train(10, seconds=3, tokens=600)
    assert lines(capsys) == [
        "training: steps 41 to 100, logged every 10",
        "step 50/100 (50 %): loss 1.500, lr 0.0001, 500 tokens/s, 50 s left",
        # What an evaluation takes is not known yet.
        "step 60/100 (60 %): loss 1.500, lr 0.0001, 1,000 tokens/s, 40 s left",
        # 30 steps and the evaluations of steps 80 and 100; that of step 60 is not in the tokens a second.
        "step 70/100 (70 %): loss 1.500, lr 0.0001, 500 tokens/s, 90 s left",
        # 20 steps of 1 + 0.3 x (3 - 1) s, and two evaluations.
        "step 80/100 (80 %): loss 1.500, lr 0.0001, 200 tokens/s, 92 s left",
    ]


def test_saves_and_evaluations_of_epochs(tmp_path, capsys):
    state = {"max_steps": 30, "logging_steps": 5, "num_train_epochs": 3, "save_steps": 500}
    run = Run(tmp_path, state, eval_strategy="epoch", save_strategy="epoch", logging_strategy="epoch")
    run.train(5, seconds=2, tokens=10, epochs=0.5)
    run.train(5, seconds=2, tokens=10, epochs=0.5)
    run.pause("on_evaluate", 7)
    run.pause("on_save", 1)
    run.train(5, seconds=2, tokens=10, epochs=0.5)
    run.train(15, seconds=2, tokens=10, epochs=1.5)
    # The last line stands before the last evaluation and the last save: 7 s and 1 s.
    left = ["50 s", "40 s", "46 s", "8 s"]
    assert [line.split(", ")[-1] for line in lines(capsys)[1:]] == [f"{time} left" for time in left]


def test_a_stream_has_no_number_of_epochs(tmp_path, capsys):
    state = {"max_steps": 10, "logging_steps": 5, "num_train_epochs": 2**63 - 1}
    run = Run(tmp_path, state, eval_strategy="epoch", save_strategy="no")
    run.pause("on_evaluate", 4)
    run.train(5, seconds=1, tokens=10)
    assert lines(capsys)[-1].endswith("10 tokens/s, 9 s left")


def test_other_ranks_are_silent(tmp_path, capsys):
    run = Run(tmp_path, {"max_steps": 5, "logging_steps": 1, "is_world_process_zero": False})
    run.train(5, seconds=1, tokens=10)
    assert lines(capsys) == []


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.2, "0 s"), (99, "99 s"), (100, "2 min"), (5400, "90 min"), (6000, "1.7 h"), (360000, "100.0 h")],
)
def test_durations(seconds, shown):
    assert duration(seconds) == shown


def test_the_default_gives_20_to_50_lines():
    for steps in (*range(1, 3000), 10**4, 123_456, 10**6 + 1, 10**9):
        every = default_logging_steps(steps)
        assert steps // every == steps if steps < 20 else 20 <= steps // every <= 50
        assert str(every).rstrip("0") in ("1", "2", "5")


@pytest.mark.parametrize("steps", [30, 700, 9_000, 20_000])
def test_saves_of_the_best_fall_on_evaluations_that_come_with_the_log(steps, tmp_path):
    asked = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"}
    found = with_logging_steps(RunConfig(training_arguments=asked), steps).training_arguments
    # transformers refuses what is no multiple.
    taken = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **found)
    assert taken.save_steps % taken.eval_steps == 0 and 500 <= taken.save_steps < 1000
