"""Exact match and F1 of extracted answers, as the official SQuAD scripts compute them."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import datasets
import evaluate
import numpy as np

_DESCRIPTION = """\
Percentages (0 to 100), as the scripts of SQuAD 1.1 and 2.0 print them (Rajpurkar et al. 2016, arXiv
1606.05250; Rajpurkar, Jia, Liang 2018, arXiv 1806.03822). Texts are compared in lower case, without
punctuation, without the articles a, an and the, and with single spaces. Exact match: the texts are equal.
F1: of the bags of words of the two; where one of them has no words, 1 if neither has. Of several reference
answers the best counts. A question without an answer has the empty text as its only reference.

A question is answered with the empty text where its null_score, the score of "no answer" less the score of
the best span, is above null_threshold. best_exact and best_f1 are the scores at the threshold that suits
these very references best, as the SQuAD 2.0 script reports them.
"""

_INPUTS = """\
Args:
    predictions: dicts with id, prediction_text (the best span) and null_score (any real number).
    references: dicts with id and answers, in any order; answers is a dict of the lists text and answer_start.
    null_threshold: see above; None means that every question has an answer (SQuAD 1).
Returns:
    exact_match, f1; where null_threshold is a number also has_answer_exact, has_answer_f1, no_answer_exact
    (each where there are such questions), best_exact, best_exact_threshold, best_f1 and best_f1_threshold
"""

_ARTICLES = re.compile(r"\b(a|an|the)\b", re.UNICODE)
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces: the normalisation of the SQuAD scripts."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(prediction: str, reference: str) -> float:
    """1 where the normalised texts are equal, else 0."""
    return float(normalize(prediction) == normalize(reference))


def word_f1(prediction: str, reference: str) -> float:
    """F1 of the bags of normalised words, 0 to 1; 1 where neither text has any."""
    found, true = normalize(prediction).split(), normalize(reference).split()
    if not found or not true:
        return float(found == true)
    shared = sum((Counter(found) & Counter(true)).values())
    return 2 * shared / (len(found) + len(true))


def best_of(score: Callable[[str, str], float], prediction: str, references: Sequence[str]) -> float:
    """The best score over the reference answers; without any, against the empty text.

    References that have no words after normalisation (such as "the") do not count.
    """
    return max(score(prediction, text) for text in _answers(references))


def _answers(references: Sequence[str]) -> list[str]:
    return [text for text in references if normalize(text)] or [""]


class Squad(evaluate.Metric):
    """`compute(predictions=..., references=..., null_threshold=...)`."""

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        answers = {
            "text": datasets.Sequence(text),
            "answer_start": datasets.Sequence(datasets.Value("int64")),
        }
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features(
                {
                    "predictions": {
                        "id": text,
                        "prediction_text": text,
                        "null_score": datasets.Value("float64"),
                    },
                    "references": {"id": text, "answers": answers},
                }
            ),
        )

    def _compute(
        self,
        predictions: Sequence[Mapping[str, Any]],
        references: Sequence[Mapping[str, Any]],
        null_threshold: float | None = None,
    ) -> dict[str, float]:
        by_id = {row["id"]: row for row in predictions}
        if missing := [row["id"] for row in references if row["id"] not in by_id]:
            raise ValueError(f"{len(missing)} questions have no prediction, the first of them {missing[0]!r}")
        true = [list(row["answers"]["text"]) for row in references]
        found = [by_id[row["id"]] for row in references]
        texts = [row["prediction_text"] for row in found]
        scores = {"exact": exact_match, "f1": word_f1}
        spans = {
            name: np.array([best_of(score, text, refs) for text, refs in zip(texts, true, strict=True)])
            for name, score in scores.items()
        }
        if null_threshold is None:
            return {"exact_match": _percent(spans["exact"]), "f1": _percent(spans["f1"])}
        margin = np.array([row["null_score"] for row in found], dtype=np.float64)
        answerable = np.array([_answers(refs) != [""] for refs in true])
        # The empty text scores 1 where there is no answer, else 0.
        given = {
            name: np.where(margin > null_threshold, ~answerable, span).astype(np.float64)
            for name, span in spans.items()
        }
        result = {"exact_match": _percent(given["exact"]), "f1": _percent(given["f1"])}
        if answerable.any():
            result["has_answer_exact"] = _percent(given["exact"][answerable])
            result["has_answer_f1"] = _percent(given["f1"][answerable])
        if not answerable.all():
            result["no_answer_exact"] = _percent(given["exact"][~answerable])
        for name, span in spans.items():
            best, threshold = _best_threshold(span, ~answerable, margin)
            result[f"best_{name}"] = best
            result[f"best_{name}_threshold"] = threshold
        return result


def _percent(scores: np.ndarray) -> float:
    return float(100 * scores.mean())


def _best_threshold(spans: np.ndarray, unanswerable: np.ndarray, margin: np.ndarray) -> tuple[float, float]:
    """The best mean score over all thresholds of the margin, in percent, and the lowest that reaches it.

    Args:
        spans: (questions,) score of each question's span.
        unanswerable: (questions,) whether the empty text is right.
        margin: (questions,) null score; questions above the threshold get the empty text.
    """
    order = np.argsort(margin, kind="stable")
    # total[k]: the k questions with the lowest margins are answered with their spans.
    total = np.concatenate([[0.0], np.cumsum(spans[order])])
    total += unanswerable.sum() - np.concatenate([[0.0], np.cumsum(unanswerable[order])])
    ordered = margin[order]
    # Equal margins go together. With none answered, the threshold lies just below the lowest margin.
    reachable = np.append(np.append(True, ordered[1:] != ordered[:-1]), True)
    place = int(np.argmax(np.where(reachable, total, -1.0)))
    lowest = np.nextafter(ordered[0], -np.inf)
    return float(100 * total[place] / len(spans)), float(lowest if place == 0 else ordered[place - 1])
