"""Padding against the tokenizer's own."""

from __future__ import annotations

import pytest
import torch

from hf_dist.data.builtin import small_models
from hf_dist.data.collate import Padding, round_up

TEXTS = ["Return the name.", "x", "Return a list of all the header names and values, or None."]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("multiple", [1, 8])
def test_as_the_tokenizer_pads(side, multiple):
    tokenizer = small_models.bpe_tokenizer()
    tokenizer.padding_side = side
    examples = [dict(tokenizer(text, "pair", return_attention_mask=False)) for text in TEXTS]
    padded = Padding.of(tokenizer, pad_to_multiple_of=multiple)(examples)
    wanted = tokenizer.pad(
        {name: [example[name] for example in examples] for name in examples[0]},
        pad_to_multiple_of=multiple,
        return_tensors="pt",
    )
    assert padded.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(padded[name], value)


def test_rounding():
    assert [round_up(length, 8) for length in (1, 8, 9)] == [8, 8, 16]
