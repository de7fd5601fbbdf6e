"""Rows of questions, contexts and answers: where a data set has them, and what can be wrong with them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, DatasetDict, Features, List, Value

from hf_dist.config import DataConfig, at_least, option
from hf_dist.data import labels
from hf_dist.data.loading import sources
from hf_dist.errors import DataError

logger = logging.getLogger(__name__)

ID_COLUMNS = ("id", "qid", "question_id", "qas_id")
QUESTION_COLUMNS = ("question", "query")
CONTEXT_COLUMNS = ("context", "paragraph", "passage", "document")
ANSWER_COLUMNS = ("answers", "answer")


@dataclass(frozen=True, kw_only=True)
class QuestionAnsweringSettings:
    """The flags of question answering."""

    question_column: str | None = option(None, "Column with the question; default: found by the usual names.")
    context_column: str | None = option(None, "Column with the text that holds the answer.")
    answers_column: str | None = option(
        None, "Column with the answers: text and answer_start, each a list; empty where there is none."
    )
    id_column: str | None = option(None, "Column that names each question; default: the row's number.")
    doc_stride: int = option(128, "Tokens of the context that a window shares with the one before.")
    max_question_tokens: int = option(64, "Longer questions are cut to so many tokens, and counted.")
    max_answer_tokens: int = option(30, "Longest answer that is predicted.")
    n_best: int = option(20, "Starts and ends that are kept of a window.")
    version_2_with_negative: bool = option(
        False, "Questions may have no answer; found out where a row has none."
    )
    null_score_diff_threshold: float = option(
        0.0, "No answer is predicted where its score is more than this above that of the best span."
    )
    misplaced_answers: Literal["error", "drop"] = option(
        "error", "An answer that is not at its place in the context: an error, or its row is left out."
    )

    def __post_init__(self) -> None:
        for name in ("max_question_tokens", "max_answer_tokens", "n_best"):
            at_least(self, name, 1)
        at_least(self, "doc_stride", 0)


@dataclass(frozen=True)
class QuestionColumns:
    """Where the data has what the task needs; a test split may have no answers."""

    question: str
    context: str
    answers: str | None
    id: str | None


def find_columns(splits: DatasetDict, settings: QuestionAnsweringSettings) -> QuestionColumns:
    """Finds the columns in the first split; the others must have the same.

    Raises:
        DataError: one isn't there, or two are the same.
    """
    first = sources.first_split(splits)
    there = splits[first].column_names
    question = sources.find_column(there, settings.question_column, QUESTION_COLUMNS, flag="question_column")
    context = sources.find_column(there, settings.context_column, CONTEXT_COLUMNS, flag="context_column")
    answers: str | None
    if first == "test" and settings.answers_column is None:
        answers = sources.usual_column(there, ANSWER_COLUMNS)
    else:
        answers = sources.find_column(there, settings.answers_column, ANSWER_COLUMNS, flag="answers_column")
    named = settings.id_column
    identity = sources.usual_column(there, ID_COLUMNS)
    if named is not None:
        identity = sources.find_column(there, named, (), flag="id_column")
    chosen = [name for name in (question, context, answers, identity) if name is not None]
    if len(set(chosen)) < len(chosen):
        raise DataError(
            f"question, context, answers and id must be different columns, not {', '.join(chosen)}"
        )
    sources.check_same_columns(splits, [question, context], [] if answers is None else [answers])
    logger.info("columns: %s", ", ".join(chosen))
    return QuestionColumns(question, context, answers, identity)


def read_rows(
    rows: Dataset, columns: QuestionColumns, split: str, settings: QuestionAnsweringSettings
) -> Dataset:
    """Checks a split and gives it the columns `id`, `question`, `context` and `answers`.

    `answers` is a dict of the lists `text` and `answer_start`, empty where there is none; a test split
    without answers has no such column.

    Raises:
        DataError: a question, context or answer is missing or blank, an answer is not at its place, or two
            rows have one id; with the number of the row.
    """
    texts = {
        "question": _texts(rows, columns.question, split, "question_column"),
        "context": _texts(rows, columns.context, split, "context_column"),
    }
    table: dict[str, Any] = {"id": _ids(rows, columns.id, split), **texts}
    features: dict[str, Any] = {name: Value("string") for name in table}
    answers = _answers(rows, columns.answers, split)
    kept = np.ones(len(rows), dtype=bool)
    if answers is not None:
        contexts = texts["context"].to_pylist()
        misplaced = np.array(
            [_problem(context, found) is not None for context, found in zip(contexts, answers, strict=True)],
            dtype=bool,
        )
        if misplaced.any():
            row = int(np.flatnonzero(misplaced)[0])
            if settings.misplaced_answers == "error":
                more = f" (and {misplaced.sum() - 1} more rows)" if misplaced.sum() > 1 else ""
                raise DataError(
                    f"the {split} data, row {row + 1} (counted from 1), id {table['id'][row]}: "
                    f"{_problem(contexts[row], answers[row])}{more}; mend the rows, or leave them out with "
                    "--misplaced_answers drop"
                )
            logger.warning(
                "%s: %d rows with an answer that is not at its place are left out", split, misplaced.sum()
            )
            kept = ~misplaced
            if not kept.any():
                raise DataError(f"no row of the {split} data has its answer at its place in the context")
        table["answers"] = pa.array(
            answers, pa.struct([("text", pa.list_(pa.string())), ("answer_start", pa.list_(pa.int64()))])
        )
        features["answers"] = {"text": List(Value("string")), "answer_start": List(Value("int64"))}
    made = Dataset(pa.table(table)).cast(Features(features))
    return made if kept.all() else made.select(np.flatnonzero(kept))


def _texts(rows: Dataset, column: str, split: str, flag: str) -> pa.Array:
    feature = rows.features[column]
    if isinstance(feature, Value) and feature.dtype not in ("string", "large_string", "null"):
        raise DataError(
            f"column {column} of the {split} data holds {labels.describe(rows, column)}; expected text: name "
            f"another with --{flag}"
        )
    if labels.check_text(rows, column, split=split):
        values = labels.arrow_column(rows, column)
        blank = pc.equal(pc.utf8_trim_whitespace(values), "").to_numpy()
        raise DataError(
            f"column {column} of the {split} data is blank in {labels.rows_of(np.flatnonzero(blank))}; fill "
            "it in or remove the rows"
        )
    return labels.arrow_column(rows, column).cast(pa.string()).combine_chunks()


def _ids(rows: Dataset, column: str | None, split: str) -> pa.Array:
    if column is None or column not in rows.column_names:
        return pa.array([str(row) for row in range(len(rows))], pa.string())
    values = labels.arrow_column(rows, column)
    try:
        names = values.cast(pa.string()).combine_chunks()
    except pa.ArrowException:
        raise DataError(
            f"column {column} of the {split} data holds {labels.describe(rows, column)}; expected ids: name "
            "another with --id_column"
        ) from None
    if names.null_count:
        missing = np.flatnonzero(pc.is_null(names).to_numpy(zero_copy_only=False))
        raise DataError(f"column {column} of the {split} data has no id in {labels.rows_of(missing)}")
    seen: dict[str, int] = {}
    for row, name in enumerate(names.to_pylist()):
        if name in seen:
            twice = len(names) - len(pc.unique(names))
            raise DataError(
                f"column {column} of the {split} data has the id {name} in rows {seen[name] + 1} and "
                f"{row + 1} (counted from 1; {twice} repeated in all); give each question an id of its own, "
                "or name another column with --id_column"
            )
        seen[name] = row
    return names


def _answers(rows: Dataset, column: str | None, split: str) -> list[dict[str, list[Any]]] | None:
    """Each row's answers as lists of `text` and `answer_start`; None for a test split without."""
    if column is None or column not in rows.column_names:
        return None
    values = labels.arrow_column(rows, column).to_pylist()
    if split == "test" and all(value is None for value in values):
        return None
    missing = np.flatnonzero([value is None for value in values])
    if len(missing):
        raise DataError(
            f"column {column} of the {split} data has no answers in {labels.rows_of(missing)}; expected text "
            "and answer_start, empty lists where a question has no answer"
        )
    found = []
    for row, value in enumerate(values):
        answers = _as_lists(value)
        if answers is None:
            raise DataError(
                f"column {column} of the {split} data, row {row + 1} (counted from 1): found {value!r:.60}; "
                "expected an object of text and answer_start, two lists of one length"
            )
        found.append(answers)
    return found


