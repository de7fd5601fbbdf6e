"""What a run leaves for people: predictions, a model card, run.json, all_results.json and a table."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hf_dist.config import RunConfig
from hf_dist.training.run import output
from hf_dist.training.run.model_card import CARD_FILE, model_card
from hf_dist.training.steps.spec import RecipeTask

logger = logging.getLogger("hf_dist")

PREDICTIONS_FILE = "predictions.jsonl"


def write_predictions(task: RecipeTask, predictions: Sequence[Any], dataset: Any, output_dir: Path) -> None:
    """Writes predictions.jsonl: one line an input example, in the order of the input."""
    path = output_dir / PREDICTIONS_FILE
    with path.open("w", encoding="utf-8") as lines:
        for row, record in enumerate(task.records(predictions, dataset)):
            lines.write(json.dumps({"row": row, **record}, ensure_ascii=False) + "\n")
    logger.info("predictions: %s", path)


def write_results(
    task: RecipeTask,
    config: RunConfig,
    results: Mapping[str, Any],
    *,
    datasets: Mapping[str, Any],
    output_dir: Path,
    seed: int,
    trained: bool,
) -> None:
    """Writes run.json, the card of a model that was trained, and last all_results.json; prints the results.

    Args:
        task: Of the recipe.
        config: The resolved one.
        results: Scores and facts by name; `engine` and `world_size` are among them.
        datasets: Rows by split; the card says how many.
        output_dir: Folder of the run.
        seed: Of the run.
        trained: Whether the folder holds a model of this run.
    """
    output.write_run_file(
        output_dir,
        recipe=task.name,
        config=config,
        seed=seed,
        engine=results["engine"],
        world_size=results["world_size"],
    )
    if trained:
        _write_card(task, config, results, datasets, output_dir)
    output.write_json(output_dir / output.FINISHED_FILE, results)
    _print(results, output_dir)


def _write_card(
    task: RecipeTask,
    config: RunConfig,
    results: Mapping[str, Any],
    datasets: Mapping[str, Any],
    output_dir: Path,
) -> None:
    card = model_card(
        task=task.name,
        usage=task.usage(),
        config=config,
        rows={split: len(rows) for split, rows in datasets.items() if hasattr(rows, "__len__")},
        results=results,
        classes=getattr(task, "classes", ()),
        auto_class=task.auto_class.__name__,
    )
    (output_dir / CARD_FILE).write_text(card, encoding="utf-8")


def _print(results: Mapping[str, Any], output_dir: Path) -> None:
    table = Table(show_header=False, box=None)
    for name in sorted(name for name in results if not name.startswith("plan_")):
        value = results[name]
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    console = Console()
    console.print(table)
    console.print(f"results: {output_dir}", soft_wrap=True)
