"""Packs as rows: a data set that joins the documents of a pack, and the collator that keeps them apart."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from hf_dist.batching.packing import Packing
from hf_dist.data.collate import IGNORED, round_up
from hf_dist.data.packing.attention import PackedAttention, block_mask
from hf_dist.errors import DataError, nearest


class Pack(UserDict[str, NDArray[np.int64]]):
    """One row: `input_ids` and `labels` of its documents, joined, and `document_lengths`.

    Not a dict: the Trainer takes from a dict example what the model's forward doesn't name
    (transformers 5.24, RemoveColumnsCollator), and with `document_lengths` the borders would go.
    """


class PackedDataset(Dataset[Pack]):
    """A map-style data set whose rows are packs.

    Args:
        dataset: the documents: `input_ids`, and `labels` where they differ from the tokens (a prompt that
            isn't learned). A `datasets.Dataset` is read through Arrow, without Python numbers.
        packing: made from this data set's lengths.

    Attributes:
        lengths: tokens of each row, for `Plan.build`.
        packing: as given.

    Raises:
        DataError: the data set has another number of documents than the packing, or no `input_ids`.
    """

    def __init__(self, dataset: Any, packing: Packing) -> None:
        planned = len(packing.document_lengths)
        if len(dataset) != planned:
            raise DataError(
                f"the packing is for {planned} documents and the data set has {len(dataset)}; build the "
                "packing from this data set's lengths"
            )
        self.packing = packing
        self.lengths = packing.lengths
        self._columns = _columns(dataset)
        self._dataset = dataset
        if isinstance(dataset, datasets.Dataset):
            self._dataset = dataset.select_columns(self._columns).with_format("arrow")

    def __len__(self) -> int:
        return len(self.packing)

    def __getitem__(self, row: int) -> Pack:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[Pack]:
        """The packs of these numbers; their documents are read in one go."""
        parts = [self.packing.documents_of(int(row)) for row in rows]
        documents = np.concatenate([np.empty(0, dtype=np.int64), *parts])
        lengths = self.packing.document_lengths[documents]
        columns = self._read(documents, lengths)
        ends = np.cumsum([int(self.lengths[row]) for row in rows])[:-1]
        cut = {name: np.split(values, ends) for name, values in columns.items()}
        borders = np.split(lengths, np.cumsum([len(part) for part in parts])[:-1])
        return [
            Pack(
                input_ids=cut["input_ids"][row],
                labels=cut[self._columns[-1]][row],
                document_lengths=borders[row],
            )
            for row in range(len(rows))
        ]

    def _read(self, documents: NDArray[np.int64], lengths: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
        columns: dict[str, NDArray[np.int64]] = {}
        empty = np.empty(0, dtype=np.int64)
        if not isinstance(self._dataset, datasets.Dataset):
            examples = [self._dataset[int(document)] for document in documents]
        for name in self._columns:
            if not len(documents):
                columns[name] = empty
                continue
            if isinstance(self._dataset, datasets.Dataset):
                lists = self._dataset[documents.tolist()][name].combine_chunks()
                found, values = _list_parts(lists)
            else:
                arrays = [np.asarray(example[name], dtype=np.int64) for example in examples]
                found, values = np.array([len(a) for a in arrays]), np.concatenate([empty, *arrays])
            if not np.array_equal(found, lengths):
                at = int(np.flatnonzero(found != lengths)[0])
                raise DataError(
                    f"document {documents[at]} has {found[at]} {name} and its length was given as "
                    f"{lengths[at]}; build the packing from this data set's input_ids"
                )
            columns[name] = values
        return columns


def _columns(dataset: Any) -> list[str]:
    """`input_ids`, and `labels` where there are any."""
    known: list[str] = []
    if isinstance(dataset, datasets.Dataset):
        known = list(dataset.column_names)
    elif len(dataset):
        known = list(dataset[0])
    else:
        return ["input_ids"]
    if "input_ids" not in known:
        raise DataError(
            f"no column 'input_ids'{nearest('input_ids', known)}; the documents have {', '.join(known)}; "
            "tokenise the data first"
        )
    return [name for name in ("input_ids", "labels") if name in known]


def _list_parts(lists: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Length of each list and all values in a row."""
    if isinstance(lists, pa.ChunkedArray):
        lists = pa.concat_arrays(lists.chunks)
    lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False)
    values = lists.flatten().to_numpy(zero_copy_only=False)
    return lengths.astype(np.int64), values.astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class PackedCollator:
    """Packs -> a batch in which no document sees or predicts another.

    The batch holds, with rows x tokens of the longest pack (or one row of all packs for
    `PackedAttention.VARLEN`):

    - `input_ids`, padded with `pad_token_id`;
    - `labels`: the first token of each document and all padding are -100, so that with the shift of
      causal language models the last token of a document predicts nothing;
    - `position_ids`, from 0 in each document, where the way to attend takes them;
    - `attention_mask` (rows, 1, tokens, tokens), where it takes one. There is never a 2-d mask: padding is
      more documents behind the others, which see and are seen by nothing else.

    Attributes:
        attention: how the model keeps documents apart; `packed_probe.packed_collator` finds it.
        pad_token_id: any token; it is seen by nothing that counts.
        pad_to_multiple_of: a row's length becomes a multiple of this many tokens.
        mask_dtype: of a mask that is added to the scores: the weights' own.
    """

    attention: PackedAttention
    pad_token_id: int = 0
    pad_to_multiple_of: int = 1
    mask_dtype: torch.dtype = torch.float32

    def __call__(self, examples: Sequence[Pack]) -> dict[str, Tensor]:
        """Collates packs (at least one)."""
        rows = [_Row.of(example) for example in examples]
        if self.attention is PackedAttention.VARLEN:
            rows = [_Row.joined(rows)]
        longest = round_up(max(1, *(len(row.tokens) for row in rows)), self.pad_to_multiple_of)
        shape = (len(rows), longest)
        tokens = np.full(shape, self.pad_token_id, dtype=np.int64)
        labels = np.full(shape, IGNORED, dtype=np.int64)
        positions = np.empty(shape, dtype=np.int64)
        numbers = np.full(shape, -1, dtype=np.int64)
        # Padding may be longer than the model has positions: it begins anew as documents do.
        restart = max([1, *(int(row.positions.max(initial=0)) + 1 for row in rows)])
        for place, row in enumerate(rows):
            length = len(row.tokens)
            tokens[place, :length] = row.tokens
            labels[place, :length] = row.labels
            positions[place, :length] = row.positions
            positions[place, length:] = np.arange(longest - length) % restart
            numbers[place, :length] = row.numbers
        batch = {"input_ids": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}
        if self.attention.takes_positions:
            batch["position_ids"] = torch.from_numpy(positions)
        mask = block_mask(self.attention, torch.from_numpy(numbers), self.mask_dtype)
        if mask is not None:
            batch["attention_mask"] = mask
        return batch


@dataclass(frozen=True)
class _Row:
    """One row to be: `numbers` tells which document a token is of; all of shape (tokens,)."""

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    positions: NDArray[np.int64]
    numbers: NDArray[np.int64]

    @staticmethod
    def of(example: Pack) -> _Row:
        lengths = example["document_lengths"]
        numbers = np.repeat(np.arange(len(lengths)), lengths)
        positions = np.arange(len(numbers)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        labels = np.where(positions == 0, IGNORED, example["labels"])
        return _Row(example["input_ids"], labels, positions, numbers)

    @staticmethod
    def joined(rows: Sequence[_Row]) -> _Row:
        return _Row(*(np.concatenate([getattr(row, name) for row in rows]) for name in _Row.__annotations__))
