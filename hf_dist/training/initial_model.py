"""The model before the first step, the same on every engine and rank.

A model built from a config draws its weights from the random state, and draws others under ZeRO-3's
zero.Init. So it is initialised once, by one process a node, saved to the cache, and loaded from there
by everyone through `from_pretrained`, which also partitions it under ZeRO-3.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_model
from transformers import PretrainedConfig, PreTrainedModel

from hf_dist.config import ModelConfig
from hf_dist.data.cache import build_once, cache_dir, key_of
from hf_dist.errors import CheckpointError, ConfigError
from hf_dist.training.engine import outside_zero_init


def _is_dropout(name: str) -> bool:
    return any(word == "drop" or word.endswith(("dropout", "layerdrop", "pdrop")) for word in name.split("_"))


def set_dropout(config: PretrainedConfig, probability: float) -> list[str]:
    """Sets every dropout probability of a model's config; returns the names that were set.

    A field counts where a word of its name speaks of dropout and its value is a number
    (`hidden_dropout_prob`, `attn_pdrop`, `dropout`, `classifier_dropout`, `encoder_layerdrop` ...).

    Raises:
        ConfigError: If the config has no such field.
    """
    names = []
    for name, value in config.to_dict().items():
        is_probability = isinstance(value, (int, float)) and not isinstance(value, bool)
        # BERT's classifier_dropout is None where it follows hidden_dropout_prob.
        if _is_dropout(name) and (is_probability or name == "classifier_dropout"):
            setattr(config, name, probability)
            names.append(name)
    if not names:
        raise ConfigError(
            f"--dropout {probability}: the config of {config.model_type} has no dropout probability; "
            "leave the flag out"
        )
    return names


def _initialise(config: PretrainedConfig, auto_class: Any, seed: int, folder: Path) -> None:
    # The caller's random state is left as it was: who initialises must not differ from who only loads.
    # One process builds it alone, so ZeRO-3 must not partition it on the way.
    with torch.random.fork_rng(devices=[]), outside_zero_init():
        torch.manual_seed(seed)
        model = auto_class.from_config(config)
    # `save_pretrained` writes nothing on another rank than 0 (transformers 5.24), and any may be the builder.
    save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})
    model.config.save_pretrained(folder)


def initial_model_folder(config: PretrainedConfig, auto_class: Any, seed: int) -> Path:
    """Returns the cached folder of the model drawn from `config` with `seed`, making it if needed."""
    key = key_of(
        auto_class.__name__, seed, torch.__version__, transformers.__version__, config.to_json_string()
    )
    return build_once(
        cache_dir() / "models" / f"{config.model_type}-{key}",
        lambda folder: _initialise(config, auto_class, seed, folder),
    )


def load_model(
    config: PretrainedConfig,
    auto_class: Any,
    model: ModelConfig,
    *,
    seed: int,
    checkpoint: Path | None = None,
    tokens: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """Loads the model that training starts from, or that a checkpoint holds.

    Args:
        config: The model's.
        auto_class: The transformers auto class of the task.
        model: Names it; without a name it is drawn from `config`.
        seed: Draws what is drawn.
        checkpoint: Its weights are taken instead.
        tokens: Tokens that must have an embedding under --resize_embeddings.
        options: More for `from_pretrained`.

    Must be called after TrainingArguments exist, or ZeRO-3 does not partition it (transformers 5.24 reads
    the DeepSpeed config from a global that TrainingArguments sets).

    Raises:
        ConfigError: If the named model can't be loaded for this task.
    """
    config = copy.deepcopy(config)
    rows = getattr(config.get_text_config(), "vocab_size", None)
    more = tokens if model.resize_embeddings and tokens and rows is not None and tokens > rows else None
    if checkpoint is not None:
        if more is not None:
            config.get_text_config().vocab_size = more
        return _load_checkpoint(config, auto_class, model, checkpoint)
    if model.model_name_or_path is None:
        folder = initial_model_folder(config, auto_class, seed)
        return auto_class.from_pretrained(folder, config=config)
    try:
        loaded = auto_class.from_pretrained(
            model.model_name_or_path,
            config=config,
            revision=model.model_revision,
            cache_dir=model.model_cache_dir,
            trust_remote_code=model.trust_remote_code,
            # A pickle runs any code it holds; safetensors are only numbers.
            use_safetensors=None if model.allow_pickle else True,
            ignore_mismatched_sizes=model.new_head,
            **(options or {}),
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"--model_name_or_path {model.model_name_or_path} can't be loaded as {auto_class.__name__}: "
            f"{str(error).splitlines()[0]}"
        ) from error
    if more is not None:
        resize_embeddings(loaded, more, seed=seed)
    return loaded


def resize_embeddings(model: PreTrainedModel, tokens: int, *, seed: int) -> None:
    """Gives a model that many embeddings; new ones are drawn around the mean, the same on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.resize_token_embeddings(tokens)


def _load_checkpoint(
    config: PretrainedConfig, auto_class: Any, model: ModelConfig, checkpoint: Path
) -> PreTrainedModel:
    try:
        loaded, found = auto_class.from_pretrained(
            checkpoint,
            config=config,
            trust_remote_code=model.trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{checkpoint} can't be loaded as {auto_class.__name__}: {str(error).splitlines()[0]}"
        ) from error
    missing = sorted(found["missing_keys"])
    if missing:
        raise CheckpointError(
            f"{checkpoint} doesn't hold {', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}: it is "
            "of another model; name another --output_dir, or say --resume never"
        )
    return loaded
