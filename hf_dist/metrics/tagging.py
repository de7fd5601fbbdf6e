"""Scores of tagged words: entity level by seqeval, plain tags by scikit-learn."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import datasets
import evaluate
from seqeval import scheme as schemes
from seqeval.metrics import classification_report
from sklearn.metrics import accuracy_score, f1_score

_DESCRIPTION = """\
Plain tags: accuracy, the share of words whose tag is predicted, and macro F1, the mean over the tags that
occur in the references or the predictions. Entity schemes: precision, recall and F1 of whole entities
(micro average: an entity counts where type, first and last word are all right), the F1 of each type that
occurs in the references, and the accuracy of the words' tags.

Mode "default" reads entities as the CoNLL-2000 script conlleval does: an I- after an O or another type opens
one, so that IOB1, IOB2 and IOBES are read alike and a faulty sequence still has entities. Mode "strict"
counts only what is well formed in the scheme: in IOB2 an entity opens with B-.
"""

_INPUTS = """\
Args:
    predictions: the tags of each row's words, as strings.
    references: the same, of the same lengths.
    scheme: "plain", "iob1", "iob2", "iobes" or "bilou".
    mode: "default" or "strict"; plain tags have none.
Returns:
    accuracy, f1_macro; or precision, recall, f1, accuracy and f1_<type>
"""

_STRICT = {"iob1": schemes.IOB1, "iob2": schemes.IOB2, "iobes": schemes.IOBES, "bilou": schemes.BILOU}
# seqeval 1.2.2 knows L and U only in strict mode; they are other letters for E and S.
_AS_IOBES = {"L": "E", "U": "S"}


class Tagging(evaluate.Metric):
    """`compute(predictions=..., references=..., scheme=..., mode=...)`."""

    def _info(self) -> evaluate.MetricInfo:
        tags = datasets.Sequence(datasets.Value("string"))
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": tags, "references": tags}),
        )

    def _compute(
        self,
        predictions: Sequence[Sequence[str]],
        references: Sequence[Sequence[str]],
        scheme: str = "iob2",
        mode: str = "default",
    ) -> dict[str, float]:
        flat_predictions = [tag for row in predictions for tag in row]
        flat_references = [tag for row in references for tag in row]
        accuracy = float(accuracy_score(flat_references, flat_predictions))
        if scheme == "plain":
            macro = f1_score(flat_references, flat_predictions, average="macro", zero_division=0)
            return {"accuracy": accuracy, "f1_macro": float(macro)}
        options: dict[str, Any] = {"zero_division": 0}
        true, found = [list(row) for row in references], [list(row) for row in predictions]
        if mode == "strict":
            options.update(mode="strict", scheme=_STRICT[scheme])
        elif scheme == "bilou":
            true, found = _as_iobes(true), _as_iobes(found)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an average over no entity at all is 0, as asked for
            report = classification_report(true, found, output_dict=True, **options)
        micro = report["micro avg"]
        scores = {"precision": micro["precision"], "recall": micro["recall"], "f1": micro["f1-score"]}
        for name, row in report.items():
            if not name.endswith(" avg") and row["support"]:
                scores[f"f1_{name}"] = row["f1-score"]
        return {**{name: float(value) for name, value in scores.items()}, "accuracy": accuracy}


def _as_iobes(rows: list[list[str]]) -> list[list[str]]:
    return [[_AS_IOBES.get(tag[:1], tag[:1]) + tag[1:] for tag in row] for row in rows]
