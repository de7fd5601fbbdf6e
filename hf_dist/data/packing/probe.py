"""Finds out how a model keeps packed documents apart, by running it on two tiny rows.

No list of model names: the first way is taken in which each document gets the logits that it has alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hf_dist.data.packing.attention import PackedAttention
from hf_dist.data.packing.packs import Pack, PackedCollator
from hf_dist.errors import ConfigError

# Two rows of documents; the second ends in padding.
_LENGTHS = ((3, 6, 4), (5, 1, 2))
# Config fields that hold how far a layer sees.
_WINDOWS = ("sliding_window", "attention_chunk_size")

Documents = list[list[NDArray[np.int64]]]


@torch.no_grad()
def packed_collator(
    model: nn.Module,
    *,
    longest_document: int,
    pad_token_id: int = 0,
    pad_to_multiple_of: int = 1,
    engine_is_up: bool = False,
) -> PackedCollator:
    """The collator for a model: with the first way in which packed documents get the logits they have alone.

    Two things are asked of a way. The logits of a packed document are those of the document alone. And
    other tokens in one document change nothing in its neighbours, measured against the change they make
    in a row that is one long document: that is exact in bfloat16 too, where equality is not.

    The model runs about a dozen times on at most 26 tokens, as the Trainer runs it: without a cache
    (with one, transformers 5.24 doesn't look for packed documents).

    Args:
        model: a causal language model, on the device and with the attention it will be trained with.
        longest_document: tokens of the longest document. Where it exceeds a layer's window, a block mask,
            which replaces the window, is no way.
        pad_token_id: token that rows are padded with.
        pad_to_multiple_of: rows are padded to a multiple of this many tokens.
        engine_is_up: a model that ZeRO-3 has split runs once its engine is up, if all ranks call this
            together.

    Raises:
        ConfigError: no way keeps the documents apart (recurrent layers, or positions that the model counts
            by itself), or the model's weights are spread over ranks.
    """
    if not engine_is_up and any(hasattr(p, "ds_id") and p.numel() == 0 for p in model.parameters()):
        raise ConfigError(
            "the model's weights are spread over the ranks (ZeRO-3), so packing can't be tried on it; "
            "make the collator before the model is split, or once its engine is up (engine_is_up=True)"
        )
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    flash = "flash" in str(getattr(text, "_attn_implementation", None))
    windows = [getattr(text, name, None) for name in _WINDOWS]
    window = min((size for size in windows if isinstance(size, int)), default=longest_document)
    failures: list[str] = []
    with _as_in_training(model):
        probe = _Probe(model, pad_token_id, vocabulary=int(getattr(text, "vocab_size", 0)) or 50)
        for way in PackedAttention:
            if way is PackedAttention.VARLEN and not flash:
                continue
            failure: str | None = f"layers see {window} tokens, documents have {longest_document}"
            if window >= longest_document or not (way.is_boolean_mask or way.is_additive_mask):
                collator = PackedCollator(
                    attention=way,
                    pad_token_id=pad_token_id,
                    pad_to_multiple_of=pad_to_multiple_of,
                    mask_dtype=_dtype(model),
                )
                failure = probe.failure(collator)
                if failure is None:
                    return collator
            failures.append(f"{way.name.lower()}: {failure}")
    raise ConfigError(
        f"{type(model).__name__} can't keep packed documents apart ({'; '.join(failures)}); expected the "
        "logits that each document has alone; train without packing, or choose another model"
    )


def _dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


class _Probe:
    """A model's logits for documents alone, and whether packed ones get the same."""

    def __init__(self, model: nn.Module, pad_token_id: int, *, vocabulary: int) -> None:
        self._model = model
        self._device = next(model.parameters()).device
        exact = _dtype(model) in (torch.float32, torch.float64)
        # Relative to the logits' own size: kernels for other shapes round differently (TF32 too).
        self._tolerance = 1e-3 if exact else 5e-2
        # Relative to what one long document would do. A masked token has weight 0; only experts, which
        # get other tokens in one batch, may round differently.
        self._leak = 1e-3 if exact else 5e-3
        draw = np.random.default_rng(0)
        allowed = np.setdiff1d(np.arange(vocabulary), [pad_token_id])
        self._documents = [[draw.choice(allowed, n) for n in row] for row in _LENGTHS]
        # The same documents behind other first ones.
        self._changed = [[draw.choice(allowed, len(row[0])), *row[1:]] for row in self._documents]
        self._alone = [self._run(document) for row in self._documents for document in row]
        whole, changed = (
            [
                _split(self._run(np.concatenate(row)), lengths)
                for row, lengths in zip(documents, _LENGTHS, strict=True)
            ]
            for documents in (self._documents, self._changed)
        )
        self._one_document = _change_behind_first(whole, changed)

    def failure(self, collator: PackedCollator) -> str | None:
        """Why documents are not kept apart, in a few words, or None."""
        try:
            packed, changed = (self._packed(collator, d) for d in (self._documents, self._changed))
        except torch.OutOfMemoryError:
            raise
        # Whatever a model raises at a mask it doesn't know, it says: not this way.
        except Exception as error:
            return type(error).__name__
        found = [document for row in packed for document in row]
        pairs = list(zip(found, self._alone, strict=True))
        if any(f.shape != e.shape for f, e in pairs):
            return "logits of another shape"
        worst = max(float((f - e).norm() / e.norm().clamp(min=1e-30)) for f, e in pairs)
        # Written so that NaN fails.
        if not worst <= self._tolerance:
            return f"logits differ by {worst:.1e}"
        leaked = _change_behind_first(packed, changed)
        if not leaked <= self._leak * self._one_document:
            return f"a document changes the next one's logits by {leaked:.1e}"
        return None

    def _packed(self, collator: PackedCollator, documents: Documents) -> list[list[Tensor]]:
        batch = collator([_pack(row) for row in documents])
        logits = self._logits({name: value for name, value in batch.items() if name != "labels"})
        if collator.attention is PackedAttention.VARLEN:
            flat = _split(logits[0], [length for row in _LENGTHS for length in row])
            return [flat[: len(_LENGTHS[0])], flat[len(_LENGTHS[0]) :]]
        return [_split(row, lengths) for row, lengths in zip(logits, _LENGTHS, strict=True)]

    def _run(self, tokens: NDArray[np.int64]) -> Tensor:
        return self._logits({"input_ids": torch.from_numpy(tokens)[None]})[0]

    def _logits(self, batch: dict[str, Tensor]) -> Tensor:
        outputs = self._model(**{name: value.to(self._device) for name, value in batch.items()})
        logits: Tensor = outputs["logits"]
        return logits.double().cpu()


def _split(logits: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    return list(logits[: sum(lengths)].split(list(lengths)))


def _change_behind_first(before: list[list[Tensor]], after: list[list[Tensor]]) -> float:
    """Change of the logits of all documents but the first of each row, relative to their size."""
    old, new = (torch.cat([d for row in rows for d in row[1:]]) for rows in (before, after))
    return float((new - old).norm() / old.norm().clamp(min=1e-30))


def _pack(documents: Sequence[NDArray[np.int64]]) -> Pack:
    joined = np.concatenate(documents)
    lengths = np.array([len(document) for document in documents])
    return Pack(input_ids=joined, labels=joined, document_lengths=lengths)


@contextmanager
def _as_in_training(model: nn.Module) -> Iterator[None]:
    """No dropout and no cache; put back afterwards."""
    config: Any = getattr(model, "config", None)
    was_training, cached = model.training, getattr(config, "use_cache", None)
    model.eval()
    if cached is not None:
        config.use_cache = False
    try:
        yield
    finally:
        model.train(was_training)
        if cached is not None:
            config.use_cache = cached
