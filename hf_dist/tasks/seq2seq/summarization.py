"""Summarization: a short text for a long one, by an encoder-decoder that generates it."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from datasets import Dataset, DatasetDict
from transformers import PreTrainedTokenizerBase

from hf_dist.config import DataConfig, ModelConfig, option
from hf_dist.data.builtin import seq2seq as builtin_seq2seq
from hf_dist.data.loading import sources
from hf_dist.metrics import load_metric
from hf_dist.tasks.seq2seq.base import Seq2Seq, Seq2SeqSettings
from hf_dist.tasks.seq2seq.encoding import take_texts

logger = logging.getLogger(__name__)

_ROUGE_LETTERS = re.compile(r"[a-z0-9]", re.IGNORECASE)

TEXT_COLUMNS = ("document", "article", "text", "dialogue", "content", "body", "source", "input")
SUMMARY_COLUMNS = ("summary", "highlights", "target", "abstract", "headline", "title", "output")


@dataclass(frozen=True, kw_only=True)
class SummarizationSettings(Seq2SeqSettings):
    """Flags of summarization."""

    text_column: str | None = option(None, "Column with the long texts; default: found by the usual names.")
    summary_column: str | None = option(
        None, "Column with their summaries; default: found by the usual names."
    )
    rouge_stemmer: bool = option(True, "Compare English words by their stems in ROUGE.")


class Summarization(Seq2Seq[SummarizationSettings]):
    """Summaries, scored by ROUGE against the given ones.

    Attributes:
        target_words: mean number of words of a training summary, the length of the baseline's answers; None
            where there are no training rows.
    """

    name = "summarization"
    settings_class: ClassVar[type] = SummarizationSettings
    best_metric = "rougeL"
    example = (
        "def read_lines(path, limit):\n    with open(path) as file:\n        return list(islice(file, limit))"
    )

    def __init__(self, settings: SummarizationSettings | None = None, *, pad_to_multiple_of: int = 1) -> None:
        super().__init__(settings, pad_to_multiple_of=pad_to_multiple_of)
        self.target_words: float | None = None

    def builtin_splits(self) -> DatasetDict:
        """Functions of the standard library, and what each is called, takes and calls."""
        return builtin_seq2seq.outlines()

    def builtin_tokenizer(self) -> PreTrainedTokenizerBase:
        """Trained on the training split of the built-in data."""
        return builtin_seq2seq.outline_tokenizer()

    def pairs(self, splits: DatasetDict, *, builtin: bool) -> DatasetDict:
        """The splits with the columns `source` and `target`."""
        first = next(iter(splits.values())).column_names
        text = sources.find_column(first, self.settings.text_column, TEXT_COLUMNS, flag="text_column")
        others = [name for name in first if name != text]
        wanted = self.settings.summary_column
        summary: str | None = wanted or sources.usual_column(others, SUMMARY_COLUMNS)
        if wanted is not None or (summary is None and list(splits) != ["test"]):
            summary = sources.find_column(others, wanted, SUMMARY_COLUMNS, flag="summary_column")
        if not builtin:
            logger.info("texts from column %s, summaries from column %s", text, summary)
        flag = "--text_column or --summary_column"
        return DatasetDict(
            {
                split: take_texts(rows, split, source=text, target=summary, flag=flag)
                for split, rows in splits.items()
            }
        )

    def load(self, data: DataConfig, model: ModelConfig) -> DatasetDict:
        """As `Seq2Seq.load`; also measures the training summaries for the baseline."""
        loaded = super().load(data, model)
        self.target_words = _mean_words(loaded["train"]) if "train" in loaded else None
        return loaded

    def measure(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        """ROUGE-1, -2, -L and -Lsum: mean F-measures between 0 and 1."""
        unseen = sum(not _ROUGE_LETTERS.search(text) and bool(text.strip()) for text in references)
        if unseen > len(references) // 2:
            logger.warning(
                "%d of %d summaries have none of the letters a-z or digits that rouge-score knows: they "
                "score 0, whatever is written",
                unseen,
                len(references),
            )
        return load_metric("rouge").compute(
            predictions=predictions, references=references, use_stemmer=self.settings.rouge_stemmer
        )

    def baseline(self, dataset: Dataset) -> list[str]:
        """The first words of each text, as many as a training summary has on average ("lead").

        Where there are no training rows, as many as a summary of the rows that are scored.
        """
        mean = _mean_words(dataset) if self.target_words is None else self.target_words
        most = max(1, round(mean))
        return [" ".join(text.split()[:most]) for text in dataset["source"]]


def _mean_words(rows: Dataset) -> float:
    return float(np.mean([len(text.split()) for text in rows["target"]]))
