"""From the flags as given to the settings that a run goes by, and what is told of them at its start."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Sequence

import datasets
import transformers

from hf_dist.config import RunConfig
from hf_dist.errors import ConfigError
from hf_dist.training.adapters import lora
from hf_dist.training.models.compilation import compiles

logger = logging.getLogger("hf_dist")


def log_on_rank_0(notes: Sequence[str]) -> None:
    """Our own log goes to stderr from rank 0, and progress bars only to a terminal.

    Args:
        notes: What reading the flags has to say; it comes first.
    """
    logger.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.ERROR)
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    if not sys.stderr.isatty() or os.environ.get("RANK", "0") != "0":
        transformers.utils.logging.disable_progress_bar()
        datasets.disable_progress_bars()
    for note in notes:
        logger.info("%s", note)


def resolve(config: RunConfig) -> RunConfig:
    """Fills in the defaults that depend on other settings.

    Without --do_train, --do_eval and --do_predict a recipe trains and evaluates.

    Raises:
        ConfigError: If there is nothing that could be evaluated.
    """
    config = lora.with_base(config)
    arguments = dict(config.training_arguments)
    batching = config.batching
    if batching.pad_to_multiple_of is None:
        # Tensor cores want multiples of 8 in half precision, and a compiled model few different lengths;
        # elsewhere rounding up is only padding.
        half = arguments.get("bf16") or arguments.get("fp16")
        rounds = half or compiles(arguments)
        batching = dataclasses.replace(batching, pad_to_multiple_of=8 if rounds else 1)
    if batching.batching == "tokens" and batching.tokens_per_step is None:
        batching = dataclasses.replace(batching, tokens_per_step=batching.max_tokens_per_device)
    if not any(arguments.get(name) for name in ("do_train", "do_eval", "do_predict")):
        arguments.update(do_train=True, do_eval=True)
    if not arguments.get("do_train") and config.model.model_name_or_path is None:
        raise ConfigError(
            "--do_eval and --do_predict alone need a trained model; name it with --model_name_or_path"
        )
    if not arguments.get("do_train"):
        # Nothing is trained, so nothing is evaluated or saved on the way.
        arguments.update(eval_strategy="no", save_strategy="no", load_best_model_at_end=False)
        # Only training data are streamed.
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, streaming=False))
    return dataclasses.replace(config, batching=batching, training_arguments=arguments)
