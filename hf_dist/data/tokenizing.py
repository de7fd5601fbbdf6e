"""Tokenising, once on a machine: the first process works, the others wait and read its result."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import datasets
import pyarrow.compute as pc
import transformers
import xxhash
from datasets import Dataset, DatasetDict
from transformers import PreTrainedTokenizerBase

from hf_dist.config import DataConfig
from hf_dist.data.cache import cache_dir, key_of, locked
from hf_dist.data.progress import life_signs, progress_bars

# Part of the cache's key: raise it when the same rows would be tokenised differently.
_TOKENISING = 2
_CUT = "truncated"

_IN_MEMORY: ContextVar[bool] = ContextVar("in_memory", default=False)


@contextmanager
def in_memory() -> Iterator[None]:
    """Within it `encode_rows` encodes in this process and caches nothing: for the chunks of a stream."""
    token = _IN_MEMORY.set(True)
    try:
        yield
    finally:
        _IN_MEMORY.reset(token)


def is_in_memory() -> bool:
    """Whether this is within `in_memory`, where rows are a chunk and not the whole of a split."""
    return _IN_MEMORY.get()


@dataclass(frozen=True, kw_only=True)
class _Tokenise:
    """The function of `Dataset.map`; an object, so that worker processes can unpickle it."""

    tokenizer: PreTrainedTokenizerBase
    texts: tuple[str, ...]
    kept: tuple[str, ...]
    max_length: int

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        columns = [batch[name] for name in self.texts]
        encoded = self.tokenizer(
            *columns, truncation=True, max_length=self.max_length, return_attention_mask=False
        )
        if encoded.encodings is not None:
            cut = [bool(encoding.overflowing) for encoding in encoded.encodings]
        else:  # a tokenizer in Python keeps no overflow
            whole = self.tokenizer(*columns, return_attention_mask=False, verbose=False)["input_ids"]
            cut = [len(long) > len(ids) for long, ids in zip(whole, encoded["input_ids"], strict=True)]
        return {**encoded.data, _CUT: cut, **{name: batch[name] for name in self.kept}}


def tokenise(
    raw: DatasetDict, tokenizer: PreTrainedTokenizerBase, data: DataConfig, *, texts: tuple[str, ...]
) -> tuple[DatasetDict, dict[str, int]]:
    """Encodes one text, or a pair, a row; other columns are kept as they are.

    The result is cached under the contents of the rows and all that the tokens depend on, and found there
    by later runs and by the other processes of this one, which wait for it at a file lock.

    Args:
        raw: splits with the columns `texts`.
        tokenizer: what encodes them.
        data: `max_length`, `preprocessing_num_workers` and `overwrite_cache`.
        texts: one column, or two.

    Returns:
        The splits with `input_ids` (and what else the tokenizer makes but attention masks, which padding
        makes), and how many rows of each were cut to `max_length`.
    """
    encoded = DatasetDict()
    truncated: dict[str, int] = {}
    for split, rows in raw.items():
        kept = tuple(name for name in rows.column_names if name not in texts)
        function = _Tokenise(tokenizer=tokenizer, texts=texts, kept=kept, max_length=data.max_length)
        result = encode_rows(
            rows, function, split=split, tokenizer=tokenizer, data=data, key=[data.max_length, texts]
        )
        truncated[split] = count_true(result, _CUT)
        encoded[split] = result.remove_columns([_CUT])
    return encoded, truncated


def encode_rows(
    rows: Dataset,
    function: Callable[[dict[str, list[Any]]], dict[str, list[Any]]],
    *,
    split: str,
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    key: Sequence[Any],
) -> Dataset:
    """Maps rows to what the model is given, in batches, and caches the result.

    The cache's name is made of the rows' contents and all that the result depends on; later runs find it
    there, and the other processes of this one wait for it at a file lock.

    Args:
        rows: what is encoded.
        function: columns of a batch -> columns of its result, which replace the old ones; the number of rows
            may change. Worker processes unpickle it. A module-level class or function: its qualified name
            is part of the cache's key.
        split: name of the split, for the progress bar.
        tokenizer: what the result depends on besides.
        data: `preprocessing_num_workers` and `overwrite_cache`.
        key: JSON-serialisable settings that the result depends on.
    """
    if is_in_memory():
        # As `map` does it: what a function makes of no rows still has its columns.
        return Dataset.from_dict(function(rows[:]))
    named = key_of(
        _TOKENISING,
        [datasets.__version__, transformers.__version__],
        getattr(function, "__qualname__", type(function).__qualname__),
        _contents(rows),
        identity(tokenizer),
        list(key),
    )
    path = cache_dir() / "tokens" / f"{named}.arrow"
    with life_signs(lambda: f"tokenising {split}: {len(rows):,} rows"), locked(path), progress_bars():
        # One process a machine may write over the cache; the others would write the same again.
        fresh = data.overwrite_cache and os.environ.get("LOCAL_RANK", "0") == "0"
        # The contents name the result: datasets' own fingerprint pickles the tokenizer, whose state
        # changes with its first use (datasets 5.2), and finds nothing again.
        return rows.map(
            function,
            batched=True,
            remove_columns=rows.column_names,
            cache_file_name=str(path),
            load_from_cache_file=not fresh,
            new_fingerprint=named,
            num_proc=data.preprocessing_num_workers,
            desc=f"tokenising {split}",
        )


def count_true(rows: Dataset, column: str) -> int:
    """Number of rows whose value is true."""
    flags = rows.select_columns([column]).with_format("arrow")[:].column(0)
    return int(pc.sum(flags).as_py() or 0)


def _contents(rows: Dataset) -> str:
    """A hash of the cells of all columns, in order."""
    digest = xxhash.xxh3_128(repr(rows.features).encode())
    for batch in rows.with_format("arrow").iter(batch_size=10_000):
        # Copied into whole chunks, or the bytes would depend on how the rows were sliced before.
        for part in batch.combine_chunks().to_batches():
            digest.update(part.serialize())
    return digest.hexdigest()


def identity(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """What the tokens depend on. Truncation and padding are left out: they are state of the last call."""
    shared = [tokenizer.truncation_side, tokenizer.model_input_names]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        own = sorted(tokenizer.init_kwargs.items())
        return [*shared, type(tokenizer).__qualname__, tokenizer.get_vocab(), repr(own)]
    state = json.loads(backend.to_str())
    return [*shared, {**state, "truncation": None, "padding": None}]
