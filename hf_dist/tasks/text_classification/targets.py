"""What a text's label is: one class, several, or a number; each kind knows its head, loss and scores.

All of them are built from the raw splits, with the same steps: `of` reads what the training rows say,
`values` gives a split its `labels` column.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import ClassLabel, Dataset, DatasetDict, List, Value

from hf_dist.data import labels
from hf_dist.data.class_list import FIRST_ROWS, SplitLabels, Words, all_classes, check_seen, learned
from hf_dist.data.device import to_host
from hf_dist.data.loading import sources
from hf_dist.errors import DataError
from hf_dist.metrics import load_metric
from hf_dist.tasks.items import ExampleItems
from hf_dist.tasks.pretrained import class_head
from hf_dist.tasks.text_classification.columns import Columns, TextClassificationSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SingleLabel:
    """One class a row.

    Order of the classes: a ClassLabel feature keeps its own; other labels are sorted as numbers if all are
    integers, else by code point. A fine-tuned model keeps its ids where it knows all labels of the training
    data, so that its head still means the same.
    """

    classes: tuple[str, ...]
    column: str
    items = ExampleItems("single_label")
    best_metric = "accuracy"

    @staticmethod
    def of(splits: DatasetDict, columns: Columns, known: Sequence[str], train: str) -> SingleLabel:
        """Finds the classes; `train` says which rows show them.

        Raises:
            DataError: there are too few, or a split has none of those that the training data shows.
        """
        column = columns.labels[0] if columns.labels else ""
        words = Words(column=column, train=train)
        names = {
            split: SplitLabels(found)
            for split in splits
            if (found := _names(splits[split], split, column)) is not None
        }
        if "train" not in names:
            classes = _of_model(known, names, words)
            order = list(classes)
        else:
            order = labels.class_order(splits["train"], column, names["train"].names)
            rows = len(splits["train"])
            if len(order) > max(20, rows // 2):
                logger.warning(
                    "%d different labels in %d rows: is %s the right column?", len(order), rows, column
                )
            own = isinstance(splits["train"].features[column], ClassLabel)
            classes = all_classes(names, order, known, words=words, keeps_order=own)
        if len(learned(order, known)) < 2:
            raise DataError(
                f"column {column} has one label in all training rows ({order[0]}); a classifier needs at "
                "least two"
            )
        return SingleLabel(classes, column)

    def head(self) -> dict[str, Any]:
        """Fields of the model's config."""
        return {**class_head(self.classes), "problem_type": "single_label_classification"}

    def values(self, rows: Dataset, split: str) -> tuple[Any, Any] | None:
        """Class ids (rows,) and their feature; None for a test split without labels."""
        names = _names(rows, split, self.column)
        if names is None:
            return None
        # Of a stream, `of` has seen the first rows only.
        words = Words(column=self.column)
        check_seen(SplitLabels(names), self.classes, split=split, words=words, by=FIRST_ROWS)
        return labels.label_ids(names, self.classes), ClassLabel(names=list(self.classes))

    def tensor(self, values: Sequence[int]) -> torch.Tensor:
        """(rows,) int64."""
        return torch.tensor(values, dtype=torch.int64)

    def constant(self, rows: Dataset) -> int:
        """The commonest class (the smallest of several)."""
        counts = Counter(class_ids(rows).tolist())
        return min(counts, key=lambda place: (-counts[place], place))

    def predict(self, logits: torch.Tensor, threshold: float) -> list[tuple[int, float]]:
        """The class with the highest logit and its probability, for each row."""
        best = torch.softmax(logits.float(), dim=-1).max(dim=-1)
        places, probabilities = to_host(best.indices, best.values)
        return list(zip(places.tolist(), probabilities.tolist(), strict=True))

    def record(self, prediction: tuple[int, float]) -> dict[str, Any]:
        """What predictions.jsonl shows."""
        return {"prediction": self.classes[prediction[0]], "probability": round(prediction[1], 6)}

    def score(self, predictions: Sequence[tuple[int, float]], rows: Dataset, constant: int) -> dict[str, Any]:
        """Accuracy and macro F1; the baseline is the accuracy of the answer `constant`."""
        references = class_ids(rows)
        answers = [place for place, _ in predictions]
        scores = load_metric("classification").compute(predictions=answers, references=references)
        return {**scores, "majority_baseline": float(np.mean(references == constant))}


