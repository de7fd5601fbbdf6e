"""Translate: the same text in another language, by an encoder-decoder such as T5, Marian, mBART or NLLB.

On built-in data (statements of the standard library's source, and the same in English words):

    accelerate launch recipes/translation.py

On your own, with a model from the hub:

    accelerate launch recipes/translation.py --model_name_or_path google-t5/t5-small
        --source_lang en --target_lang de --source_prefix "translate English to German: "
        --train_file train.jsonl --validation_file dev.jsonl --max_tokens_per_device 16384
"""

from __future__ import annotations

from typing import Any

from hf_dist.recipes import FinishedRun, Recipe, RunConfig, assemble, make_config, run_recipe
from hf_dist.tasks.seq2seq.translation import Translation

DEFAULTS: dict[str, Any] = {
    "max_length": 32,
    "max_target_length": 32,
    # Small steps suit the small built-in data; on a GPU raise both (docs/batching.md).
    "max_tokens_per_device": 1024,
    "tokens_per_step": 1024,
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
    return assemble(Translation, config or make_config(Translation, DEFAULTS, **settings))


def main() -> None:
    """Runs the recipe from the command line."""
    run_recipe(Translation, description=__doc__ or "", defaults=DEFAULTS)


if __name__ == "__main__":
    main()
