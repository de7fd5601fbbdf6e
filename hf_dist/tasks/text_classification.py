"""Text classification: one class for a text, or for a pair of texts."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import ClassLabel, Dataset, DatasetDict
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedTokenizerBase

from hf_dist.config import DataConfig, ModelConfig
from hf_dist.data import builtin, builtin_model, labels, sources
from hf_dist.data.collate import Padding
from hf_dist.data.tokenizing import tokenise
from hf_dist.errors import DataError, nearest
from hf_dist.metrics import load_metric
from hf_dist.tasks.items import ExampleItems
from hf_dist.tasks.pretrained import check_fit, load_config, load_tokenizer

logger = logging.getLogger(__name__)

TEXT_COLUMNS = ("text", "sentence", "content", "review", "document", "body", "tweet", "comment")
PAIR_COLUMNS = (
    ("sentence1", "sentence2"),
    ("sentence_a", "sentence_b"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("text1", "text2"),
    ("text", "text_pair"),
)
LABEL_COLUMNS = ("label", "labels", "class", "target", "category")


@dataclass(frozen=True)
class _Columns:
    """Where the data has what the task needs."""

    text: str
    pair: str | None
    label: str | None

    @property
    def texts(self) -> dict[str, str]:
        """Our names of the text columns by those of the data."""
        return {self.text: "text"} if self.pair is None else {self.text: "text", self.pair: "text_pair"}


class TextClassification:
    """The task as the Trainer and a recipe see it. `load` goes first: it finds the classes.

    `load` gives every split the columns `text`, `text_pair` (where there are pairs) and `labels` (class
    ids; absent where a test split has none), so that nothing later depends on the source.

    Order of the classes: a ClassLabel feature keeps its own; other labels are sorted as numbers if all are
    integers, else by code point. A fine-tuned model keeps its ids where it knows all labels of the training
    data, so that its head still means the same.

    Attributes:
        classes: names of the classes in the order of their ids.
        majority_class: id of the commonest label of the training rows (the smallest of several); None
            where there are none.
        pad_to_multiple_of: rows of a batch are padded to a multiple of this many tokens.
    """

    name = "text_classification"
    items = ExampleItems("single_label")
    best_metric = "accuracy"
    auto_class = AutoModelForSequenceClassification

    def __init__(self, *, pad_to_multiple_of: int = 8) -> None:
        self.pad_to_multiple_of = pad_to_multiple_of
        self.classes: tuple[str, ...] = ()
        self.majority_class: int | None = None
        self._max_length: int | None = None
        self._padding: Padding | None = None
        self._forward_takes: frozenset[str] | None = None

    def load(self, data: DataConfig, model: ModelConfig) -> DatasetDict:
        """Loads and checks the splits.

        Raises:
            DataError: something is wrong with a file, a column or a label.
            ConfigError: the named model has no readable config.
        """
        self._max_length = data.max_length
        splits = sources.load_splits(data, builtin.docstring_modules)
        columns = _find_columns(splits, data)
        _check_texts(splits, columns)
        names = {
            split: found for split in splits if (found := _label_names(splits, split, columns)) is not None
        }

        known = _classes_of_model(load_config(model)) if model.model_name_or_path is not None else ()
        self.classes = _choose_classes(splits, names, columns, known)
        self._check_classes(names, columns, known)
        loaded = DatasetDict()
        for split, rows in splits.items():
            loaded[split] = rows.select_columns(list(columns.texts)).rename_columns(
                {theirs: ours for theirs, ours in columns.texts.items() if theirs != ours}
            )
            if split in names:
                ids = labels.label_ids(names[split], self.classes)
                feature = ClassLabel(names=list(self.classes))
                loaded[split] = loaded[split].add_column("labels", ids, feature=feature)
        if "train" in loaded:
            loaded = sources.hold_out(loaded, data.validation_fraction, _ids(loaded["train"]))
        loaded = sources.first_rows(loaded, data)
        self.majority_class = _commonest(_ids(loaded["train"])) if "train" in loaded else None
        return loaded

    def tokenizer(self, data: DataConfig, model: ModelConfig) -> PreTrainedTokenizerBase:
        """The tokenizer of the named model, the named tokenizer, or the built-in one.

        Raises:
            ConfigError: it can't be loaded, or has no pad token.
        """
        if model.model_name_or_path is None and model.tokenizer_name is None:
            return builtin_model.bpe_tokenizer()
        return load_tokenizer(model)

    def model_config(self, tokenizer: PreTrainedTokenizerBase, model: ModelConfig) -> PretrainedConfig:
        """The config of the named model, or of the built-in one, with the classes that `load` found.

        Raises:
            ConfigError: it can't be loaded, or tokenizer, `max_length` and model don't fit together.
        """
        if not self.classes or self._max_length is None:
            raise RuntimeError("TextClassification.load must be called before model_config")
        head = {
            "num_labels": len(self.classes),
            "id2label": dict(enumerate(self.classes)),
            "label2id": {name: place for place, name in enumerate(self.classes)},
            "problem_type": "single_label_classification",
        }
        if model.model_name_or_path is None:
            config: PretrainedConfig = builtin_model.small_bert(tokenizer, **head)
        else:
            config = load_config(model, **head)
        if config.get_text_config().pad_token_id is None:
            # Decoder models read their answer at the last token that isn't padding.
            config.get_text_config().pad_token_id = tokenizer.pad_token_id
        check_fit(tokenizer, config, max_length=self._max_length, pad_to_multiple_of=self.pad_to_multiple_of)
        self._forward_takes = _forward_parameters(config)
        return config

    def encode(
        self, raw: DatasetDict, tokenizer: PreTrainedTokenizerBase, data: DataConfig
    ) -> tuple[DatasetDict, dict[str, int]]:
        """Tokenises what `load` returned, once on a machine.

        Returns:
            The splits with `input_ids`, `token_type_ids` (where the tokenizer makes them) and `labels`,
            and how many rows of each were truncated.
        """
        self._padding = Padding.of(tokenizer, pad_to_multiple_of=self.pad_to_multiple_of)
        first = next(iter(raw.values()))
        texts = tuple(name for name in ("text", "text_pair") if name in first.column_names)
        return tokenise(raw, tokenizer, data, texts=texts)

    def collate(self, examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Pads a batch: `input_ids`, `attention_mask`, ... (rows, length) and `labels` (rows,)."""
        if self._padding is None:
            raise RuntimeError("TextClassification.encode must be called before collate")
        batch = self._padding(examples)
        if self._forward_takes is not None:
            batch = {name: value for name, value in batch.items() if name in self._forward_takes}
        if "labels" in examples[0]:
            batch["labels"] = torch.tensor([example["labels"] for example in examples], dtype=torch.int64)
        return batch

    def predict(self, outputs: Any, batch: Mapping[str, Any]) -> list[int]:
        """The class id with the highest logit, for each row."""
        return outputs["logits"].argmax(dim=-1).tolist()

    def describe(self, prediction: int) -> str:
        """The class's name, as predictions.jsonl shows it."""
        return self.classes[prediction]

    def score(self, predictions: Sequence[int], dataset: Dataset) -> dict[str, float]:
        """Accuracy, macro F1, and the accuracy of the majority baseline on the same rows.

        The baseline answers every row with the commonest label of the training rows; where there are no
        training rows, with the commonest of the rows that are scored, which no constant answer beats.
        """
        references = _ids(dataset)
        majority = _commonest(references) if self.majority_class is None else self.majority_class
        scores = load_metric("classification").compute(predictions=predictions, references=references)
        return {**scores, "majority_baseline": float(np.mean(references == majority))}

    def _check_classes(
        self, names: Mapping[str, pa.ChunkedArray], columns: _Columns, known: Sequence[str]
    ) -> None:
        trained = set(pc.unique(names["train"]).to_pylist()) if "train" in names else set()
        if tuple(known) == self.classes or "train" not in names:
            trained |= set(self.classes)
        by = "the training data" if "train" in names else "the model"
        for split, found in names.items():
            if split != "train":
                labels.check_seen(found, sorted(trained), column=str(columns.label), split=split, by=by)
        if len(self.classes) < 2:
            raise DataError(
                f"column {columns.label} has one label in all training rows ({self.classes[0]}); a "
                "classifier "
                "needs at least two"
            )


