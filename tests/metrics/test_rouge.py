"""ROUGE equals rouge-score on the same texts, and a few values worked by hand."""

import numpy as np
import pytest
from rouge_score import rouge_scorer

from hf_dist.metrics import load_metric

PREDICTIONS = [
    "the cat sat on the mat",
    "Returning the sums of two numbers.\nIt raises errors.",
    "",
    "closes files",
]
REFERENCES = [
    "the cat lay on the mat",
    "Return the sum of two numbers.\nRaises an error on strings.",
    "something",
    "Open a socket",
]


@pytest.mark.parametrize("stemmer", [False, True])
def test_equals_rouge_score(stemmer):
    found = load_metric("rouge").compute(predictions=PREDICTIONS, references=REFERENCES, use_stemmer=stemmer)
    kinds = ["rouge1", "rouge2", "rougeL", "rougeLsum"]
    assert list(found) == kinds
    scorer = rouge_scorer.RougeScorer(kinds, use_stemmer=stemmer)
    rows = [scorer.score(r, p) for r, p in zip(REFERENCES, PREDICTIONS, strict=True)]
    for kind in kinds:
        assert found[kind] == pytest.approx(np.mean([row[kind].fmeasure for row in rows]), abs=1e-9)


def test_by_hand():
    # 5 of 6 words shared; 3 of 5 pairs (the cat, on the, the mat); subsequence the cat on the mat.
    found = load_metric("rouge").compute(predictions=PREDICTIONS[:1], references=REFERENCES[:1])
    assert found == pytest.approx({"rouge1": 5 / 6, "rouge2": 3 / 5, "rougeL": 5 / 6, "rougeLsum": 5 / 6})


def test_stems_are_asked_for():
    pair = {"predictions": ["returns sums"], "references": ["return sum"]}
    assert load_metric("rouge").compute(**pair)["rouge1"] == 0
    assert load_metric("rouge").compute(**pair, use_stemmer=True)["rouge1"] == 1
