"""Scores of tags against hand-worked tables, seqeval and scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import seqeval.metrics
import seqeval.scheme
from sklearn.metrics import classification_report

from hf_dist.metrics import load_metric


@pytest.fixture(scope="module")
def metric():
    return load_metric("tagging")


def random_tags(seed: int, names: list[str], rows: int = 60) -> tuple[list[list[str]], list[list[str]]]:
    """References, and predictions of which six in ten are right."""
    rng = np.random.default_rng(seed)
    references = [rng.choice(names, rng.integers(1, 12)).tolist() for _ in range(rows)]
    predictions = [
        [tag if rng.random() < 0.6 else str(rng.choice(names)) for tag in row] for row in references
    ]
    return predictions, references


def test_entities_worked_by_hand(metric):
    """Three true entities (PER 0-1, LOC 3, PER 4), three found (PER 0-1, LOC 3-4, PER 5): one is right.

    precision 1/3, recall 1/3, F1 1/3; of type PER 1 of 2 found and 1 of 2 true; tags right: 5 of 7.
    """
    references = [["B-PER", "I-PER", "O", "B-LOC", "B-PER", "O"], ["O"]]
    predictions = [["B-PER", "I-PER", "O", "B-LOC", "I-LOC", "B-PER"], ["O"]]
    scores = metric.compute(predictions=predictions, references=references, scheme="iob2")
    expected = {
        "precision": 1 / 3,
        "recall": 1 / 3,
        "f1": 1 / 3,
        "f1_PER": 1 / 2,
        "f1_LOC": 0,
        "accuracy": 5 / 7,
    }
    assert scores == pytest.approx(expected, abs=1e-12)


def test_modes_differ_where_a_tag_is_not_well_formed(metric):
    """An I- that opens an entity is one by default (as conlleval counts), and none in strict IOB2."""
    tags = {"predictions": [["O", "I-X", "I-X", "O"]], "references": [["O", "B-X", "I-X", "O"]]}
    assert metric.compute(**tags, scheme="iob2")["f1"] == 1
    assert metric.compute(**tags, scheme="iob2", mode="strict")["f1"] == 0


def test_iob1_is_read_alike_by_default_and_by_its_own_rule(metric):
    """In IOB1 only the second of two touching entities of a type opens with B-."""
    references = [["I-X", "I-X", "B-X", "O", "I-Y"]]
    assert (
        metric.compute(predictions=references, references=references, scheme="iob1", mode="strict")["f1"] == 1
    )
    found = metric.compute(
        predictions=[["I-X", "I-X", "I-X", "O", "I-Y"]], references=references, scheme="iob1"
    )
    # True: X 0-1, X 2, Y 4. Found: X 0-2, Y 4. One is right.
    assert (found["precision"], found["recall"]) == pytest.approx((1 / 2, 1 / 3))


def test_bilou_is_iobes_by_other_letters(metric):
    references = [["U-X", "O", "B-Y", "I-Y", "L-Y"], ["B-X", "L-X", "U-X"]]
    predictions = [["U-X", "O", "B-Y", "L-Y", "O"], ["B-X", "L-X", "B-X"]]
    renamed = [[[tag.replace("U-", "S-").replace("L-", "E-") for tag in row] for row in rows]
               for rows in (predictions, references)]  # fmt: skip
    bilou = metric.compute(predictions=predictions, references=references, scheme="bilou")
    iobes = metric.compute(predictions=renamed[0], references=renamed[1], scheme="iobes")
    assert bilou == iobes and 0 < bilou["f1"] < 1


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "scheme, letters, strict",
    [
        ("iob2", "BI", seqeval.scheme.IOB2),
        ("iob1", "BI", seqeval.scheme.IOB1),
        ("iobes", "BIES", seqeval.scheme.IOBES),
    ],
)
def test_as_seqeval(metric, seed, scheme, letters, strict):
    names = ["O", *(f"{letter}-{kind}" for letter in letters for kind in ("a", "b-c", "d"))]
    predictions, references = random_tags(seed, names)
    for mode, options in (("default", {}), ("strict", {"mode": "strict", "scheme": strict})):
        scores = metric.compute(predictions=predictions, references=references, scheme=scheme, mode=mode)
        for name, function in (
            ("precision", seqeval.metrics.precision_score),
            ("recall", seqeval.metrics.recall_score),
            ("f1", seqeval.metrics.f1_score),
        ):
            assert scores[name] == pytest.approx(function(references, predictions, **options), abs=1e-9)
        each = seqeval.metrics.f1_score(references, predictions, average=None, **options)
        assert [scores[f"f1_{kind}"] for kind in ("a", "b-c", "d")] == pytest.approx(list(each), abs=1e-9)
        assert scores["accuracy"] == pytest.approx(
            seqeval.metrics.accuracy_score(references, predictions), abs=1e-9
        )


@pytest.mark.parametrize("seed", range(3))
def test_plain_tags_as_scikit_learn_reports(metric, seed):
    predictions, references = random_tags(seed, ["noun", "verb", "I", "O", "B-"])
    flat = [tag for row in references for tag in row], [tag for row in predictions for tag in row]
    report = classification_report(*flat, output_dict=True, zero_division=0)
    scores = metric.compute(predictions=predictions, references=references, scheme="plain")
    assert scores == pytest.approx(
        {"accuracy": report["accuracy"], "f1_macro": report["macro avg"]["f1-score"]}, abs=1e-9
    )


@pytest.mark.parametrize("mode", ["default", "strict"])
def test_rows_without_any_entity_score_nothing(metric, mode):
    scores = metric.compute(predictions=[["O", "O"]], references=[["O", "O"]], scheme="iob2", mode=mode)
    assert scores == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "accuracy": 1.0}


@pytest.mark.parametrize("mode", ["default", "strict"])
def test_iob1_entities_by_hand(metric, mode):
    """Three entities, two of one type side by side; predictions that merge these find only the third."""
    references = [["I-PER", "B-PER", "O", "I-LOC", "I-LOC"]]
    scores = metric.compute(predictions=references, references=references, scheme="iob1", mode=mode)
    assert (scores["f1"], scores["f1_PER"], scores["f1_LOC"]) == (1, 1, 1)
    merged = [["I-PER", "I-PER", "O", "I-LOC", "I-LOC"]]
    scores = metric.compute(predictions=merged, references=references, scheme="iob1", mode=mode)
    assert (scores["recall"], scores["precision"]) == (pytest.approx(1 / 3), 1 / 2)
