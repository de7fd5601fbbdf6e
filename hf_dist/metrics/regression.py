"""Errors and correlations of predicted numbers, over scikit-learn and scipy."""

from __future__ import annotations

from typing import Any

import datasets
import evaluate
import numpy as np
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import mean_squared_error, r2_score

_DESCRIPTION = """\
Mean squared error, R2 (1 - squared error / variance of the references), and the correlations of Pearson and
of Spearman (ranks); a correlation is 0 where the predictions or the references are all the same.
"""

_INPUTS = """\
Args:
    predictions: a number a row.
    references: the same.
Returns:
    mse, r2, pearson, spearman
"""


class Regression(evaluate.Metric):
    """`compute(predictions=..., references=...)` -> mse, r2, pearson, spearman."""

    def _info(self) -> evaluate.MetricInfo:
        number = datasets.Value("float64")
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": number, "references": number}),
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        varies = len(predictions) > 1 and np.ptp(predictions) > 0 and np.ptp(references) > 0
        return {
            "mse": float(mean_squared_error(references, predictions)),
            "r2": float(r2_score(references, predictions)) if len(predictions) > 1 else 0.0,
            "pearson": float(pearsonr(references, predictions)[0]) if varies else 0.0,
            "spearman": float(spearmanr(references, predictions)[0]) if varies else 0.0,
        }
