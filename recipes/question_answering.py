"""Find the span of a text that answers a question, or that it has no answer (SQuAD 1 and 2).

On built-in data (what methods of the standard library do, and where and whose they are):

    accelerate launch recipes/question_answering.py

On your own, with a model from the hub:

    accelerate launch recipes/question_answering.py --model_name_or_path distilbert-base-uncased
        --train_file train-v2.0.json --validation_file dev-v2.0.json --max_length 384 --doc_stride 128
        --max_question_tokens 64 --max_tokens_per_device 16384
"""

from __future__ import annotations

from typing import Any

from hf_dist.recipes import FinishedRun, Recipe, RunConfig, assemble, make_config, run_recipe
from hf_dist.tasks.question_answering.task import QuestionAnswering

DEFAULTS: dict[str, Any] = {
    "max_length": 128,
    "max_question_tokens": 32,
    "doc_stride": 48,
    # Small steps suit the small built-in data; on a GPU raise both (docs/batching.md).
    "max_tokens_per_device": 512,
    "tokens_per_step": 1024,
    "learning_rate": 2e-3,
    # BERT's own. A shift of all logits changes nothing, so the head's bias has only rounding errors as its
    # gradient; with 1e-8 Adam makes whole steps of them, and two engines end at other (equally good) weights.
    "adam_epsilon": 1e-6,
    "weight_decay": 0.01,
    "warmup_steps": 0.1,
    "num_train_epochs": 2.0,
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
    return assemble(QuestionAnswering, config or make_config(QuestionAnswering, DEFAULTS, **settings))


def main() -> None:
    """Runs the recipe from the command line."""
    run_recipe(QuestionAnswering, description=__doc__ or "", defaults=DEFAULTS)


if __name__ == "__main__":
    main()
