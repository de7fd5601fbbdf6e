"""Accuracy and macro F1 of single-label classification, over scikit-learn."""

from __future__ import annotations

from typing import Any

import datasets
import evaluate
from sklearn.metrics import accuracy_score, f1_score

_DESCRIPTION = """\
Accuracy, the share of rows whose class is predicted, and macro F1, the mean over classes of
2 * true positives / (2 * true positives + false positives + false negatives). The classes are those that
occur in the references or the predictions; the F1 of a class that is never predicted is 0.
"""

_INPUTS = """\
Args:
    predictions: class ids, one a row.
    references: class ids, one a row.
Returns:
    accuracy, f1_macro
"""


class Classification(evaluate.Metric):
    """`compute(predictions=..., references=...)` -> `{"accuracy": ..., "f1_macro": ...}`."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features(
                {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {
            "accuracy": float(accuracy_score(references, predictions)),
            "f1_macro": float(f1_score(references, predictions, average="macro", zero_division=0)),
        }
