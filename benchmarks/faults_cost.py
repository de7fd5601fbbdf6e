"""What a save costs, and what going on costs at different steps of an epoch: the last part of `faults.py`."""

from __future__ import annotations

import json
import random
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

from common import Results
from transformers import Trainer, TrainerCallback

from hf_dist.training.checkpoints import files
from hf_dist.training.checkpoints.saving import SavingTrainer
from recipes.text_classification import build


def cost(results: Results, home: Path, *, quick: bool) -> None:
    """A save beside the stock Trainer's, and the time to go on at step 10 and at step 10,000."""
    rows_file = home / "many.jsonl"
    with rows_file.open("w") as lines:
        chosen = random.Random(1)
        for number in range(22_000):
            text = " ".join(chosen.choice(("red", "green", "blue", "old", "new")) for _ in range(12))
            lines.write(json.dumps({"text": f"{text} {number}", "label": "ab"[number % 2]}) + "\n")
    data = {"train_file": str(rows_file), "validation_fraction": 0.01, "max_length": 64}
    steps = {"max_tokens_per_device": 64, "tokens_per_step": 64, "window": 64}
    common: dict[str, Any] = {**data, **steps, "save_strategy": "no", "eval_strategy": "no", "do_train": True}
    first = build(**common, max_steps=10, output_dir=str(home / "cost"))
    first.trainer.args.save_strategy = "no"
    first.trainer.train()
    ours, stock = [], []
    for _ in range(3 if quick else 7):
        for times, save in ((ours, SavingTrainer._save_checkpoint), (stock, Trainer._save_checkpoint)):
            shutil.rmtree(home / "cost" / "checkpoint-10", ignore_errors=True)
            began = time.perf_counter()
            save(first.trainer, first.trainer.model, None)
            times.append(time.perf_counter() - began)
        # What the last round left is the stock one: ours is what is resumed from.
    shutil.rmtree(home / "cost" / "checkpoint-10")
    SavingTrainer._save_checkpoint(first.trainer, first.trainer.model, None)
    first.lock.release()
    a_step = _seconds_to_first_step(common, home / "cost" / "checkpoint-10", home / "r0", 11)
    at = {}
    for step in (10, 10_000):
        source = home / "cost" / f"checkpoint-{step}"
        if step != 10:
            # The state of step 10 under the number of a later one: the time to get there is all that counts.
            shutil.copytree(home / "cost" / "checkpoint-10", source)
            state = json.loads((source / "trainer_state.json").read_text())
            state["global_step"] = step
            (source / "trainer_state.json").write_text(json.dumps(state))
            facts = {**files.facts_of(source), "step": step}
            (source / files.MANIFEST).unlink()
            files.seal(source, facts)
        at[step] = statistics.median(
            _seconds_to_first_step(common, source, home / f"r{step}-{number}", step + 1)
            for number in range(2 if quick else 5)
        )
    median_ours, median_stock = statistics.median(ours), statistics.median(stock)
    results.table(
        "cost",
        ["what", "seconds"],
        [
            ["a save, stock Trainer", median_stock],
            ["a save, ours (flushed, digests, renamed)", median_ours],
            ["resume at step 10 of an epoch, to the first step", at[10]],
            ["resume at step 10,000 of the epoch, to the first step", at[10_000]],
            ["(the first of them, which warms up)", a_step],
        ],
    )
    # Flushing to the disk is the price of a checkpoint that outlives a power cut.
    results.at_most("a save, times the stock Trainer's", median_ours / median_stock, 6)
    results.at_most("resume at step 10,000, times that at step 10", at[10_000] / at[10], 1.25)


def _seconds_to_first_step(common: dict[str, Any], checkpoint: Path, output: Path, last: int) -> float:
    class First(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.at = time.perf_counter()

    recipe = build(**common, max_steps=last, resume=str(checkpoint), output_dir=str(output))
    clock = First()
    recipe.trainer.add_callback(clock)
    began = time.perf_counter()
    recipe.trainer.train(resume_from_checkpoint=str(checkpoint))
    recipe.lock.release()
    return clock.at - began