@dataclass(frozen=True)
class MultiLabel:
    """Any number of classes a row."""

    classes: tuple[str, ...]
    columns: tuple[str, ...]
    separator: str | None
    items = ExampleItems("multi_label")
    best_metric = "f1_micro"

    @staticmethod
    def of(
        splits: DatasetDict,
        columns: Columns,
        known: Sequence[str],
        settings: TextClassificationSettings,
        train: str,
    ) -> MultiLabel:
        """Finds the classes; `train` says which rows show them.

        Raises:
            DataError: there are none, or a split has none of those that the training data shows.
        """
        found = MultiLabel((), columns.labels, settings.label_separator)
        words = Words(column=", ".join(columns.labels), train=train)
        names = {
            split: _flat(values)
            for split in splits
            if (values := found._names(splits[split], split)) is not None
        }
        if "train" not in names:
            return dataclasses.replace(found, classes=_of_model(known, names, words))
        order, own = list(columns.labels), True
        if len(columns.labels) == 1:
            feature = getattr(splits["train"].features[columns.labels[0]], "feature", None)
            own = isinstance(feature, ClassLabel)
            seen = labels.sorted_names(names["train"].found())
            order = list(feature.names) if isinstance(feature, ClassLabel) else seen
        if not order:
            raise DataError(f"column {columns.labels[0]} has no label in any training row")
        classes = all_classes(names, order, known, words=words, keeps_order=own)
        return MultiLabel(classes, columns.labels, settings.label_separator)

    def head(self) -> dict[str, Any]:
        """Fields of the model's config."""
        return {**class_head(self.classes), "problem_type": "multi_label_classification"}

    def values(self, rows: Dataset, split: str) -> tuple[Any, Any] | None:
        """Lists of class ids and their feature; None for a test split without labels."""
        names = self._names(rows, split)
        if names is None:
            return None
        words = Words(column=", ".join(self.columns))
        check_seen(_flat(names), self.classes, split=split, words=words, by=FIRST_ROWS)
        place = {name: at for at, name in enumerate(self.classes)}
        return [sorted({place[name] for name in row}) for row in names], List(Value("int64"))

    def tensor(self, values: Sequence[Sequence[int]]) -> torch.Tensor:
        """(rows, classes) float32 of 0 and 1."""
        found = torch.zeros(len(values), len(self.classes))
        for row, places in enumerate(values):
            found[row, list(places)] = 1.0
        return found

    def constant(self, rows: Dataset) -> list[int]:
        """The set of labels that is commonest."""
        counts: Counter[tuple[int, ...]] = Counter(tuple(row) for row in rows["labels"])
        return list(min(counts.items(), key=lambda one: (-one[1], one[0]))[0])

    def predict(self, logits: torch.Tensor, threshold: float) -> list[list[int]]:
        """The classes whose probability reaches the threshold, for each row."""
        (reached,) = to_host(torch.sigmoid(logits.float()) >= threshold)
        return [row.nonzero().flatten().tolist() for row in reached]

    def record(self, prediction: Sequence[int]) -> dict[str, Any]:
        """What predictions.jsonl shows."""
        return {"prediction": [self.classes[place] for place in prediction]}

    def score(
        self, predictions: Sequence[Sequence[int]], rows: Dataset, constant: Sequence[int]
    ) -> dict[str, Any]:
        """Micro and macro F1 and the share of rows that are right in all labels.

        The baseline is the micro F1 of the answer `constant` for every row, or of all labels where that is
        higher.
        """
        references = self.tensor(rows["labels"]).int().tolist()
        metric = load_metric("multilabel")

        def scores(answers: Sequence[Sequence[int]]) -> dict[str, float]:
            return metric.compute(predictions=self.tensor(answers).int().tolist(), references=references)

        every = list(range(len(self.classes)))
        constants = [scores([answer] * len(references))["f1_micro"] for answer in (constant, every)]
        return {**scores(predictions), "majority_baseline": max(constants)}

    def _names(self, rows: Dataset, split: str) -> list[list[str]] | None:
        """The labels of each row by name."""
        if not self.columns or any(name not in rows.column_names for name in self.columns):
            return None
        if len(self.columns) > 1:
            return self._of_columns(rows, split)
        column = self.columns[0]
        values = labels.arrow_column(rows, column).to_pylist()
        if split == "test" and all(value is None for value in values):
            return None
        missing = [row for row, value in enumerate(values) if value is None and self.separator is None]
        if missing:
            raise DataError(
                f"column {column} of the {split} data has no labels in {labels.rows_of(np.array(missing))}; "
                "write an empty list where no label holds"
            )
        feature = getattr(rows.features[column], "feature", None)
        named = feature.names if isinstance(feature, ClassLabel) else None
        found = []
        for row, value in enumerate(values):
            if isinstance(value, str) or value is None:
                if self.separator is None:
                    raise DataError(
                        f"column {column} of the {split} data holds text; expected lists of labels: name "
                        "what stands between the labels with --label_separator"
                    )
                parts = [part.strip() for part in (value or "").split(self.separator)]
                found.append([part for part in parts if part])
                continue
            if not isinstance(value, list) or any(part is None or isinstance(part, float) for part in value):
                raise DataError(
                    f"column {column} of the {split} data, row {row + 1} (counted from 1): found "
                    f"{value!r:.60}; expected a list of labels"
                )
            found.append([named[part] if named else str(part) for part in value])
        return found

    def _of_columns(self, rows: Dataset, split: str) -> list[list[str]]:
        flags = []
        for column in self.columns:
            values = labels.arrow_column(rows, column).to_pylist()
            wrong = [row for row, value in enumerate(values) if value not in (0, 1, "0", "1", True, False)]
            if wrong:
                raise DataError(
                    f"column {column} of the {split} data, row {wrong[0] + 1} (counted from 1): found "
                    f"{values[wrong[0]]!r:.60}; expected 0 or 1"
                )
            flags.append([bool(int(value)) for value in values])
        return [
            [name for name, flag in zip(self.columns, row, strict=True) if flag]
            for row in zip(*flags, strict=True)
        ]


