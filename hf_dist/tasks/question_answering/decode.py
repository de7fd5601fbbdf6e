"""From start and end logits to answers: the span decoder of extractive question answering.

transformers 5 has no pipeline for it. `answer` runs a saved model on a question and a context; the rest is
what it, evaluation and prediction share: a context in overlapping windows, each window reduced to a few
candidates, and the candidates of all windows of a question put together.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_dist.data.device import to_host

OUTSIDE = -1
"""The offset of a token that is not part of the context."""


@dataclass(frozen=True)
class Candidates:
    """What is kept of a window's logits.

    Attributes:
        starts: (n,) positions of the highest start logits, highest first.
        start_logits: (n,) their logits.
        ends: (n,) positions of the highest end logits, highest first.
        end_logits: (n,) their logits.
        null: start logit plus end logit of the position that means "no answer in this window".
    """

    starts: NDArray[np.int64]
    start_logits: NDArray[np.float32]
    ends: NDArray[np.int64]
    end_logits: NDArray[np.float32]
    null: float


@dataclass(frozen=True)
class Answer:
    """A span of the context: `context[start:end] == text`, and the sum of its two logits."""

    text: str
    start: int
    end: int
    score: float


@dataclass(frozen=True)
class Decoded:
    """The answers to one question.

    Attributes:
        answers: the best spans over all windows, best first; empty where no candidate is a span.
        null_score: the score of "no answer" less that of the best span; infinite where there is no span. The
            score of "no answer" is the lowest of the windows: it takes all of them to say so.
    """

    answers: list[Answer]
    null_score: float

    def text(self, null_threshold: float | None) -> str:
        """The best span, or the empty text where `null_score` is above the threshold (None: never)."""
        if not self.answers or (null_threshold is not None and self.null_score > null_threshold):
            return ""
        return self.answers[0].text


@dataclass(frozen=True)
class Window:
    """A piece of the context behind the question, as the model takes it.

    Attributes:
        example: number of the question among those that were encoded.
        inputs: the tokenizer's columns (`input_ids`, ...), each a list with an entry a token.
        offsets: (tokens, 2) first character and end of each token in the context, white space left off;
            `OUTSIDE` for tokens of the question, special ones, and white space.
        null_position: the position that stands for "no answer in this window".
    """

    example: int
    inputs: dict[str, list[int]]
    offsets: NDArray[np.int64]
    null_position: int


def cut_questions(
    tokenizer: PreTrainedTokenizerBase, questions: Sequence[str], max_question_tokens: int
) -> list[str]:
    """The questions, each cut after its last whole token among the first `max_question_tokens`."""
    found = list(questions)
    left = list(range(len(found)))
    while left:
        encoded = tokenizer(
            [found[place] for place in left],
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        # A cut text may have other tokens than the whole one had: it is looked at again.
        offsets = dict(zip(left, encoded["offset_mapping"], strict=True))
        left = [place for place in left if len(offsets[place]) > max_question_tokens]
        for place in left:
            text = found[place][: offsets[place][max_question_tokens - 1][1]]
            found[place] = text if len(text) < len(found[place]) else found[place][:-1]
    return found


def windows(
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[str],
    contexts: Sequence[str],
    *,
    max_length: int,
    doc_stride: int,
) -> list[Window]:
    """Encodes each question with its context, in as many windows as the context needs, in order.

    Args:
        tokenizer: a fast one, which knows the characters of each token.
        questions: one a row; each must leave more than `doc_stride` tokens for the context.
        contexts: one a row.
        max_length: longest window in tokens, question and special tokens included.
        doc_stride: tokens of the context that a window shares with the one before.
    """
    encoded = tokenizer(
        list(questions),
        list(contexts),
        truncation="only_second",
        max_length=max_length,
        stride=doc_stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        return_attention_mask=False,
    )
    columns = [name for name in encoded if name not in ("offset_mapping", "overflow_to_sample_mapping")]
    solid = [_next_solid(context) for context in contexts]
    found = []
    for number, (example, pairs) in enumerate(
        zip(encoded["overflow_to_sample_mapping"], encoded["offset_mapping"], strict=True)
    ):
        offsets = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        # Byte-level tokenizers count the space before a word to it.
        offsets[:, 0] = np.minimum(solid[example][offsets[:, 0]], offsets[:, 1])
        outside = np.array([part != 1 for part in encoded.sequence_ids(number)])
        outside |= offsets[:, 0] >= offsets[:, 1]  # white space alone
        offsets[outside] = OUTSIDE
        inputs = {name: encoded[name][number] for name in columns}
        found.append(Window(example, inputs, offsets, null_position(inputs["input_ids"], tokenizer)))
    return found


def _next_solid(text: str) -> NDArray[np.int64]:
    """(characters + 1,) for each place, the first place from there on that holds no white space."""
    places = np.arange(len(text) + 1)
    solid = np.array([not character.isspace() for character in text] + [True])
    return np.minimum.accumulate(np.where(solid, places, len(text))[::-1])[::-1]


def null_position(input_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> int:
    """Where a window says that it holds no answer: its class token, or its first token."""
    cls = tokenizer.cls_token_id
    return list(input_ids).index(cls) if cls is not None and cls in input_ids else 0


def span_of(offsets: NDArray[np.int64], start: int, end: int) -> tuple[int, int] | None:
    """First and last token of the characters `start` to `end` (exclusive); None where some lie outside."""
    places = np.flatnonzero(offsets[:, 0] != OUTSIDE)
    if not len(places) or start < offsets[places[0], 0] or end > offsets[places[-1], 1]:
        return None
    first = np.searchsorted(offsets[places, 1], start, side="right")
    last = np.searchsorted(offsets[places, 0], end, side="left") - 1
    # Characters between two tokens, such as a lone space, belong to none.
    return (int(places[first]), int(places[last])) if first <= last else None


def best_candidates(
    start_logits: Tensor,
    end_logits: Tensor,
    batch: Mapping[str, Tensor],
    *,
    cls_token_id: int | None,
    n_best: int,
) -> list[Candidates]:
    """Reduces a batch of windows to their candidates; positions count from each row's first real token.

    Args:
        start_logits: (rows, length).
        end_logits: (rows, length).
        batch: `input_ids` and `attention_mask`, each (rows, length).
        cls_token_id: the class token, see `null_position`.
        n_best: starts and ends kept of a window.
    """
    mask = batch["attention_mask"].bool()
    first = mask.int().argmax(dim=1)
    starts = start_logits.float().masked_fill(~mask, -math.inf)
    ends = end_logits.float().masked_fill(~mask, -math.inf)
    null = first
    if cls_token_id is not None:
        is_cls = (batch["input_ids"] == cls_token_id) & mask
        null = torch.where(is_cls.any(dim=1), is_cls.int().argmax(dim=1), first)
    nulls = starts.gather(1, null[:, None]) + ends.gather(1, null[:, None])
    kept = min(n_best, mask.shape[1])
    best = [logits.topk(kept, dim=1) for logits in (starts, ends)]
    null_scores, *found = to_host(
        nulls[:, 0], *(one.indices - first[:, None] for one in best), *(one.values for one in best)
    )
    starts_at, ends_at, start_values, end_values = (tensor.numpy() for tensor in found)
    return [
        Candidates(
            starts=starts_at[row].copy(),
            start_logits=start_values[row].copy(),
            ends=ends_at[row].copy(),
            end_logits=end_values[row].copy(),
            null=null_score,
        )
        for row, null_score in enumerate(null_scores.tolist())
    ]


def decode(
    candidates: Sequence[Candidates],
    offsets: Sequence[NDArray[np.int64]],
    context: str,
    *,
    max_answer_tokens: int,
    n_best: int,
) -> Decoded:
    """Puts the candidates of all windows of one question together.

    A span of several windows counts once, with its best score.

    Args:
        candidates: one a window.
        offsets: (tokens, 2) of each window, as `Window` has them.
        context: the text that they count in.
        max_answer_tokens: longest span.
        n_best: how many answers are kept.
    """
    best: dict[tuple[int, int], float] = {}
    for found, places in zip(candidates, offsets, strict=True):
        for span, score in _spans(found, places, max_answer_tokens=max_answer_tokens, n_best=n_best):
            if score > best.get(span, -math.inf):
                best[span] = score
    ranked = sorted(best.items(), key=lambda item: (-item[1], item[0]))[:n_best]
    answers = [Answer(context[start:end], start, end, score) for (start, end), score in ranked]
    null = min(found.null for found in candidates)
    return Decoded(answers, null - answers[0].score if answers else math.inf)


def _spans(
    found: Candidates, places: NDArray[np.int64], *, max_answer_tokens: int, n_best: int
) -> Iterator[tuple[tuple[int, int], float]]:
    """The best `n_best` different spans of a window, in characters, with their scores."""
    starts, ends = found.starts[:, None], found.ends[None, :]
    scores = found.start_logits[:, None] + found.end_logits[None, :]
    valid = (ends >= starts) & (ends < starts + max_answer_tokens) & np.isfinite(scores)
    valid &= (starts >= 0) & (ends < len(places))
    rows, columns = np.nonzero(valid)
    first, last = places[found.starts[rows], 0], places[found.ends[columns], 1]
    inside = (first != OUTSIDE) & (last != OUTSIDE)
    first, last, kept = first[inside], last[inside], scores[rows, columns][inside]
    seen: set[tuple[int, int]] = set()
    for place in np.argsort(-kept, kind="stable"):
        span = int(first[place]), int(last[place])
        if span not in seen:
            seen.add(span)
            yield span, float(kept[place])
        if len(seen) == n_best:
            return


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    question: str,
    context: str,
    *,
    max_length: int = 384,
    doc_stride: int = 128,
    max_question_tokens: int = 64,
    max_answer_tokens: int = 30,
    n_best: int = 20,
) -> Decoded:
    """Answers one question from a context of any length.

    Args:
        model: of `AutoModelForQuestionAnswering`.
        tokenizer: its tokenizer, a fast one.
        question: the question.
        context: the text that holds the answer.
        max_length: longest window in tokens, as in training.
        doc_stride: tokens that windows share, as in training.
        max_question_tokens: a longer question is cut.
        max_answer_tokens: longest answer.
        n_best: how many answers are returned at most.
    """
    questions = cut_questions(tokenizer, [question], max_question_tokens)
    pieces = windows(tokenizer, questions, [context], max_length=max_length, doc_stride=doc_stride)
    takes = inspect.signature(model.forward).parameters
    found: list[Candidates] = []
    model.eval()
    for window in pieces:
        batch = {name: torch.tensor([value], device=model.device) for name, value in window.inputs.items()}
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        with torch.no_grad():
            outputs = model(**{name: value for name, value in batch.items() if name in takes})
        found += best_candidates(
            outputs["start_logits"],
            outputs["end_logits"],
            batch,
            cls_token_id=tokenizer.cls_token_id,
            n_best=n_best,
        )
    return decode(
        found,
        [window.offsets for window in pieces],
        context,
        max_answer_tokens=max_answer_tokens,
        n_best=n_best,
    )
