"""Ways in which a model keeps the documents of a packed row apart."""

from __future__ import annotations

import enum

import torch
from torch import Tensor


class PackedAttention(enum.Enum):
    """Ways to keep the documents of a row apart, best first."""

    VARLEN = "flash attention over the documents' bounds, all packs in one row"
    POSITIONS = "the model's own mask, made where position_ids restart"
    BOOLEAN_MASK = "a block mask of booleans"
    ADDITIVE_MASK = "a block mask that is added to the scores"
    BOOLEAN_MASK_ALONE = "a block mask of booleans, without position_ids"
    ADDITIVE_MASK_ALONE = "a block mask that is added to the scores, without position_ids"

    @property
    def takes_positions(self) -> bool:
        """Whether the model is given `position_ids`."""
        return self not in (PackedAttention.BOOLEAN_MASK_ALONE, PackedAttention.ADDITIVE_MASK_ALONE)

    @property
    def is_boolean_mask(self) -> bool:
        """Whether the model is given a mask of booleans."""
        return self in (PackedAttention.BOOLEAN_MASK, PackedAttention.BOOLEAN_MASK_ALONE)

    @property
    def is_additive_mask(self) -> bool:
        """Whether the model is given a mask of 0 and the least float."""
        return self in (PackedAttention.ADDITIVE_MASK, PackedAttention.ADDITIVE_MASK_ALONE)


def block_mask(
    attention: PackedAttention, documents: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor | None:
    """The mask under which a token sees itself and what stands before it in its own document.

    Args:
        attention: the way; those that make no mask of their own give None.
        documents: (rows, tokens), a number for each document of a row; padding has one of its own.
        dtype: of a mask that is added.

    Returns:
        (rows, 1, tokens, tokens): booleans, True where the token of the third dimension sees that of the
        fourth, or of `dtype`, 0 where it does and the least number elsewhere.
    """
    if not (attention.is_boolean_mask or attention.is_additive_mask):
        return None
    length = documents.shape[1]
    same = documents[:, None, :, None] == documents[:, None, None, :]
    seen = same & torch.ones(length, length, dtype=torch.bool).tril()
    if attention.is_boolean_mask:
        return seen
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
