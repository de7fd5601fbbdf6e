"""What a micro-batch costs: computed tokens, and a quadratic term for attention.

A micro-batch of `k` rows is a rectangle: every row is padded to the longest one, and that to a multiple
of `pad_to_multiple_of`. It computes `k * L` tokens. Attention adds work that grows with `L` per token, so
the *cost* that ranks are balanced by is `k * L * (1 + attention_weight * L)`.

Lengths come as `(n,)` or as `(n, d)`: with an encoder and a decoder, `d = 2`, each part is padded to its
own longest row, and tokens and costs of the parts add up.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_dist.errors import ConfigError, DataError

IntArray = NDArray[np.integer[Any]]

# The names under which config classes keep their dimensions, most usual first.
_HIDDEN = ("hidden_size", "d_model", "n_embd", "dim", "d_embed")
_INTERMEDIATE = ("intermediate_size", "encoder_ffn_dim", "d_ff", "ffn_dim", "n_inner", "hidden_dim")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads")
# Kinds of models whose feed-forward is gated though their activation does not say so.
_GATED = ("modernbert", "gemma")
# Heads that multiply by the vocabulary at every position, by the end of the architecture's name.
_VOCABULARY_HEADS = ("CausalLM", "LMHeadModel", "MaskedLM", "ConditionalGeneration", "PreTraining")


def check_lengths(lengths: Any) -> IntArray:
    """Returns `lengths` as a contiguous integer array of shape (n,) or (n, d), int32 where it fits.

    Raises:
        DataError: it is not an array of non-negative integers of one or two dimensions.
    """
    array = np.asarray(lengths)
    if array.size == 0 and array.ndim == 1:
        array = array.astype(np.int32)
    if array.ndim not in (1, 2) or not np.issubdtype(array.dtype, np.integer):
        raise DataError(
            f"lengths have shape {array.shape} and type {array.dtype}; expected whole numbers, one per row "
            "(or one per row and part); count the tokens of each row"
        )
    if array.size and int(array.min()) < 0:
        raise DataError(f"a length is {int(array.min())}; lengths are at least 0; count the tokens again")
    if array.size and int(array.max()) >= 2**31:
        raise DataError(f"a length is {int(array.max())}; expected less than 2**31 tokens in a row")
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    return np.ascontiguousarray(array, dtype=np.int32)


def padded(lengths: IntArray, multiple: int) -> IntArray:
    """Lengths rounded up to `multiple`; an empty row still takes one multiple of padding."""
    least = np.maximum(lengths, 1)
    if multiple == 1:
        return least
    return (least + (multiple - 1)) // multiple * multiple


def row_tokens(padded_lengths: IntArray) -> IntArray:
    """Computed tokens of each row alone, shape (n,), from padded lengths (n,) or (n, d)."""
    if padded_lengths.ndim == 1:
        return padded_lengths
    return padded_lengths.sum(axis=1, dtype=np.int64)


def row_cost(padded_lengths: IntArray, attention_weight: float) -> NDArray[np.float64]:
    """Cost of each row alone, shape (n,): tokens + attention_weight * tokens**2, parts added up."""
    tokens = padded_lengths.astype(np.float64)
    cost = tokens * (1.0 + attention_weight * tokens)
    return cost if cost.ndim == 1 else cost.sum(axis=1)


def _dimension(config: Any, names: tuple[str, ...]) -> int | None:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def attention_weight_of_dimensions(
    *,
    hidden_size: int,
    num_layers: int,
    intermediate_size: int,
    vocabulary_rows: int = 0,
    gated: bool = False,
    attention_size: int | None = None,
    key_value_size: int | None = None,
) -> float:
    """The weight of a row's squared length against its length, in computed tokens per token squared.

    Multiply-adds of a forward pass over one row of `L` tokens in a transformer of `N` layers, width `h`,
    attention width `a` (heads x head size), key/value width `v`, feed-forward width `f`, and a head that
    multiplies by `V` vocabulary rows at each position (0 without one):

        per token:         N * (2*h*a + 2*h*v + m*h*f) + h*V     m = 3 where the feed-forward is gated, else 2
        per token squared: N * 2*a                               scores (L*L*a) and their product with V

    The weight is the second over the first. With a = v = h, f = 4h and V = 0 it is 1 / (6h): attention
    costs as much as everything else at L = 6h. Embedding look-ups, norms and softmax are left out: linear
    and small. The backward pass doubles both sides alike.

    Source: Kaplan et al. 2020, "Scaling Laws for Neural Language Models", table 1 (its 2*n_layer*n_ctx*
    d_attn counts one of the two attention products; Narayanan et al. 2021, "Efficient Large-Scale Language
    Model Training on GPU Clusters Using Megatron-LM", appendix, counts both, as here).
    """
    attention = hidden_size if attention_size is None else attention_size
    key_value = attention if key_value_size is None else key_value_size
    feed_forward = 3 if gated else 2
    linear = num_layers * hidden_size * (2 * attention + 2 * key_value + feed_forward * intermediate_size)
    linear += hidden_size * vocabulary_rows
    return 2.0 * num_layers * attention / linear


def attention_weight(config: Any) -> float:
    """The weight of `attention_weight_of_dimensions`, read from a transformers config (or a look-alike).

    The vocabulary counts where `config.architectures` names a head over it.

    Raises:
        ConfigError: the config names no width or no number of layers.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    hidden, layers = _dimension(text, _HIDDEN), _dimension(text, _LAYERS)
    if hidden is None or layers is None:
        raise ConfigError(
            f"{type(config).__name__} names no {'width' if hidden is None else 'number of layers'} (looked "
            f"for {', '.join(_HIDDEN if hidden is None else _LAYERS)}); give attention_weight as a number"
        )
    heads = _dimension(text, _HEADS)
    head_size = _dimension(text, ("head_dim", "d_kv"))
    attention_size = heads * head_size if heads and head_size else hidden
    kv_heads = _dimension(text, ("num_key_value_heads",))
    key_value_size = attention_size * kv_heads // heads if heads and kv_heads else attention_size
    activation = str(getattr(text, "hidden_act", None) or getattr(text, "feed_forward_proj", ""))
    gated = str(getattr(text, "model_type", "")).startswith(_GATED)
    gated |= "gated" in activation or "glu" in activation or activation in ("silu", "swish")
    architectures = getattr(config, "architectures", None) or ()
    has_vocabulary_head = any(str(name).endswith(_VOCABULARY_HEADS) for name in architectures)
    return attention_weight_of_dimensions(
        hidden_size=hidden,
        num_layers=layers,
        intermediate_size=_dimension(text, _INTERMEDIATE) or 4 * hidden,
        vocabulary_rows=(_dimension(text, ("vocab_size",)) or 0) if has_vocabulary_head else 0,
        gated=gated,
        attention_size=attention_size,
        key_value_size=key_value_size,
    )