def _as_lists(value: Any) -> dict[str, list[Any]] | None:
    """One form of the two that answers come in: an object of lists, or a list of objects."""
    if isinstance(value, list) and all(isinstance(part, Mapping) for part in value):
        value = {name: [part.get(name) for part in value] for name in ("text", "answer_start")}
    if not isinstance(value, Mapping) or not {"text", "answer_start"} <= set(value):
        return None
    texts, starts = value["text"], value["answer_start"]
    if isinstance(texts, str):
        texts, starts = [texts], [starts]
    texts, starts = texts or [], starts or []
    if not (isinstance(texts, list) and isinstance(starts, list)) or len(texts) != len(starts):
        return None
    if not all(isinstance(text, str) for text in texts) or not all(
        isinstance(start, int) for start in starts
    ):
        return None
    return {"text": texts, "answer_start": starts}


def _problem(context: str, answers: Mapping[str, list[Any]]) -> str | None:
    """What is wrong with the first answer that is not at its place."""
    for text, start in zip(answers["text"], answers["answer_start"], strict=True):
        if not text.strip():
            return "an answer is blank; a question without an answer has empty lists"
        there = context[start : start + len(text)] if start >= 0 else ""
        if there != text:
            place = context.find(text)
            hint = f" (it stands at {place})" if place >= 0 else " (the context doesn't hold it)"
            return (
                f"the answer {text!r:.60} is not at character {start}, where the context has "
                f"{there!r:.60}{hint}"
            )
    return None


def hold_out_contexts(splits: DatasetDict, data: DataConfig) -> DatasetDict:
    """Splits a validation set off the training rows where there is none: all the questions of some contexts.

    No context has questions in both. The choice depends on the contexts alone.

    Args:
        splits: with `train`; returned as it is where it also has `validation`.
        data: `validation_fraction` is the share of the contexts held out; none are of a stream.

    Raises:
        DataError: all questions have the same context.
    """
    if "train" not in splits or "validation" in splits or data.streaming:
        return splits
    contexts = pc.rank(labels.arrow_column(splits["train"], "context"), tiebreaker="dense").to_numpy()
    number = int(contexts.max())
    if number < 2:
        raise DataError(
            "all training rows have one context, which leaves none to hold out for validation; add rows, or "
            "give --validation_file"
        )
    held = min(max(1, round(data.validation_fraction * number)), number - 1)
    chosen = np.isin(contexts, np.random.default_rng(0).permutation(number)[:held] + 1)
    rows = splits["train"]
    parts = {"train": rows.select(np.flatnonzero(~chosen)), "validation": rows.select(np.flatnonzero(chosen))}
    logger.info("no validation split: the %d questions of %d contexts held out", chosen.sum(), held)
    return DatasetDict({**splits, **parts})
