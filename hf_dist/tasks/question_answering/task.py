"""Extractive question answering: the span of a context that answers a question, or that there is none."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow.compute as pc
import torch
from datasets import Dataset, DatasetDict
from transformers import AutoModelForQuestionAnswering, PretrainedConfig, PreTrainedTokenizerBase

from hf_dist.config import DataConfig, ModelConfig
from hf_dist.data import labels
from hf_dist.data.builtin import question_answering as builtin_qa
from hf_dist.data.builtin import small_models
from hf_dist.data.loading import sources
from hf_dist.data.tokenizing import count_true, encode_rows
from hf_dist.errors import ConfigError, DataError
from hf_dist.metrics import load_metric
from hf_dist.tasks.base import Task
from hf_dist.tasks.items import SpanItems
from hf_dist.tasks.question_answering.decode import Candidates, Decoded, best_candidates, decode
from hf_dist.tasks.question_answering.encoding import CUT, EXAMPLE, LOST, QuestionWindows
from hf_dist.tasks.question_answering.rows import (
    QuestionAnsweringSettings,
    QuestionColumns,
    find_columns,
    hold_out_contexts,
    read_rows,
)

logger = logging.getLogger(__name__)

# Where one sentence (or "name:") of a context ends and the next begins, for the baseline.
_SENTENCE_END = re.compile(r"(?<=[.!?:])\s+|\n+")


class QuestionAnswering(Task[QuestionAnsweringSettings]):
    """The task as the Trainer and a recipe see it. `load` goes first.

    `load` gives every split the columns `id`, `question`, `context` and `answers` (absent where a test split
    has none). A context that is longer than a row of `max_length` tokens becomes several windows, each a row
    with the whole question. Questions without an answer are expected (SQuAD 2) where any labelled row has
    none, or `version_2_with_negative` says so; else the best span is always the answer (SQuAD 1).

    Attributes:
        with_negative: whether "no answer" is an answer.
    """

    name = "question_answering"
    auto_class = AutoModelForQuestionAnswering
    settings_class: ClassVar[type] = QuestionAnsweringSettings
    items = SpanItems()
    best_metric = "f1"

    def __init__(
        self, settings: QuestionAnsweringSettings | None = None, *, pad_to_multiple_of: int = 1
    ) -> None:
        super().__init__(settings, pad_to_multiple_of=pad_to_multiple_of)
        self.with_negative = self.settings.version_2_with_negative
        self._max_length: int | None = None
        self._columns: QuestionColumns | None = None
        self._cls_token_id: int | None = None

    def load(self, data: DataConfig, model: ModelConfig) -> DatasetDict:
        """Loads and checks the splits.

        Raises:
            DataError: something is wrong with a file, a column, a question, a context or an answer.
        """
        self._max_length = data.max_length
        splits = sources.load_splits(data, self.builtin_splits)
        self._columns = find_columns(splits, self.settings)
        loaded = DatasetDict({split: self.convert(rows, split) for split, rows in splits.items()})
        for split, rows in loaded.items():
            if "answers" not in rows.column_names:
                continue
            texts = pc.struct_field(labels.arrow_column(rows, "answers"), "text")
            none = int(pc.sum(pc.equal(pc.list_value_length(texts), 0)).as_py() or 0)
            if none:
                logger.info("%s: %d of %d questions have no answer", split, none, len(rows))
            self.with_negative |= none > 0
            if split == "train" and none == len(rows):
                raise DataError("no question of the training data has an answer; expected some that do")
        if "train" in loaded:
            loaded = hold_out_contexts(loaded, data)
        return sources.first_rows(loaded, data)

    def builtin_splits(self) -> DatasetDict:
        """Questions about methods of the standard library."""
        return builtin_qa.docstring_questions()

    def builtin_config(self, tokenizer: PreTrainedTokenizerBase, **head: Any) -> PretrainedConfig:
        """The built-in BERT, without dropout: it learns the same in half the steps."""
        return small_models.small_bert(
            tokenizer, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **head
        )

    def convert(self, rows: Dataset, split: str) -> Dataset:
        """Raw rows with the columns `id`, `question`, `context` and `answers`.

        Raises:
            DataError: something is wrong with a row.
        """
        assert self._columns is not None
        return read_rows(rows, self._columns, split, self.settings)

    def tokenizer(self, data: DataConfig, model: ModelConfig) -> PreTrainedTokenizerBase:
        """The tokenizer of the named model, the named tokenizer, or the built-in one.

        Raises:
            ConfigError: it can't be loaded, has no pad token, doesn't know which characters a token stands
                for, or `max_length` leaves no room for the context.
        """
        tokenizer = super().tokenizer(data, model)
        if not tokenizer.is_fast:
            raise ConfigError(
                f"the tokenizer {type(tokenizer).__name__} doesn't know which characters a token stands for; "
                "name a fast one (with a tokenizer.json) with --tokenizer_name"
            )
        question, stride = self.settings.max_question_tokens, self.settings.doc_stride
        special = tokenizer.num_special_tokens_to_add(pair=True)
        if data.max_length <= question + special + stride:
            raise ConfigError(
                f"--max_length {data.max_length} leaves no room for the context: --max_question_tokens "
                f"{question}, {special} special tokens and --doc_stride {stride} fill it; raise --max_length "
                "or lower the others"
            )
        return tokenizer

    def model_config(self, tokenizer: PreTrainedTokenizerBase, model: ModelConfig) -> PretrainedConfig:
        """The config of the named model, or of the built-in one.

        Raises:
            ConfigError: it can't be loaded, or tokenizer, `max_length` and model don't fit together.
        """
        if self._max_length is None:
            raise RuntimeError("QuestionAnswering.load must be called before model_config")
        return self.config_with_head(tokenizer, model, max_length=self._max_length)

    def encode(
        self, raw: DatasetDict, tokenizer: PreTrainedTokenizerBase, data: DataConfig
    ) -> tuple[DatasetDict, dict[str, int]]:
        """Tokenises what `load` returned, once on a machine.

        Returns:
            The windows of each split, with `input_ids`, `token_type_ids` (where the tokenizer makes them),
            `start_positions` and `end_positions`; all but `train` also keep what scores and records need. No
            context is truncated: the counts are 0.

        Raises:
            DataError: the answer of a training row lies whole in none of its windows.
        """
        self.pads_with(tokenizer)
        self._cls_token_id = tokenizer.cls_token_id
        settings = self.settings
        encoded = DatasetDict()
        for split, rows in raw.items():
            numbered = rows.add_column("row", np.arange(len(rows)))
            function = QuestionWindows(
                tokenizer=tokenizer,
                max_length=data.max_length,
                doc_stride=settings.doc_stride,
                max_question_tokens=settings.max_question_tokens,
                keep=split != "train",
            )
            key = [data.max_length, settings.doc_stride, settings.max_question_tokens, function.keep]
            found = encode_rows(numbered, function, split=split, tokenizer=tokenizer, data=data, key=key)
            if cut := count_true(found, CUT):
                logger.warning(
                    "%s: %d questions are cut to --max_question_tokens %d",
                    split,
                    cut,
                    settings.max_question_tokens,
                )
            if split == "train":
                self._refuse_lost(found, rows, data.max_length)
            if not data.streaming:
                logger.info("%s: %d windows of %d questions", split, len(found), len(rows))
            extra = [name for name in (CUT, LOST, EXAMPLE) if name in found.column_names]
            encoded[split] = found.remove_columns(extra)
        return encoded, dict.fromkeys(encoded, 0)

    def collate(self, examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Pads a batch: `input_ids`, ... (rows, length), `start_positions` and `end_positions` (rows,)."""
        batch = self.known(self.padding(examples))
        assert self._padding is not None
        length = batch["input_ids"].shape[1]
        for name in ("start_positions", "end_positions"):
            if name in examples[0]:
                shift = [
                    length - len(example["input_ids"]) if self._padding.side == "left" else 0
                    for example in examples
                ]
                batch[name] = torch.tensor([example[name] for example in examples]) + torch.tensor(shift)
        return batch

    def predict(self, outputs: Any, batch: Mapping[str, Any]) -> list[Candidates]:
        """The best starts and ends of each window, and its score of "no answer"."""
        return best_candidates(
            outputs["start_logits"],
            outputs["end_logits"],
            batch,
            cls_token_id=self._cls_token_id,
            n_best=self.settings.n_best,
        )

    def score(self, predictions: Sequence[Candidates], dataset: Dataset) -> dict[str, float]:
        """Exact match and F1 in percent, and those of a baseline.

        The baseline answers every question with the n-th sentence of its context, for the n that is best on
        these very rows; with negatives also with nothing, if that is better.
        """
        answered = list(self._answered(predictions, dataset))
        references = [
            {"id": row["id"], "answers": {"text": row["answers"], "answer_start": []}} for row, _ in answered
        ]
        metric = load_metric("squad")
        scores = metric.compute(
            predictions=[
                {
                    "id": row["id"],
                    "prediction_text": found.text(None),
                    "null_score": found.null_score if np.isfinite(found.null_score) else 1e9,
                }
                for row, found in answered
            ],
            references=references,
            null_threshold=self.settings.null_score_diff_threshold if self.with_negative else None,
        )
        constant = _constant_sentence([row for row, _ in answered], with_empty=self.with_negative)
        baseline = metric.compute(
            predictions=[
                {"id": row["id"], "prediction_text": text, "null_score": 0.0}
                for (row, _), text in zip(answered, constant, strict=True)
            ],
            references=references,
        )
        return {
            **scores,
            "exact_match_baseline": baseline["exact_match"],
            "f1_baseline": baseline["f1"],
        }

    def records(self, predictions: Sequence[Candidates], dataset: Dataset) -> Iterable[dict[str, Any]]:
        """The answer to each question, its place in the context, and its score."""
        threshold = self.settings.null_score_diff_threshold if self.with_negative else None
        for row, found in self._answered(predictions, dataset):
            text = found.text(threshold)
            record: dict[str, Any] = {"id": row["id"], "question": row["question"], "prediction": text}
            best = found.answers[0] if text and found.answers else None
            record["start"] = None if best is None else best.start
            record["score"] = None if best is None else round(best.score, 6)
            if self.with_negative:
                record["null_score"] = round(found.null_score, 6) if np.isfinite(found.null_score) else None
            yield record

    def usage(self) -> str:
        """The span decoder: transformers has no pipeline for question answering."""
        threshold = self.settings.null_score_diff_threshold if self.with_negative else None
        return (
            "from transformers import AutoModelForQuestionAnswering, AutoTokenizer\n\n"
            "from hf_dist.tasks.question_answering.decode import answer\n\n"
            "model = AutoModelForQuestionAnswering.from_pretrained(FOLDER)\n"
            "tokenizer = AutoTokenizer.from_pretrained(FOLDER)\n"
            'question = "What does close do?"\n'
            'context = "close: It is defined in io. Close the stream. It is a method of IOBase."\n'
            "found = answer(\n"
            "    model, tokenizer, question, context,\n"
            f"    max_length={self._max_length or 384}, doc_stride={self.settings.doc_stride},\n"
            ")\n"
            f"print(found.text(null_threshold={threshold}), found.answers[:3])\n"
        )

    # ---- Questions ----

    def _answered(
        self, predictions: Sequence[Candidates], dataset: Dataset
    ) -> Iterator[tuple[dict[str, Any], Decoded]]:
        """Each question of a split of windows, and the answers to it."""
        firsts = np.flatnonzero(pc.is_valid(labels.arrow_column(dataset, "id")).to_numpy())
        ends = np.append(firsts[1:], len(dataset))
        names = [name for name in ("id", "question", "context", "answers") if name in dataset.column_names]
        questions = dataset.select(firsts).select_columns(names)
        column = labels.arrow_column(dataset, "offsets")
        flat = pc.list_flatten(column).to_numpy()
        places = np.concatenate([[0], np.cumsum(pc.list_value_length(column).to_numpy())]).tolist()
        for row, first, end in zip(questions.to_list(), firsts.tolist(), ends.tolist(), strict=True):
            if "answers" in row:
                row["answers"] = json.loads(row["answers"])
            yield (
                row,
                decode(
                    predictions[first:end],
                    [flat[places[at] : places[at + 1]].reshape(-1, 2) for at in range(first, end)],
                    row["context"],
                    max_answer_tokens=self.settings.max_answer_tokens,
                    n_best=self.settings.n_best,
                ),
            )

    def _refuse_lost(self, found: Dataset, rows: Dataset, max_length: int) -> None:
        lost = np.flatnonzero(labels.arrow_column(found, LOST).to_numpy())
        if len(lost):
            numbers = np.unique(labels.arrow_column(found, EXAMPLE).to_numpy()[lost]).tolist()
            more = f" and of {len(numbers) - 1} more" if len(numbers) > 1 else ""
            raise DataError(
                f"the train data: the answer of id {rows[numbers[0]]['id']}{more} lies whole in no window; "
                f"raise --doc_stride ({self.settings.doc_stride}) above the longest answer, and --max_length "
                f"({max_length}) with it, or remove the rows"
            )


def _constant_sentence(rows: Sequence[Mapping[str, Any]], *, with_empty: bool) -> list[str]:
    """For each row the n-th sentence of its context (or its last), for the n with the highest mean F1."""
    sentences = [
        [part for part in _SENTENCE_END.split(row["context"]) if part.strip()] or [""] for row in rows
    ]
    choices = [
        [found[min(place, len(found) - 1)] for found in sentences]
        for place in range(min(12, max(map(len, sentences))))
    ]
    if with_empty:
        choices.append([""] * len(rows))

    # Here: the metric imports `evaluate`, which a recipe starts without.
    from hf_dist.metrics.squad import best_of, word_f1

    def mean_f1(texts: Sequence[str]) -> float:
        return sum(best_of(word_f1, text, row["answers"]) for text, row in zip(texts, rows, strict=True))

    return max(choices, key=mean_f1)
