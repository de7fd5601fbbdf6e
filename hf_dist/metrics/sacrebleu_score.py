"""BLEU and chrF of translations, over sacrebleu."""

from __future__ import annotations

from typing import Any

import datasets
import evaluate
from sacrebleu.metrics import BLEU, CHRF

_DESCRIPTION = """\
Corpus BLEU with sacrebleu's settings (up to 4-grams, exponential smoothing, case counts), so that scores
compare with published ones, and chrF (6 characters, beta 2), both between 0 and 100.
"""

_INPUTS = """\
Args:
    predictions: translations, one string a row.
    references: what they should have been, one string a row.
    tokenize: how sacrebleu splits words for BLEU: 13a (its default), intl, zh, ja-mecab, ko-mecab, char or
        none.
    lowercase: leave case out of BLEU.
Returns:
    bleu, chrf
"""


class SacreBleu(evaluate.Metric):
    """`compute(predictions=..., references=..., tokenize="13a")` -> `{"bleu": ..., "chrf": ...}`."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
            ),
        )

    def _compute(
        self, predictions: Any, references: Any, tokenize: str = "13a", lowercase: bool = False
    ) -> dict[str, float]:
        # `force` only silences a warning about predictions that look tokenized already.
        bleu = BLEU(tokenize=tokenize, lowercase=lowercase, force=True)
        return {
            "bleu": float(bleu.corpus_score(predictions, [references]).score),
            "chrf": float(CHRF().corpus_score(predictions, [references]).score),
        }
