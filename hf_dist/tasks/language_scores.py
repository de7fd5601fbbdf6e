"""Scores of language models, reduced row by row: logits over a vocabulary are never kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from hf_dist.data.collate import IGNORED
from hf_dist.data.device import to_device, to_host


class RowSums(NamedTuple):
    """What is kept of a row: sums over its target tokens.

    Attributes:
        nll: negative log likelihood, in nats.
        correct: tokens that have the highest logit.
        tokens: target tokens.
        unigram_nll: negative log likelihood under the baseline's token frequencies (0 without a baseline).
    """

    nll: float
    correct: int
    tokens: int
    unigram_nll: float


def row_sums(logits: Tensor, labels: Tensor, *, shift: bool, unigram: Tensor | None) -> list[RowSums]:
    """Reduces a batch.

    Args:
        logits: (rows, tokens, vocabulary).
        labels: (rows, tokens), -100 where nothing is predicted.
        shift: whether the logits at t predict the label at t + 1.
        unigram: (vocabulary,) negative log frequency of each token.
    """
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    # Where the targets are is decided on the host: a selection by a mask waits for the device to count it.
    (on_host,) = to_host(labels)
    kept = on_host != IGNORED
    tokens = kept.sum(dim=1).tolist()
    places = to_device(kept.nonzero()[:, 1], logits.device).split(tokens)
    nll, correct = [], []
    # Row by row, so that only one row's logits are copied to float32.
    for row, targets, place in zip(logits, labels, places, strict=True):
        wanted, scores = targets[place], row[place].float()
        nll.append(functional.cross_entropy(scores, wanted, reduction="sum"))
        correct.append((scores.argmax(dim=-1) == wanted).sum())
    if not tokens:
        return []
    losses, hits = to_host(torch.stack(nll), torch.stack(correct))
    frequencies = [
        0.0 if unigram is None else unigram[targets[real]].sum().item()
        for targets, real in zip(on_host, kept, strict=True)
    ]
    return list(map(RowSums, losses.tolist(), hits.tolist(), tokens, frequencies))


def score_sums(rows: Sequence[RowSums], *, with_baseline: bool) -> dict[str, float]:
    """Perplexity and the share of target tokens that have the highest logit.

    The baseline is the perplexity under the frequencies of the training tokens.
    """
    tokens = max(1, sum(row.tokens for row in rows))
    scores = {
        "perplexity": _exp(sum(row.nll for row in rows) / tokens),
        "token_accuracy": sum(row.correct for row in rows) / tokens,
    }
    if with_baseline:
        scores["perplexity_baseline"] = _exp(sum(row.unigram_nll for row in rows) / tokens)
    return scores


def unigram_nll(dataset: Dataset, column: str, vocabulary: int) -> Tensor:
    """Negative log frequency of each token in a column of lists, with one added to every count.

    Args:
        dataset: rows.
        column: lists of token ids; negative ones don't count.
        vocabulary: number of tokens.

    Returns:
        (vocabulary,) float64.
    """
    counts: NDArray[np.int64] = np.ones(vocabulary, dtype=np.int64)
    for table in dataset.select_columns([column]).with_format("arrow").iter(batch_size=10_000):
        for chunk in table.column(0).chunks:
            ids = chunk.flatten().to_numpy(zero_copy_only=False)
            counts += np.bincount(ids[ids >= 0], minlength=vocabulary)[:vocabulary]
    return torch.from_numpy(-np.log(counts / counts.sum()))


def record_of(row: RowSums) -> dict[str, Any]:
    """What predictions.jsonl shows of a row."""
    return {"perplexity": _exp(row.nll / max(1, row.tokens)), "tokens": row.tokens, "correct": row.correct}


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))
