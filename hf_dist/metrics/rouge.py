"""ROUGE of summaries, over rouge-score: mean F-measures, without the bootstrap of its aggregator.

`rouge_score.scoring.BootstrapAggregator` (and with it the `evaluate` metric of the hub) reports the median
of resampled means, which depends on a random state and is close to, but not, the mean that is given here.
"""

from __future__ import annotations

from typing import Any

import datasets
import evaluate
from rouge_score.rouge_scorer import RougeScorer

_TYPES = ("rouge1", "rouge2", "rougeL", "rougeLsum")

_DESCRIPTION = """\
ROUGE-1 and ROUGE-2 (shared words and pairs of words), ROUGE-L (longest common subsequence) and ROUGE-Lsum
(the same by sentences, which stand on lines of their own), each as the mean over rows of the F-measure,
between 0 and 1. Words are runs of a-z and 0-9 in lower case, as rouge-score finds them: text in other
scripts has none, and scores 0.
"""

_INPUTS = """\
Args:
    predictions: summaries, one string a row.
    references: what they should have been, one string a row.
    use_stemmer: compare words of more than three letters by their Porter stems.
Returns:
    rouge1, rouge2, rougeL, rougeLsum
"""


class Rouge(evaluate.Metric):
    """`compute(predictions=..., references=..., use_stemmer=False)` -> `{"rouge1": ..., ...}`."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
            ),
        )

    def _compute(self, predictions: Any, references: Any, use_stemmer: bool = False) -> dict[str, float]:
        scorer = RougeScorer(list(_TYPES), use_stemmer=use_stemmer)
        sums = dict.fromkeys(_TYPES, 0.0)
        for prediction, reference in zip(predictions, references, strict=True):
            scores = scorer.score(reference, prediction)
            for kind in _TYPES:
                sums[kind] += scores[kind].fmeasure
        return {kind: total / len(predictions) for kind, total in sums.items()}
