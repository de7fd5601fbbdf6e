"""Summarize: a short text for a long one, by an encoder-decoder such as T5, BART or Pegasus.

On built-in data (functions of the standard library, and what each is called, takes and calls):

    accelerate launch recipes/summarization.py

On your own, with a model from the hub:

    accelerate launch recipes/summarization.py --model_name_or_path google-t5/t5-small
        --source_prefix "summarize: " --train_file train.jsonl --validation_file dev.jsonl
        --text_column article --summary_column highlights --max_tokens_per_device 16384
"""

from __future__ import annotations

from typing import Any

from hf_dist.recipes import FinishedRun, Recipe, RunConfig, assemble, make_config, run_recipe
from hf_dist.tasks.seq2seq.summarization import Summarization

DEFAULTS: dict[str, Any] = {
    "max_length": 64,
    "max_target_length": 32,
    # Small steps suit the small built-in data; on a GPU raise both (docs/batching.md).
    "max_tokens_per_device": 768,
    "tokens_per_step": 768,
    "learning_rate": 4e-3,
    "weight_decay": 0.01,
    "warmup_steps": 0.1,
    "num_train_epochs": 5.0,
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
    return assemble(Summarization, config or make_config(Summarization, DEFAULTS, **settings))


def main() -> None:
    """Runs the recipe from the command line."""
    run_recipe(Summarization, description=__doc__ or "", defaults=DEFAULTS)


if __name__ == "__main__":
    main()
