"""Train a causal language model: on text, on prompts with answers, or on conversations.

On built-in data (the documentation of the Python that runs):

    accelerate launch recipes/causal_lm.py

Continue pre-training on text files, rows filled with several documents:

    accelerate launch recipes/causal_lm.py --model_name_or_path gpt2 --train_file corpus.txt.gz
        --block_size 1024 --packing --max_tokens_per_device 16384

Fine-tune on conversations (a column `messages`) or on prompts with answers:

    accelerate launch recipes/causal_lm.py --model_name_or_path Qwen/Qwen3-0.6B --train_file chats.jsonl
"""

from __future__ import annotations

from typing import Any

from hf_dist.recipes import FinishedRun, Recipe, RunConfig, assemble, make_config, run_recipe
from hf_dist.tasks.causal_lm.task import CausalLM

DEFAULTS: dict[str, Any] = {
    "max_length": 256,
    # Small steps suit the small built-in data; on a GPU raise both (docs/batching.md).
    "max_tokens_per_device": 1024,
    "tokens_per_step": 1024,
    "learning_rate": 2e-3,
    "weight_decay": 0.01,
    "warmup_steps": 0.1,
    "lr_scheduler_type": "cosine",
    "num_train_epochs": 1.0,
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
    return assemble(CausalLM, config or make_config(CausalLM, DEFAULTS, **settings))


def main() -> None:
    """Runs the recipe from the command line."""
    run_recipe(CausalLM, description=__doc__ or "", defaults=DEFAULTS)


if __name__ == "__main__":
    main()
