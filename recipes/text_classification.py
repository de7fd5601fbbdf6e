"""Classify texts: single texts or pairs, one label each.

On built-in data (docstrings of the standard library, labelled with the module they come from):

    accelerate launch recipes/text_classification.py

On your own, with a model from the hub:

    accelerate launch recipes/text_classification.py --model_name_or_path distilbert-base-uncased
        --train_file train.csv --validation_file dev.csv --max_tokens_per_device 16384
"""

from __future__ import annotations

from typing import Any

from hf_dist.recipes import FinishedRun, Recipe, RunConfig, assemble, make_config, run_recipe
from hf_dist.tasks.text_classification.task import TextClassification

DEFAULTS: dict[str, Any] = {
    "max_length": 128,
    # Small steps suit the small built-in data; on a GPU raise both (docs/batching.md).
    "max_tokens_per_device": 512,
    "tokens_per_step": 1024,
    "learning_rate": 1e-3,
    "weight_decay": 0.01,
    "warmup_steps": 0.1,
    "num_train_epochs": 6.0,
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "save_total_limit": 2,
}


def build(config: RunConfig | None = None, **settings: Any) -> Recipe | FinishedRun:
    """Builds the recipe without running it: `build(max_steps=50).run()`.

    Args:
        config: A whole config, as `hf_dist.training.flags.parsing.parse` makes it.
        **settings: Instead of one, flags by their flat names, over this recipe's defaults.

    Raises:
        HfDistError: For settings or data that can't be trained on.
    """
    return assemble(TextClassification, config or make_config(TextClassification, DEFAULTS, **settings))


def main() -> None:
    """Runs the recipe from the command line."""
    run_recipe(TextClassification, description=__doc__ or "", defaults=DEFAULTS)


if __name__ == "__main__":
    main()