def _find_columns(splits: DatasetDict, data: DataConfig) -> _Columns:
    """Finds the columns in the first split; the others must have the same."""
    first = next(split for split in ("train", "validation", "test") if split in splits)
    there = splits[first].column_names
    text, pair = data.text_column, data.text_pair_column
    if text is None and pair is None:
        lower = {name.lower(): name for name in reversed(there)}
        text, pair = next(
            ((lower[a], lower[b]) for a, b in PAIR_COLUMNS if a in lower and b in lower), (None, None)
        )
    text = sources.find_column(there, text, TEXT_COLUMNS, flag="text_column")
    pair = None if pair is None else sources.find_column(there, pair, (), flag="text_pair_column")
    if first == "test" and data.label_column is None:
        label = sources.usual_column(there, LABEL_COLUMNS)
    else:
        label = sources.find_column(there, data.label_column, LABEL_COLUMNS, flag="label_column")
    if len({text, pair, label}) < 3 and (pair is not None or text == label):
        raise DataError(f"text {text}, text pair {pair} and label {label} must be different columns")
    for split, rows in splits.items():
        needed = [name for name in (text, pair, label if split != "test" else None) if name is not None]
        for name in needed:
            if name not in rows.column_names:
                raise DataError(
                    f"the {split} data has no column {name}{nearest(name, rows.column_names)}, which the "
                    f"{first} "
                    f"data has; it has {', '.join(rows.column_names)}"
                )
    logger.info("columns: text %s, %slabel %s", text, f"pair {pair}, " if pair else "", label or "none")
    return _Columns(text, pair, label)


