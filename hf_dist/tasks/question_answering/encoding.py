"""Questions and contexts as windows of tokens, with the places of their answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from hf_dist.tasks.question_answering.decode import Window, cut_questions, span_of, windows

CUT, LOST, EXAMPLE = "question_cut", "answer_lost", "example"
"""Columns: the question was cut, the answer lies whole in no window, and the number of the question."""


@dataclass(frozen=True, kw_only=True)
class QuestionWindows:
    """Questions and contexts -> windows with `start_positions` and `end_positions`.

    A window that doesn't hold the whole (first) answer says so by the position of its class token. With
    `keep` each window also has `offsets` (two numbers a token), and the first one of each question the
    columns that it came with; those of the others are null. `CUT`, `LOST` and `EXAMPLE` are for checks.

    Attributes:
        tokenizer: a fast one.
        max_length: longest window.
        doc_stride: tokens that windows share.
        max_question_tokens: longer questions are cut.
        keep: whether the windows are for evaluation.
    """

    tokenizer: PreTrainedTokenizerBase
    max_length: int
    doc_stride: int
    max_question_tokens: int
    keep: bool

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Columns of a batch -> the columns that replace them."""
        questions = cut_questions(self.tokenizer, batch["question"], self.max_question_tokens)
        cut = [one != whole for one, whole in zip(questions, batch["question"], strict=True)]
        found = windows(
            self.tokenizer,
            questions,
            batch["context"],
            max_length=self.max_length,
            doc_stride=self.doc_stride,
        )
        columns: dict[str, list[Any]] = {
            name: [one.inputs[name] for one in found] for name in found[0].inputs
        }
        first = [place == 0 or found[place - 1].example != one.example for place, one in enumerate(found)]
        columns[CUT] = [new and cut[one.example] for new, one in zip(first, found, strict=True)]
        if "answers" in batch:
            self._positions(columns, batch, found)
        if self.keep:
            columns["offsets"] = [one.offsets.astype(np.int32).reshape(-1) for one in found]
            kept = {name: batch[name] for name in ("id", "question", "context")}
            if "answers" in batch:
                # As JSON: of a batch of empty lists Arrow couldn't tell what they are lists of.
                kept["answers"] = [json.dumps(answers["text"]) for answers in batch["answers"]]
            for name, values in kept.items():
                columns[name] = [
                    values[one.example] if new else None for new, one in zip(first, found, strict=True)
                ]
        return columns

    def _positions(
        self, columns: dict[str, list[Any]], batch: Mapping[str, list[Any]], found: Sequence[Window]
    ) -> None:
        spans: list[tuple[int, int]] = []
        held = [not answers["text"] for answers in batch["answers"]]
        for window in found:
            answers = batch["answers"][window.example]
            span = None
            if answers["text"]:
                text, start = answers["text"][0], answers["answer_start"][0]
                solid = text.strip()
                start += text.index(solid)
                span = span_of(window.offsets, start, start + len(solid))
            held[window.example] |= span is not None
            spans.append(span or (window.null_position, window.null_position))
        columns["start_positions"] = [start for start, _ in spans]
        columns["end_positions"] = [end for _, end in spans]
        columns[LOST] = [not held[window.example] for window in found]
        columns[EXAMPLE] = [batch["row"][window.example] for window in found]
