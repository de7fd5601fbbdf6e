"""From examples to a batch: rows of one length, and nothing that the model does not take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

IGNORED = -100
"""The label that counts nowhere (transformers' convention)."""


@dataclass(frozen=True, kw_only=True)
class Padding:
    """Pads the rows of a batch to the longest, rounded up.

    Attributes:
        fill: value of the added positions for each column that is padded, such as
            `{"input_ids": 0, "token_type_ids": 0}`.
        pad_to_multiple_of: the length of a row becomes a multiple of this many tokens.
        side: where the added positions stand.
    """

    fill: dict[str, int]
    pad_to_multiple_of: int = 1
    side: Literal["left", "right"] = "right"

    @staticmethod
    def of(tokenizer: PreTrainedTokenizerBase, *, pad_to_multiple_of: int) -> Padding:
        """The padding that `tokenizer` itself would make; it must have a pad token."""
        fill = {"input_ids": tokenizer.pad_token_id, "token_type_ids": tokenizer.pad_token_type_id}
        names = tokenizer.model_input_names
        return Padding(
            fill={name: value for name, value in fill.items() if name in names},
            pad_to_multiple_of=pad_to_multiple_of,
            side="left" if tokenizer.padding_side == "left" else "right",
        )

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Makes the columns of `fill` that the examples have, each (rows, length), and the attention mask."""
        lengths = [len(example["input_ids"]) for example in examples]
        longest = round_up(max(lengths), self.pad_to_multiple_of)
        places = [slice(0, n) if self.side == "right" else slice(longest - n, longest) for n in lengths]
        batch: dict[str, torch.Tensor] = {}
        for name, value in self.fill.items():
            if name in examples[0]:
                padded = np.full((len(examples), longest), value, dtype=np.int64)
                for row, (example, place) in enumerate(zip(examples, places, strict=True)):
                    padded[row, place] = example[name]
                batch[name] = torch.from_numpy(padded)
        mask = np.zeros((len(examples), longest), dtype=np.int64)
        for row, place in enumerate(places):
            mask[row, place] = 1
        batch["attention_mask"] = torch.from_numpy(mask)
        return batch


def round_up(length: int, multiple: int) -> int:
    """The smallest multiple that is not below `length`."""
    return -(-length // multiple) * multiple
