"""SQuAD scores against tables worked by hand and a search over all thresholds."""

from __future__ import annotations

import numpy as np
import pytest

from hf_dist.metrics import load_metric
from hf_dist.metrics.squad import best_of, exact_match, normalize, word_f1


@pytest.fixture(scope="module")
def metric():
    return load_metric("squad")


def compute(metric, rows, **options):
    """Of (prediction, references, null score) triples."""
    return metric.compute(
        predictions=[
            {"id": str(at), "prediction_text": text, "null_score": null}
            for at, (text, _, null) in enumerate(rows)
        ],
        references=[
            {"id": str(at), "answers": {"text": refs, "answer_start": [0] * len(refs)}}
            for at, (_, refs, _) in enumerate(rows)
        ],
        **options,
    )


@pytest.mark.parametrize(
    "text, expected",
    [
        ("The  Cat, a dog!", "cat dog"),
        ("an apple\nthe end", "apple end"),
        ("theatre", "theatre"),
        ("U.S.", "us"),
        ("in-the-middle", "inthemiddle"),
        ("A", ""),
        ("«Straße»", "«straße»"),
    ],
)
def test_normalisation(text, expected):
    """Lower case, then ASCII punctuation away (not replaced), then whole words a, an and the, then spaces."""
    assert normalize(text) == expected


@pytest.mark.parametrize(
    "prediction, reference, exact, f1",
    [
        ("Denver Broncos", "The Denver Broncos!", 1, 1),
        ("Denver", "Denver Broncos", 0, 2 * 1 * 0.5 / 1.5),
        ("the big big dog", "big dog dog", 0, 2 / 3),
        ("cat", "dog", 0, 0),
        ("", "dog", 0, 0),
        ("", "", 1, 1),
        ("the", "", 1, 1),
    ],
)
def test_pairs_worked_by_hand(prediction, reference, exact, f1):
    assert exact_match(prediction, reference) == exact
    assert word_f1(prediction, reference) == pytest.approx(f1, abs=1e-12)


def test_a_table_worked_by_hand(metric):
    """Five questions of SQuAD 1: EM 1, 0, 0, 1, 0; F1 1, 2/3 (the better of 1/2 and 2/3), 0, 1, 4/5.

    The last: 2 of 2 predicted words in 3 reference words, 2 * 1 * (2/3) / (5/3).
    """
    rows = [
        ("Denver Broncos", ["the Denver Broncos"], 0.0),
        ("a gold cup", ["gold medal", "the gold"], 0.0),
        ("1998", ["1999", "in 1999"], 0.0),
        ("Santa Clara.", ["Levi's Stadium", "santa clara"], 0.0),
        ("red, white", ["red white blue"], 0.0),
    ]
    scores = compute(metric, rows)
    assert scores == pytest.approx(
        {"exact_match": 100 * 2 / 5, "f1": 100 * (1 + 2 / 3 + 0 + 1 + 4 / 5) / 5}, abs=1e-9
    )


def test_a_table_with_negatives_worked_by_hand(metric):
    """Threshold 0; the answers given are cup, "", x, "", and the true ones cup, cup, none, none.

    With spans for none, one, ... all of the questions by rising null score, 2, 3, 2, 3 and 2 are right: at
    best 75 %, first with the threshold -1.
    """
    rows = [("cup", ["the cup"], -1.0), ("cup", ["cup"], 2.0), ("x", [], -0.5), ("y", [], 3.0)]
    scores = compute(metric, rows, null_threshold=0.0)
    assert scores == pytest.approx(
        {
            "exact_match": 50.0,
            "f1": 50.0,
            "has_answer_exact": 50.0,
            "has_answer_f1": 50.0,
            "no_answer_exact": 50.0,
            "best_exact": 75.0,
            "best_exact_threshold": -1.0,
            "best_f1": 75.0,
            "best_f1_threshold": -1.0,
        },
        abs=1e-9,
    )


@pytest.mark.parametrize("seed", range(4))
def test_the_best_threshold_is_that_of_a_search(metric, seed):
    rng = np.random.default_rng(seed)
    words = ["red", "blue", "green dog"]
    rows = [
        (
            str(rng.choice(words)),
            [str(rng.choice(words))] if rng.random() < 0.6 else [],
            float(rng.integers(-4, 4)) / 2,  # many ties
        )
        for _ in range(40)
    ]
    scores = compute(metric, rows, null_threshold=0.25)
    nulls = sorted({null for _, _, null in rows})
    for name, score in (("exact", exact_match), ("f1", word_f1)):
        by_threshold = [
            100 * np.mean([best_of(score, "" if null > cut else text, refs) for text, refs, null in rows])
            for cut in [nulls[0] - 1, *nulls]
        ]
        assert scores[f"best_{name}"] == pytest.approx(max(by_threshold), abs=1e-9)
        at_best = np.mean(
            [
                best_of(score, "" if null > scores[f"best_{name}_threshold"] else text, refs)
                for text, refs, null in rows
            ]
        )
        assert 100 * at_best == pytest.approx(max(by_threshold), abs=1e-9)
    given = [best_of(word_f1, "" if null > 0.25 else text, refs) for text, refs, null in rows]
    assert scores["f1"] == pytest.approx(100 * np.mean(given), abs=1e-9)


def test_order_does_not_matter_and_a_missing_prediction_is_an_error(metric):
    predictions = [{"id": name, "prediction_text": name, "null_score": 0.0} for name in ("b", "a")]
    references = [{"id": name, "answers": {"text": [name * 2], "answer_start": [0]}} for name in ("bb", "b")]
    references[0]["id"] = "a"
    assert metric.compute(predictions=predictions, references=references)["f1"] == 0
    references[0]["answers"]["text"] = ["red"]
    predictions[1]["prediction_text"] = "red"
    assert metric.compute(predictions=predictions, references=references)["exact_match"] == 50
    references[0]["id"] = "c"
    with pytest.raises(ValueError, match="1 questions have no prediction.*'c'"):
        metric.compute(predictions=predictions, references=references)