@dataclass(frozen=True)
class Regression:
    """A number a row."""

    column: str
    items = ExampleItems("regression")
    best_metric = "r2"

    @staticmethod
    def of(splits: DatasetDict, columns: Columns) -> Regression:
        """Checks the numbers.

        Raises:
            DataError: a label is missing, or no finite number.
        """
        found = Regression(columns.labels[0] if columns.labels else "")
        for split, rows in splits.items():
            found.values(rows, split)
        return found

    def head(self) -> dict[str, Any]:
        """Fields of the model's config."""
        return {"num_labels": 1, "problem_type": "regression"}

    def values(self, rows: Dataset, split: str) -> tuple[Any, Any] | None:
        """(rows,) numbers and their feature; None for a test split without labels."""
        if self.column not in rows.column_names:
            return None
        values = labels.arrow_column(rows, self.column).to_pylist()
        if split == "test" and all(value is None for value in values):
            return None
        numbers = []
        for row, value in enumerate(values):
            try:
                number = float(value)
            except (TypeError, ValueError):
                number = math.nan
            if not math.isfinite(number):
                raise DataError(
                    f"column {self.column} of the {split} data, row {row + 1} (counted from 1): found "
                    f"{value!r:.60}; expected a number"
                )
            numbers.append(number)
        return np.array(numbers), Value("float64")

    def tensor(self, values: Sequence[float]) -> torch.Tensor:
        """(rows,) float32."""
        return torch.tensor(values, dtype=torch.float32)

    def constant(self, rows: Dataset) -> float:
        """The mean, which has the least squared error of all constants."""
        return float(np.mean(rows["labels"]))

    def predict(self, logits: torch.Tensor, threshold: float) -> list[float]:
        """The number of each row."""
        return logits.float().reshape(-1).tolist()

    def record(self, prediction: float) -> dict[str, Any]:
        """What predictions.jsonl shows."""
        return {"prediction": prediction}

    def score(self, predictions: Sequence[float], rows: Dataset, constant: float) -> dict[str, Any]:
        """Mean squared error, R2 and correlations; the baseline is the error of the answer `constant`."""
        references = np.array(rows["labels"], dtype=np.float64)
        scores = load_metric("regression").compute(predictions=predictions, references=references)
        return {**scores, "mse_baseline": float(np.mean((references - constant) ** 2))}


Target: TypeAlias = SingleLabel | MultiLabel | Regression


def find_target(
    splits: DatasetDict,
    columns: Columns,
    known: Sequence[str],
    settings: TextClassificationSettings,
    *,
    train: str = "the training data",
) -> Target:
    """The kind of label that the flags say, or that the training data's column shows; `train` names its rows.

    Raises:
        DataError: the labels can't be used.
    """
    problem = settings.problem
    first = splits[sources.first_split(splits)]
    if problem is None and columns.labels and columns.labels[0] in first.column_names:
        kind = labels.arrow_column(first, columns.labels[0]).type
        if settings.label_columns or settings.label_separator or pa.types.is_list(kind):
            problem = "multi_label"
        elif pa.types.is_floating(kind) and _has_fractions(first, columns.labels[0]):
            problem = "regression"
    if problem == "multi_label":
        return MultiLabel.of(splits, columns, known, settings, train)
    if problem == "regression":
        return Regression.of(splits, columns)
    return SingleLabel.of(splits, columns, known, train)


def class_ids(rows: Dataset) -> np.ndarray:
    """(rows,) the `labels` column."""
    return labels.arrow_column(rows, "labels").to_numpy()


def _has_fractions(rows: Dataset, column: str) -> bool:
    values = labels.arrow_column(rows, column).drop_null()
    return bool(len(values)) and not pc.all(pc.equal(values, pc.round(values))).as_py()


def _of_model(known: Sequence[str], names: Mapping[str, SplitLabels], words: Words) -> tuple[str, ...]:
    if not known:
        raise DataError(
            "there is no training data to take the classes from; give --train_file, or name a trained model"
        )
    for split, found in names.items():
        check_seen(found, known, split=split, words=words, by="the model")
    return tuple(known)


def _flat(rows: Sequence[Sequence[str]]) -> SplitLabels:
    flat = pa.array([name for row in rows for name in row], pa.string())
    return SplitLabels(pa.chunked_array([flat]), np.cumsum([0, *map(len, rows)]))


def _names(rows: Dataset, split: str, column: str) -> pa.ChunkedArray | None:
    """The label of each row; None for a test split without labels."""
    if column not in rows.column_names:
        return None
    names = labels.label_names(rows, column)
    if split == "test" and names.null_count == len(names):
        return None
    labels.check_labelled(names, column=column, split=split)
    return names
