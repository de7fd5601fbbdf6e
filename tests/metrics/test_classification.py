"""Classification scores against a hand-worked table and scikit-learn, loaded without a network."""

from __future__ import annotations

import socket

import evaluate
import numpy as np
import pytest
from sklearn.metrics import classification_report

from hf_dist.metrics import load_metric


@pytest.fixture
def metric(monkeypatch) -> evaluate.EvaluationModule:
    def refuse(*_args, **_kwargs):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return load_metric("classification")


def test_a_table_worked_by_hand(metric):
    """Six rows; class 3 is only predicted.

    class 0: 2 true positives, 1 false positive, 1 false negative: 4 / 6
    class 1: 1 true positive, 0 false positives, 1 false negative: 2 / 3
    class 2: 0 true positives, 1 false positive, 1 false negative: 0
    class 3: 0 true positives, 1 false positive: 0
    """
    references = [0, 0, 0, 1, 1, 2]
    predictions = [0, 0, 2, 1, 3, 0]
    scores = metric.compute(predictions=predictions, references=references)
    assert scores == pytest.approx({"accuracy": 3 / 6, "f1_macro": (2 / 3 + 2 / 3 + 0 + 0) / 4}, abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_as_scikit_learn_reports(metric, seed):
    rng = np.random.default_rng(seed)
    references = rng.integers(0, 7, 500)
    predictions = np.where(rng.random(500) < 0.6, references, rng.integers(0, 9, 500))
    report = classification_report(references, predictions, output_dict=True, zero_division=0)
    scores = metric.compute(predictions=predictions.tolist(), references=references)
    # The report writes a micro average instead of the accuracy where the labels don't cover both sides.
    assert scores["accuracy"] == pytest.approx(np.mean(references == predictions), abs=1e-12)
    assert scores["f1_macro"] == pytest.approx(report["macro avg"]["f1-score"], abs=1e-12)


def test_batches_add_up(metric):
    references, predictions = [0, 1, 2, 1, 0], [0, 1, 1, 1, 2]
    whole = metric.compute(predictions=predictions, references=references)
    for place in range(5):
        metric.add(prediction=predictions[place], reference=references[place])
    assert metric.compute() == whole


def test_it_is_an_evaluate_metric_with_a_description(metric):
    assert isinstance(metric, evaluate.Metric)
    assert set(metric.features) == {"predictions", "references"}
    assert "macro F1" in metric.description
