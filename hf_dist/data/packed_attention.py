"""How a model keeps the documents of a packed row apart, found out by running it.

No list of model names: two tiny packed rows are run in every way there is, and the first way that gives
each document the logits it has alone is taken.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from hf_dist.errors import ConfigError

if TYPE_CHECKING:
    from hf_dist.data.packed import Pack

# Two rows of documents; the second ends in padding, and no document's neighbour is as long as it.
_LENGTHS = ((3, 6, 4), (5, 1, 2))
# Config fields that hold how far a layer sees.
_WINDOWS = ("sliding_window", "attention_chunk_size")


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


def block_mask(attention: PackedAttention, documents: Tensor) -> Tensor | None:
    """The mask under which a token sees itself and what stands before it in its own document.

    Args:
        attention: the way; those that make no mask of their own give None.
        documents: (rows, tokens), a number for each document of a row; padding has one of its own.

    Returns:
        (rows, 1, tokens, tokens): booleans, True where the token of the third dimension sees that of the
        fourth, or float32, 0 where it does and the least number elsewhere.
    """
    if not (attention.is_boolean_mask or attention.is_additive_mask):
        return None
    length = documents.shape[1]
    same = documents[:, None, :, None] == documents[:, None, None, :]
    seen = same & torch.ones(length, length, dtype=torch.bool).tril()
    if attention.is_boolean_mask:
        return seen
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)


@torch.no_grad()
def choose_attention(
    model: nn.Module, *, longest_document: int, pad_token_id: int = 0, pad_to_multiple_of: int = 1
) -> PackedAttention:
    """Finds the first way in which packed documents get the logits that each has alone.

    Two things are asked of a way. The logits of a packed document are those of the document alone. And
    other tokens in one document change nothing in its neighbours, measured against the change they make
    in a row that is one long document: that is exact in bfloat16 too, where equality is not.

    Some seventeen forward passes of at most 26 tokens. The model runs as the Trainer runs it, without a
    cache (with one, transformers 5.24 doesn't look for packed documents).

    Args:
        model: a causal language model, on the device and with the attention it will be trained with.
        longest_document: tokens of the longest document: where it exceeds a layer's window, a block mask,
            which replaces the window, is no way.
        pad_token_id: token that rows are padded with.
        pad_to_multiple_of: rows are padded to a multiple of this many tokens.

    Raises:
        ConfigError: no way keeps the documents apart (recurrent layers, or positions that the model counts
            by itself), or the model's weights are spread over ranks.
    """
    if any(hasattr(p, "ds_id") and p.numel() == 0 for p in model.parameters()):
        raise ConfigError(
            "the model's weights are spread over the ranks (ZeRO-3), so packing can't be tried on it; "
            "choose the attention before the model is split, or once its engine is up"
        )
    config = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    probe = _Probe(model, int(getattr(text, "vocab_size", 0)) or 50, pad_token_id, pad_to_multiple_of)
    windows = [getattr(text, name, None) for name in _WINDOWS]
    window = min((w for w in windows if isinstance(w, int)), default=longest_document)
    failures: list[str] = []
    with _as_in_training(model):
        probe.prepare()
        for way in PackedAttention:
            if way is PackedAttention.VARLEN and "flash" not in str(
                getattr(text, "_attn_implementation", None)
            ):
                continue
            if (way.is_boolean_mask or way.is_additive_mask) and window < longest_document:
                failures.append(f"{way.name.lower()}: layers see {window} tokens")
                continue
            failure = probe.failure(way)
            if failure is None:
                return way
            failures.append(f"{way.name.lower()}: {failure}")
    raise ConfigError(
        f"{type(model).__name__} can't keep packed documents apart ({'; '.join(failures)}); expected the "
        "logits that each document has alone; train without packing, or choose another model"
    )


class _Probe:
    """Runs a model on documents alone and packed."""

    def __init__(self, model: nn.Module, vocabulary: int, pad_token_id: int, multiple: int) -> None:
        self._model = model
        self._pad_token_id = pad_token_id
        self._multiple = multiple
        first = next(model.parameters())
        self._device = first.device
        exact = all(p.dtype in (torch.float32, torch.float64) for p in model.parameters())
        # Relative to the logits' own size: kernels for other shapes round differently (TF32 too).
        self._tolerance = 1e-3 if exact else 5e-2
        # Relative to what one long document would do. A mask of zeros is exact; experts that get other
        # tokens in one batch are nearly so.
        self._leak = 1e-3 if exact else 2e-2
        draw = np.random.default_rng(0)
        allowed = np.setdiff1d(np.arange(vocabulary), [pad_token_id])
        self._documents = [[draw.choice(allowed, n) for n in row] for row in _LENGTHS]
        # The same with other first documents.
        self._changed = [[(row[0] + 1) % vocabulary, *row[1:]] for row in self._documents]

    def prepare(self) -> None:
        """Runs every document alone, and the rows as one document each."""
        self._alone = [
            [self._logits({"input_ids": torch.from_numpy(document)[None]})[0] for document in row]
            for row in self._documents
        ]
        runs = []
        for documents in (self._documents, self._changed):
            whole = [np.concatenate(row) for row in documents]
            runs.append(
                [
                    self._split(self._logits({"input_ids": torch.from_numpy(row)[None]})[0], lengths)
                    for row, lengths in zip(whole, _LENGTHS, strict=True)
                ]
            )
        self._one_document = _neighbours_change(*runs)

    def failure(self, way: PackedAttention) -> str | None:
        """Why a way is none, or None."""
        try:
            packed, changed = self._packed(way, self._documents), self._packed(way, self._changed)
        except torch.OutOfMemoryError:
            raise
        # Whatever a model raises at a mask it doesn't know says no more than "not this way".
        except Exception as error:
            return f"{type(error).__name__}"
        pairs = [
            (found, expected)
            for row, alone in zip(packed, self._alone, strict=True)
            for found, expected in zip(row, alone, strict=True)
        ]
        if any(found.shape != expected.shape for found, expected in pairs):
            return "logits of another shape"
        worst = max(float((f - e).norm() / e.norm().clamp(min=1e-30)) for f, e in pairs)
        if not worst <= self._tolerance:
            return f"logits differ by {worst:.1e}"
        leaked = _neighbours_change(packed, changed)
        if not leaked <= self._leak * self._one_document:
            return f"a document changes its neighbour's logits by {leaked:.1e}"
        return None

    def _packed(self, way: PackedAttention, documents: list[list[Any]]) -> list[list[Tensor]]:
        # The collator stands above this module: it asks for the way that is found here.
        from hf_dist.data.packed import PackedCollator

        collate = PackedCollator(
            attention=way, pad_token_id=self._pad_token_id, pad_to_multiple_of=self._multiple
        )
        batch = collate([_pack(row) for row in documents])
        del batch["labels"]
        logits = self._logits(batch)
        if way is PackedAttention.VARLEN:
            flat = self._split(logits[0], [n for row in _LENGTHS for n in row])
            return [flat[: len(_LENGTHS[0])], flat[len(_LENGTHS[0]) :]]
        return [self._split(row, lengths) for row, lengths in zip(logits, _LENGTHS, strict=True)]

    def _logits(self, batch: dict[str, Tensor]) -> Tensor:
        outputs = self._model(**{name: value.to(self._device) for name, value in batch.items()})
        logits: Tensor = outputs["logits"]
        return logits.double().cpu()

    @staticmethod
    def _split(logits: Tensor, lengths: Any) -> list[Tensor]:
        return list(logits[: sum(lengths)].split(list(lengths)))


def _neighbours_change(before: list[list[Tensor]], after: list[list[Tensor]]) -> float:
    """Change of the logits of all documents but the first of each row, relative to their size."""
    old = torch.cat([document for row in before for document in row[1:]])
    new = torch.cat([document for row in after for document in row[1:]])
    return float((new - old).norm() / old.norm().clamp(min=1e-30))


def _pack(documents: list[Any]) -> Pack:
    from hf_dist.data.packed import Pack

    joined = np.concatenate(documents)
    lengths = np.array([len(document) for document in documents])
    return Pack(input_ids=joined, labels=joined, document_lengths=lengths)


@contextmanager
def _as_in_training(model: nn.Module) -> Iterator[None]:
    """No dropout and no cache; put back afterwards."""
    config = getattr(model, "config", None)
    was_training, cached = model.training, getattr(config, "use_cache", None)
    model.eval()
    if cached is not None:
        config.use_cache = False  # type: ignore[union-attr]
    try:
        yield
    finally:
        model.train(was_training)
        if cached is not None:
            config.use_cache = cached  # type: ignore[union-attr]
