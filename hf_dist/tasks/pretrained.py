"""Named configs and tokenizers, and whether the two, the data and the model fit together."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from hf_dist.config import ModelConfig
from hf_dist.errors import ConfigError

# Tokenizers without a limit of their own carry a huge number instead (transformers' VERY_LARGE_INTEGER).
_NO_LIMIT = 10**9


def load_config(model: ModelConfig, **changes: Any) -> PretrainedConfig:
    """Loads the config of the named model, with `changes` to its fields.

    Raises:
        ConfigError: it isn't there or is no config.
    """
    name = model.config_name or model.model_name_or_path
    assert name is not None
    try:
        return AutoConfig.from_pretrained(
            name,
            # The revision is that of the model; a config from elsewhere has branches of its own.
            revision=model.model_revision if model.config_name is None else "main",
            trust_remote_code=model.trust_remote_code,
            cache_dir=model.model_cache_dir,
            **changes,
        )
    except (OSError, ValueError, KeyError) as error:
        flag = "model_name_or_path" if model.config_name is None else "config_name"
        raise _unloadable(flag, name, "model", error) from error


def load_tokenizer(
    model: ModelConfig, *, pad_with_eos: bool = False, add_prefix_space: bool | None = None
) -> PreTrainedTokenizerBase:
    """Loads the named tokenizer, or that of the named model.

    Args:
        model: names it.
        pad_with_eos: let one without a pad token pad with its end token (the collator must not take labels
            for padding by it).
        add_prefix_space: for byte-level tokenizers, whether a text starts as if a space stood before it; None
            leaves it as it was saved.

    Raises:
        ConfigError: it isn't there, or it can't pad.
    """
    named = model.tokenizer_name is not None
    name = model.tokenizer_name if named else model.model_name_or_path
    flag = "tokenizer_name" if named else "model_name_or_path"
    changes = {} if add_prefix_space is None else {"add_prefix_space": add_prefix_space}
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name,
            # The revision is that of the model; a tokenizer from elsewhere has branches of its own.
            revision="main" if named else model.model_revision,
            trust_remote_code=model.trust_remote_code,
            cache_dir=model.model_cache_dir,
            **changes,
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise _unloadable(flag, name, "tokenizer", error) from error
    if tokenizer.pad_token_id is None and pad_with_eos and tokenizer.eos_token_id is not None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        raise ConfigError(
            f"--{flag} {name}: its tokenizer has no pad token, and a batch needs one; save it with a "
            "pad_token "
            "(for decoder models often the end-of-sequence token) and name that folder with --tokenizer_name"
        )
    return tokenizer


def check_fit(
    tokenizer: PreTrainedTokenizerBase,
    config: PretrainedConfig,
    *,
    max_length: int,
    pad_to_multiple_of: int,
    resizes: bool = False,
) -> None:
    """Checks that every token has an embedding and every position of a padded row is one the model knows.

    `resizes` says that new tokens are given embeddings later.

    Raises:
        ConfigError: they don't fit.
    """
    embeddings = getattr(config.get_text_config(), "vocab_size", None)
    if embeddings is not None and len(tokenizer) > embeddings and not resizes:
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} tokens and the model's embedding {embeddings}; name the "
            "tokenizer that belongs to the model, or say --resize_embeddings for tokens that are new to it"
        )
    limits = [getattr(config.get_text_config(), "max_position_embeddings", None)]
    if config.model_type in _POSITIONS_AFTER_PAD and limits[0] is not None:
        limits = [limits[0] - config.pad_token_id - 1]
    limits.append(tokenizer.model_max_length if tokenizer.model_max_length < _NO_LIMIT else None)
    limit = min((limit for limit in limits if limit is not None and limit > 0), default=None)
    padded = -(-max_length // pad_to_multiple_of) * pad_to_multiple_of
    if limit is not None and padded > limit:
        rounded = f", rounded up to {padded} by --pad_to_multiple_of" if padded != max_length else ""
        raise ConfigError(
            f"--max_length {max_length}{rounded}: the model takes at most {limit} tokens; give --max_length "
            f"{limit // pad_to_multiple_of * pad_to_multiple_of or limit} or less"
        )


def class_head(classes: Sequence[str]) -> dict[str, Any]:
    """Fields of a config for a head with these classes, in the order of their ids."""
    return {
        "num_labels": len(classes),
        "id2label": dict(enumerate(classes)),
        "label2id": {name: place for place, name in enumerate(classes)},
    }


def forward_parameters(config: PretrainedConfig, auto_class: Any) -> frozenset[str] | None:
    """Names that the model's forward takes; None for a class that transformers doesn't list."""
    mapping: Any = auto_class._model_mapping
    if type(config) not in mapping:
        return None
    listed = mapping[type(config)]
    model_class = listed[0] if isinstance(listed, tuple) else listed
    return frozenset(inspect.signature(model_class.forward).parameters)


def classes_of(config: PretrainedConfig) -> tuple[str, ...]:
    """The classes a model was trained on; numbers where its config has only the placeholder names."""
    found = [str(name) for _, name in sorted((config.id2label or {}).items())]
    if found == [f"LABEL_{place}" for place in range(len(found))]:
        return tuple(str(place) for place in range(len(found)))
    return tuple(found)


# Their first position is numbered pad_token_id + 1, so the table of positions has so many unused rows.
_POSITIONS_AFTER_PAD = frozenset(
    {"roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "longformer", "data2vec-text", "mpnet"}
)


def _unloadable(flag: str, name: str | None, what: str, error: Exception) -> ConfigError:
    reason = " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
    return ConfigError(
        f"--{flag} {name}: no {what} can be loaded from there ({reason}); expected a folder, or a name on "
        "the hub "
        "and a network or cache to get it from"
    )
