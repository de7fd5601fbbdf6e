"""Named configs and tokenizers, and whether the two, the data and the model fit together."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import Any, Literal

from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from hf_dist.config import ModelConfig
from hf_dist.errors import ConfigError

logger = logging.getLogger(__name__)

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


def load_tokenizer(model: ModelConfig, *, add_prefix_space: bool | None = None) -> PreTrainedTokenizerBase:
    """Loads the named tokenizer, or that of the named model.

    One without a pad token pads with its end-of-sequence token: collators know padding by its place in a row,
    and never by the token.

    Args:
        model: names it.
        add_prefix_space: for byte-level tokenizers, whether a text starts as if a space stood before it; None
            leaves it as it was saved.

    Raises:
        ConfigError: it isn't there, or it has neither of the two tokens.
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
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        raise ConfigError(
            f"--{flag} {name}: its tokenizer has no pad token (and no end-of-sequence token that could stand "
            "in for it), and a batch needs one; save it with a pad_token and name that folder with "
            "--tokenizer_name"
        )
    return tokenizer


def align_padding(
    tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, *, keeps_side: bool
) -> Literal["left", "right"]:
    """Makes tokenizer and config agree on padding; both are saved with the model.

    The heads of decoders read a text at its last token that isn't the config's `pad_token_id`
    (transformers 5.24), so another one than the tokenizer's would have them read padding. Padding stands on
    the right, where no token of a causal model sees it and the learned positions of a text count from 0 in
    any batch.

    Args:
        tokenizer: its padding side is changed, unless `keeps_side`.
        config: gets the pad token; models that number positions from it keep their own.
        keeps_side: the tokenizer keeps its side for what is generated with the model later.

    Returns:
        The side that rows are padded on.
    """
    text = config.get_text_config()
    if config.model_type not in _POSITIONS_AFTER_PAD:
        text.pad_token_id = tokenizer.pad_token_id
    if config.model_type in _PADDED_LEFT:
        return "left" if tokenizer.padding_side == "left" else "right"
    if tokenizer.padding_side == "left" and not keeps_side:
        logger.info("rows are padded on the right, and the tokenizer is saved so (it padded on the left)")
        tokenizer.padding_side = "right"
    return "right"


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
    """Fields of a config for a head with these classes, in the order of their ids.

    Their number follows; given too, transformers 5.24 compares it with the classes of before, aloud.
    """
    return {
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


# They read a text at the last position of its row.
_PADDED_LEFT = frozenset({"xlnet"})
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
