"""Against the textbook formulas."""

import numpy as np
import pytest

from hf_dist.metrics import load_metric


def test_formulas():
    draw = np.random.default_rng(0)
    references = draw.normal(size=40)
    predictions = references + draw.normal(size=40)
    scores = load_metric("regression").compute(predictions=predictions, references=references)
    error = ((predictions - references) ** 2).mean()
    ranks = [np.argsort(np.argsort(values)) for values in (predictions, references)]
    assert scores["mse"] == pytest.approx(error, abs=1e-9)
    assert scores["r2"] == pytest.approx(1 - error / references.var(), abs=1e-9)
    assert scores["pearson"] == pytest.approx(np.corrcoef(predictions, references)[0, 1], abs=1e-9)
    assert scores["spearman"] == pytest.approx(np.corrcoef(*ranks)[0, 1], abs=1e-9)


def test_a_constant_answer_has_no_correlation():
    scores = load_metric("regression").compute(predictions=[2.0, 2.0, 2.0], references=[1.0, 2.0, 3.0])
    assert (scores["pearson"], scores["spearman"], scores["r2"]) == (0.0, 0.0, 0.0)
