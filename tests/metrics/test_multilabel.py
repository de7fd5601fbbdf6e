"""Against scikit-learn on the same answers, and a table worked by hand."""

import numpy as np
import pytest
from sklearn.metrics import f1_score

from hf_dist.metrics import load_metric


def test_against_scikit_learn():
    draw = np.random.default_rng(0)
    references, predictions = draw.integers(0, 2, (50, 4)), draw.integers(0, 2, (50, 4))
    scores = load_metric("multilabel").compute(
        predictions=predictions.tolist(), references=references.tolist()
    )
    assert scores["f1_micro"] == pytest.approx(f1_score(references, predictions, average="micro"), abs=1e-9)
    assert scores["f1_macro"] == pytest.approx(f1_score(references, predictions, average="macro"), abs=1e-9)


def test_by_hand():
    # Two of three labels found, none wrong: micro F1 = 2 * 2 / (2 * 2 + 1); one of two rows is right.
    scores = load_metric("multilabel").compute(predictions=[[1, 0], [0, 1]], references=[[1, 1], [0, 1]])
    assert scores["f1_micro"] == pytest.approx(4 / 5, abs=1e-9)
    assert scores["f1_macro"] == pytest.approx((1 + 2 / 3) / 2, abs=1e-9)
    assert scores["subset_accuracy"] == 0.5
