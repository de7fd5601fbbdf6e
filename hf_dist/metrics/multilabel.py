"""F1 and subset accuracy of multi-label classification, over scikit-learn."""

from __future__ import annotations

from typing import Any

import datasets
import evaluate
import numpy as np
from sklearn.metrics import accuracy_score, f1_score

_DESCRIPTION = """\
Micro F1 over all (row, class) decisions, macro F1 (the mean of the classes' F1; that of a class that occurs
neither in the references nor in the predictions is 0), and subset accuracy, the share of rows that are right
in every class.
"""

_INPUTS = """\
Args:
    predictions: a list of 0 and 1 a row, one number a class.
    references: the same.
Returns:
    f1_micro, f1_macro, subset_accuracy
"""


class MultiLabel(evaluate.Metric):
    """`compute(predictions=..., references=...)` -> f1_micro, f1_macro, subset_accuracy."""

    def _info(self) -> evaluate.MetricInfo:
        rows = datasets.Sequence(datasets.Value("int64"))
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": rows, "references": rows}),
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        predictions, references = np.array(predictions), np.array(references)
        return {
            "f1_micro": float(f1_score(references, predictions, average="micro", zero_division=0)),
            "f1_macro": float(f1_score(references, predictions, average="macro", zero_division=0)),
            "subset_accuracy": float(accuracy_score(references, predictions)),
        }
