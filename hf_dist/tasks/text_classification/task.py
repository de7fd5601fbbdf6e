"""Text classification: a class, several classes or a number for a text, or for a pair of texts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from datasets import Dataset, DatasetDict
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedTokenizerBase

from hf_dist.config import DataConfig, ModelConfig
from hf_dist.data.builtin import text_classification as builtin
from hf_dist.data.class_list import shown_by
from hf_dist.data.loading import sources
from hf_dist.data.tokenizing import tokenise
from hf_dist.tasks.base import Task, refuse_empty
from hf_dist.tasks.items import ExampleItems
from hf_dist.tasks.pretrained import classes_of, load_config
from hf_dist.tasks.text_classification.columns import (
    Columns,
    TextClassificationSettings,
    check_texts,
    find_columns,
    joined,
)
from hf_dist.tasks.text_classification.targets import SingleLabel, Target, class_ids, find_target


class TextClassification(Task[TextClassificationSettings]):
    """The task as the Trainer and a recipe see it. `load` goes first: it finds the classes.

    `load` gives every split the columns `text`, `text_pair` (where there are pairs) and `labels` (class
    ids, lists of them, or numbers; absent where a test split has none), so that nothing later depends on
    the source.

    Attributes:
        target: what a label is, known once `load` has run.
        constant: the baseline's answer, from the training rows; None where there are none.
    """

    name = "text_classification"
    auto_class = AutoModelForSequenceClassification
    settings_class: ClassVar[type] = TextClassificationSettings

    def __init__(
        self, settings: TextClassificationSettings | None = None, *, pad_to_multiple_of: int = 8
    ) -> None:
        super().__init__(settings, pad_to_multiple_of=pad_to_multiple_of)
        self.target: Target = SingleLabel((), "")
        self.constant: Any = None
        self._max_length: int | None = None
        self._columns: Columns | None = None

    @property
    def items(self) -> ExampleItems:
        """One item an example."""
        return self.target.items

    @property
    def best_metric(self) -> str:  # type: ignore[override]
        """Accuracy, micro F1 or R2."""
        return self.target.best_metric

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes in the order of their ids; none for a regression."""
        return getattr(self.target, "classes", ())

    def load(self, data: DataConfig, model: ModelConfig) -> DatasetDict:
        """Loads and checks the splits.

        Raises:
            DataError: something is wrong with a file, a column or a label.
            ConfigError: the named model has no readable config.
        """
        self._max_length = data.max_length
        splits = sources.load_splits(data, self.builtin_splits)
        self._columns = columns = find_columns(splits, self.settings)
        known = classes_of(load_config(model)) if model.model_name_or_path is not None else ()
        self.target = find_target(splits, columns, known, self.settings, train=shown_by(data))
        loaded = DatasetDict({split: self.convert(rows, split) for split, rows in splits.items()})
        if "train" in loaded:
            # One class a row: both splits get the same shares of the classes.
            strata = class_ids(loaded["train"]) if isinstance(self.target, SingleLabel) else None
            loaded = sources.hold_out(loaded, data, strata)
        loaded = sources.first_rows(loaded, data)
        self.constant = self.target.constant(loaded["train"]) if "train" in loaded else None
        return loaded

    def builtin_splits(self) -> DatasetDict:
        """Docstrings and the modules they come from."""
        return builtin.docstring_modules()

    def convert(self, rows: Dataset, split: str) -> Dataset:
        """`text`, `text_pair` and `labels` of raw rows.

        Raises:
            DataError: a text or a label is missing, or of another kind.
        """
        assert self._columns is not None
        check_texts(rows, self._columns, split=split)
        loaded = joined(rows, self._columns)
        labelled = self.target.values(rows, split)
        if labelled is not None:
            loaded = loaded.add_column("labels", labelled[0], feature=labelled[1])
        return loaded

    def model_config(self, tokenizer: PreTrainedTokenizerBase, model: ModelConfig) -> PretrainedConfig:
        """The config of the named model, or of the built-in one, with the head that the labels need.

        Raises:
            ConfigError: it can't be loaded, or tokenizer, `max_length` and model don't fit together.
        """
        if self._max_length is None:
            raise RuntimeError("TextClassification.load must be called before model_config")
        return self.config_with_head(tokenizer, model, max_length=self._max_length, **self.target.head())

    def encode(
        self, raw: DatasetDict, tokenizer: PreTrainedTokenizerBase, data: DataConfig
    ) -> tuple[DatasetDict, dict[str, int]]:
        """Tokenises what `load` returned, once on a machine.

        Returns:
            The splits with `input_ids`, `token_type_ids` (where the tokenizer makes them) and `labels`,
            and how many rows of each were truncated.

        Raises:
            DataError: a text has no token.
        """
        self.pads_with(tokenizer)
        first = next(iter(raw.values()))
        texts = tuple(name for name in ("text", "text_pair") if name in first.column_names)
        encoded, truncated = tokenise(raw, tokenizer, data, texts=texts)
        refuse_empty(encoded)
        return encoded, truncated

    def collate(self, examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Pads a batch: `input_ids`, `attention_mask`, ... (rows, length), and `labels`."""
        batch = self.known(self.padding(examples))
        if "labels" in examples[0]:
            batch["labels"] = self.target.tensor([example["labels"] for example in examples])
        return batch

    def predict(self, outputs: Any, batch: Mapping[str, Any]) -> list[Any]:
        """The answer for each row: class and probability, classes, or a number."""
        return list(self.target.predict(outputs["logits"], self.settings.threshold))

    def records(self, predictions: Sequence[Any], dataset: Any) -> Iterable[dict[str, Any]]:
        """One record a row, with the names of the classes."""
        return map(self.target.record, predictions)

    def score(self, predictions: Sequence[Any], dataset: Dataset) -> dict[str, float]:
        """The scores of the kind of label, and those of a baseline that answers all rows alike.

        The baseline's answer is made from the training rows; where there are none, from the rows that are
        scored, so that no constant answer beats it.
        """
        constant = self.target.constant(dataset) if self.constant is None else self.constant
        return self.target.score(predictions, dataset, constant)  # type: ignore[arg-type]

    def usage(self) -> str:
        """A pipeline."""
        call = "classify(text, top_k=None)" if self.items.problem == "multi_label" else "classify(text)"
        if self.items.problem == "regression":
            call = 'classify(text, function_to_apply="none")'
        return (
            "from transformers import pipeline\n\n"
            'text = "Return the sum of two numbers."\n'
            'classify = pipeline("text-classification", model=FOLDER)\n'
            f"print({call})\n"
        )
