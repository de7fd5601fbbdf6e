"""Source and target texts: checked columns, and the function that tokenises them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Value
from transformers import PreTrainedTokenizerBase

from hf_dist.data import labels
from hf_dist.errors import DataError


def take_texts(rows: Dataset, split: str, *, source: str, target: str | None, flag: str) -> Dataset:
    """A split with nothing but the columns `source` and `target`.

    Args:
        rows: the split.
        split: its name; test may come without targets, or with nothing but nulls for them.
        source: its column of source texts.
        target: its column of target texts.
        flag: names the flags in messages: `--{flag}_column`, `--target_column` and so on.

    Raises:
        DataError: a column isn't there, holds something else than text, or has nulls.
    """
    there = rows.column_names
    columns = {source: "source"}
    has_target = target in there and not (split == "test" and _all_null(rows, str(target)))
    if has_target:
        columns[str(target)] = "target"
    elif split != "test":
        raise DataError(
            f"the {split} data has no column {target}; it has {', '.join(there)}: every split but test needs "
            "its targets under the same name"
        )
    if source not in there:
        raise DataError(f"the {split} data has no column {source}; it has {', '.join(there)}")
    if len(columns) == 1 and has_target:
        raise DataError(f"column {source} is named for both source and target; expected two columns")
    for column in columns:
        _check_text(rows, column, split=split, flag=flag)
    taken = rows.select_columns(list(columns))
    return taken.rename_columns({old: new for old, new in columns.items() if old != new})


def _all_null(rows: Dataset, column: str) -> bool:
    values = labels.arrow_column(rows, column)
    return values.null_count == len(values)


def _check_text(rows: Dataset, column: str, *, split: str, flag: str) -> None:
    feature, values = rows.features[column], labels.arrow_column(rows, column)
    if pa.types.is_null(values.type):
        raise DataError(f"column {column} of the {split} data has no text in any row; expected strings")
    if not (isinstance(feature, Value) and feature.dtype in ("string", "large_string")):
        raise DataError(
            f"column {column} of the {split} data holds {labels.describe(rows, column)}; expected text: name "
            f"another column with {flag}, or write its values as strings"
        )
    if values.null_count:
        missing = np.flatnonzero(pc.is_null(values).to_numpy())
        raise DataError(
            f"column {column} of the {split} data has no text in {labels.rows_of(missing)}; fill it in or "
            "remove the rows"
        )


def special_tokens(tokenizer: PreTrainedTokenizerBase, *, target: bool) -> int:
    """Tokens that the tokenizer adds to a text of its own: end of sequence, language code."""
    empty = tokenizer(text_target="") if target else tokenizer("")
    return len(empty["input_ids"])


@dataclass(frozen=True, kw_only=True)
class EncodePairs:
    """The function of `Dataset.map`; an object, so that worker processes can unpickle it.

    Attributes:
        tokenizer: encodes both texts; its languages, if it has any, are set.
        prefix: put before each source.
        max_length: sources are cut to so many tokens.
        max_target_length: targets are cut to so many tokens.
        with_target: whether the rows have targets.
        trains: don't keep the texts, which only scores need.
    """

    tokenizer: PreTrainedTokenizerBase
    prefix: str
    max_length: int
    max_target_length: int
    with_target: bool
    trains: bool

    def key(self) -> list[Any]:
        """What the result depends on beside the rows and the tokenizer's state."""
        languages = [getattr(self.tokenizer, name, None) for name in ("src_lang", "tgt_lang")]
        limits = [self.max_length, self.max_target_length]
        return [self.prefix, limits, self.with_target, self.trains, languages]

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Encodes the columns `source` and `target` of a batch."""
        sources = [self.prefix + text for text in batch["source"]]
        ids, cut = self._encode(self.max_length, text=sources)
        own = special_tokens(self.tokenizer, target=False)
        blank = [
            not text.strip() or len(tokens) <= own for text, tokens in zip(batch["source"], ids, strict=True)
        ]
        result: dict[str, list[Any]] = {"input_ids": ids, "source_cut": cut, "target_cut": [False] * len(ids)}
        if self.with_target:
            result["labels"], result["target_cut"] = self._encode(
                self.max_target_length, text_target=list(batch["target"])
            )
            own = special_tokens(self.tokenizer, target=True)
            blank = [
                empty or not text.strip() or len(tokens) <= own
                for empty, text, tokens in zip(blank, batch["target"], result["labels"], strict=True)
            ]
        kept = () if self.trains else [name for name in ("source", "target") if name in batch]
        return {**result, "blank": blank, **{name: batch[name] for name in kept}}

    def _encode(self, most: int, **texts: list[str]) -> tuple[list[list[int]], list[bool]]:
        """Token ids of the texts, and which of them were cut."""
        options: dict[str, Any] = {"return_attention_mask": False, "verbose": False}
        encoded = self.tokenizer(**texts, truncation=True, max_length=most, **options)
        if encoded.encodings is not None:
            return encoded["input_ids"], [bool(encoding.overflowing) for encoding in encoded.encodings]
        whole = self.tokenizer(**texts, **options)["input_ids"]  # a tokenizer in Python keeps no overflow
        return encoded["input_ids"], [
            len(long) > len(ids) for long, ids in zip(whole, encoded["input_ids"], strict=True)
        ]