def _check_texts(splits: DatasetDict, columns: _Columns) -> None:
    for split, rows in splits.items():
        for column in columns.texts:
            blank = labels.check_text(rows, column, split=split)
            if blank:
                logger.warning("%s: %d rows with a blank %s are kept", split, blank, column)


def _label_names(splits: DatasetDict, split: str, columns: _Columns) -> pa.ChunkedArray | None:
    """The label of each row; None for a test split without labels."""
    rows, column = splits[split], columns.label
    if column is None or column not in rows.column_names:
        return None
    names = labels.label_names(rows, column)
    if split == "test" and names.null_count == len(names):
        return None
    labels.check_labelled(names, column=column, split=split)
    return names


def _choose_classes(
    splits: DatasetDict, names: Mapping[str, pa.ChunkedArray], columns: _Columns, known: Sequence[str]
) -> tuple[str, ...]:
    if "train" not in names:
        if not known:
            raise DataError(
                "there is no training data to take the classes from; give --train_file, or name a trained "
                "model"
            )
        return tuple(known)
    assert columns.label is not None
    order = labels.class_order(splits["train"], columns.label, names["train"])
    rows = len(names["train"])
    if len(order) > max(20, rows // 2):
        logger.warning(
            "%d different labels in %d rows: is %s the right column?", len(order), rows, columns.label
        )
    return tuple(known if set(order) <= set(known) else order)


def _classes_of_model(config: PretrainedConfig) -> tuple[str, ...]:
    """The classes a model was trained on; numbers where its config has only the placeholder names."""
    found = [str(name) for _, name in sorted((config.id2label or {}).items())]
    if found == [f"LABEL_{place}" for place in range(len(found))]:
        return tuple(str(place) for place in range(len(found)))
    return tuple(found)


def _forward_parameters(config: PretrainedConfig) -> frozenset[str] | None:
    """Names that the model's forward takes; None for a class that transformers doesn't list."""
    mapping: Any = AutoModelForSequenceClassification._model_mapping
    if type(config) not in mapping:
        return None
    listed = mapping[type(config)]
    model_class = listed[0] if isinstance(listed, tuple) else listed
    return frozenset(inspect.signature(model_class.forward).parameters)


def _ids(dataset: Dataset) -> np.ndarray:
    return labels.arrow_column(dataset, "labels").to_numpy()


def _commonest(ids: np.ndarray) -> int:
    counts = Counter(ids.tolist())
    return min(counts, key=lambda place: (-counts[place], place))
