"""BLEU and chrF equal sacrebleu on the same texts, and a value worked by hand."""

import math

import pytest
import sacrebleu

from hf_dist.metrics import load_metric

PREDICTIONS = ["the quick brown fox jumps over the dog.", "Hello, world", "", "It is 3.5 km away"]
REFERENCES = [
    "the quick brown fox jumped over the lazy dog.",
    "hello , world!",
    "nothing",
    "It's 3.5 km away",
]


@pytest.mark.parametrize("tokenize", ["13a", "intl", "zh", "char", "none"])
@pytest.mark.parametrize("lowercase", [False, True])
def test_equals_sacrebleu(tokenize, lowercase):
    found = load_metric("sacrebleu_score").compute(
        predictions=PREDICTIONS, references=REFERENCES, tokenize=tokenize, lowercase=lowercase
    )
    bleu = sacrebleu.corpus_bleu(PREDICTIONS, [REFERENCES], tokenize=tokenize, lowercase=lowercase)
    assert found["bleu"] == pytest.approx(bleu.score, abs=1e-9)
    assert found["chrf"] == pytest.approx(sacrebleu.corpus_chrf(PREDICTIONS, [REFERENCES]).score, abs=1e-9)


def test_by_hand():
    # a b c d e against a b c d f g: 4 of 5 words, 3 of 4 pairs, 2 of 3, 1 of 2; brevity exp(1 - 6/5).
    found = load_metric("sacrebleu_score").compute(predictions=["a b c d e"], references=["a b c d f g"])
    precisions = [4 / 5, 3 / 4, 2 / 3, 1 / 2]
    wanted = 100 * math.exp(1 - 6 / 5) * math.prod(precisions) ** 0.25
    assert found["bleu"] == pytest.approx(wanted, abs=1e-9)


def test_a_perfect_translation_scores_100():
    found = load_metric("sacrebleu_score").compute(predictions=REFERENCES, references=REFERENCES)
    assert found == pytest.approx({"bleu": 100.0, "chrf": 100.0})
