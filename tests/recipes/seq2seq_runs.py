"""What the tests of both encoder-decoder recipes do: run one in this process, and read what it left."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import DataCollatorForSeq2Seq

from hf_dist.training.run.recipe import Recipe
from tests.launch import call, run
from tests.recipes import stock

# A copy task that a small model learns in a few steps: the answer is the first word.
WORDS = ("file", "socket", "thread", "class", "module", "string")
ROWS = [(f"{word} {other}", f"the {word}") for word in WORDS for other in WORDS] * 4

SHORT = (
    "--max_length=32",
    "--max_target_length=12",
    "--max_tokens_per_device=512",
    "--tokens_per_step=512",
    "--logging_steps=1",
    "--save_strategy=no",
    "--eval_strategy=no",
)


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def results(main: Callable[[], None], *flags: str, output_dir: Path) -> dict[str, Any]:
    """all_results.json of a run that must succeed."""
    assert call(main, *flags, f"--output_dir={output_dir}") == 0
    return json.loads((output_dir / "all_results.json").read_text())


def predictions(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]


def compare_with_stock(build: Callable[..., Recipe], folder: Path, **files: str) -> None:
    """Ten steps of the recipe with `--batching examples` give the stock Trainer's losses on the same rows."""
    stock.compare_with_stock(
        build,
        folder,
        collator=lambda recipe: DataCollatorForSeq2Seq(recipe.tokenizer, model=recipe.model),
        rows_per_step=8,
        max_target_length=16,
        **files,
    )


def two_processes_train_and_one_scores(
    recipe: str, main: Callable[[], None], flags: list[str], folder: Path, *, preset: str, scores: list[str]
) -> None:
    """Two processes train a few steps on a preset and evaluate; one process then scores what they saved."""
    steps = ("--do_train", "--do_eval", "--max_steps=3", "--learning_rate=1e-4", "--tokens_per_step=1024")
    two = run(recipe, *SHORT, *flags, *steps, f"--preset={preset}", output_dir=folder / "two", nproc=2)
    assert two["world_size"] == 2
    assert two["engine"] == ("ddp" if preset == "none" else f"deepspeed-{preset}")
    same = [flag for flag in flags if not flag.startswith(("--model_name_or_path", "--train_file"))]
    saved = f"--model_name_or_path={folder / 'two'}"
    # In other batches besides.
    one = results(
        main, *SHORT, *same, saved, "--do_eval", "--max_tokens_per_device=64", output_dir=folder / "one"
    )
    for name in scores:
        assert two[f"eval_{name}"] == pytest.approx(one[f"eval_{name}"], abs=1e-9), name
    assert two["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-5)
