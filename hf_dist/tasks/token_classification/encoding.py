"""Words and tags as tokens and labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_dist.data.collate import IGNORED

CUT = "truncated"
"""Column: the row was cut."""
NOWHERE = -1
"""The place of a word that has no token."""


@dataclass(frozen=True, kw_only=True)
class TaggedWords:
    """Words and tags -> `input_ids`, `labels`; with `keep`, also the words and where each begins.

    Attributes:
        tokenizer: a fast one.
        max_length: longest sequence.
        inside: for each tag the one that the later sub-words of its word get; None leaves them out.
        keep: keep `tokens`, `tags` and the position `first` of each word's first sub-word (-1: it has none).
    """

    tokenizer: PreTrainedTokenizerBase
    max_length: int
    inside: tuple[int, ...] | None
    keep: bool

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Columns of a batch -> the columns that replace them."""
        encoded = self.tokenizer(
            batch["tokens"],
            is_split_into_words=True,
            truncation=True,
            max_length=self.max_length,
            return_attention_mask=False,
        )
        tagged = batch.get("tags")
        columns: dict[str, list[Any]] = dict(encoded.data)
        columns[CUT] = [bool(encoding.overflowing) for encoding in encoded.encodings]
        first = [
            self._first(encoding.word_ids, len(words))
            for encoding, words in zip(encoded.encodings, batch["tokens"], strict=True)
        ]
        if tagged is not None:
            columns["labels"] = [
                self._labels(encoding.word_ids, places, tags)
                for encoding, places, tags in zip(encoded.encodings, first, tagged, strict=True)
            ]
        if self.keep:
            columns.update({name: batch[name] for name in ("tokens", "tags") if name in batch}, first=first)
        return columns

    @staticmethod
    def _first(word_ids: Sequence[int | None], words: int) -> list[int]:
        places = [NOWHERE] * words
        for place, word in enumerate(word_ids):
            if word is not None and places[word] == NOWHERE:
                places[word] = place
        return places

    def _labels(self, word_ids: Sequence[int | None], first: Sequence[int], tags: Sequence[int]) -> list[int]:
        found = [IGNORED] * len(word_ids)
        if self.inside is not None:
            for place, word in enumerate(word_ids):
                if word is not None:
                    found[place] = self.inside[tags[word]]
        for place, tag in zip(first, tags, strict=True):
            if place != NOWHERE:
                found[place] = tag
        return found
