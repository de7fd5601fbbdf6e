"""What a causal language model is trained on: plain text, a prompt and its answer, or a conversation."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from datasets import Dataset, DatasetDict

from hf_dist.data import labels, sources
from hf_dist.errors import DataError, nearest
from hf_dist.tasks.plain_text import TEXT_COLUMNS, texts_of

logger = logging.getLogger(__name__)

Form = Literal["text", "prompt", "chat"]

PROMPT_COLUMNS = ("prompt", "instruction", "question", "query")
INPUT_COLUMNS = ("input", "context")
COMPLETION_COLUMNS = ("completion", "response", "output", "answer", "chosen")
MESSAGES_COLUMNS = ("messages", "conversations", "conversation", "dialog")

# Names of the ShareGPT form.
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


@dataclass(frozen=True)
class CausalColumns:
    """Where the data has what is trained on; a name may be a path such as `instances.0.output`."""

    form: Form
    main: str
    input: str | None = None
    completion: str | None = None


def find_form(splits: DatasetDict, settings: Any) -> CausalColumns:
    """The form that the flags say, or that the columns show.

    Args:
        splits: raw splits.
        settings: `text_column`, `prompt_column`, `input_column`, `completion_column`, `messages_column`.

    Raises:
        DataError: a named column isn't there, or no form is recognised.
    """
    first = splits[sources.first_split(splits)]
    there = first.column_names
    if settings.messages_column:
        return _found(CausalColumns("chat", settings.messages_column), there)
    if settings.prompt_column or settings.completion_column:
        prompt = settings.prompt_column or sources.find_column(
            there, None, PROMPT_COLUMNS, flag="prompt_column"
        )
        completion = settings.completion_column or sources.find_column(
            there, None, COMPLETION_COLUMNS, flag="completion_column"
        )
        return _found(CausalColumns("prompt", prompt, settings.input_column, completion), there)
    if settings.text_column:
        return _found(CausalColumns("text", settings.text_column), there)
    if messages := sources.usual_column(there, MESSAGES_COLUMNS):
        return _found(CausalColumns("chat", messages), there)
    prompt, completion = (
        sources.usual_column(there, names) for names in (PROMPT_COLUMNS, COMPLETION_COLUMNS)
    )
    if prompt and completion:
        given = settings.input_column or sources.usual_column(there, INPUT_COLUMNS)
        return _found(CausalColumns("prompt", prompt, given, completion), there)
    if text := sources.usual_column(there, TEXT_COLUMNS):
        return _found(CausalColumns("text", text), there)
    raise DataError(
        f"the data has {', '.join(there)}: no text, no prompt with its answer and no messages by their usual "
        "names; name them with --text_column, --prompt_column and --completion_column, or --messages_column"
    )


def _found(columns: CausalColumns, there: Sequence[str]) -> CausalColumns:
    for name in (columns.main, columns.input, columns.completion):
        if name is not None and name not in there and name.split(".")[0] not in there:
            raise DataError(
                f"there is no column {name}{nearest(name, there)}; the data has {', '.join(there)}"
            )
    shown = {columns.form: columns.main, "input": columns.input, "answer": columns.completion}
    logger.info("columns: %s", ", ".join(f"{key} {name}" for key, name in shown.items() if name))
    return columns


def read_form(rows: Dataset, columns: CausalColumns, *, split: str) -> Dataset:
    """The rows in our own columns: `text`; `prompt` and `completion`; or `messages`.

    A blank text is left out and counted. A test split may lack the answers.

    Raises:
        DataError: with the row number of what is missing or of another kind.
    """
    if columns.form == "text":
        return texts_of(rows, columns.main, split=split)
    if columns.form == "prompt":
        return _prompts(rows, columns, split)
    messages = [
        _conversation(value, columns.main, split, row)
        for row, value in enumerate(_values(rows, columns.main, split))
    ]
    unanswered = [row for row, turns in enumerate(messages) if not _answered(turns)]
    if unanswered and split != "test":
        raise DataError(
            f"column {columns.main} of the {split} data has no answer of the assistant in "
            f"{labels.rows_of(np.array(unanswered))}; add it, or remove the rows"
        )
    return Dataset.from_dict({"messages": messages})


def _prompts(rows: Dataset, columns: CausalColumns, split: str) -> Dataset:
    prompts = [
        _text(value, columns.main, split, row) for row, value in enumerate(_values(rows, columns.main, split))
    ]
    if columns.input is not None:
        given = [
            _text(value or "", columns.input, split, row)
            for row, value in enumerate(_values(rows, columns.input, split))
        ]
        prompts = [
            f"{one}\n\n{more}" if more.strip() else one for one, more in zip(prompts, given, strict=True)
        ]
    table = {"prompt": prompts}
    assert columns.completion is not None
    if split != "test" or columns.completion.split(".")[0] in rows.column_names:
        answers = [
            _text(value, columns.completion, split, row)
            for row, value in enumerate(_values(rows, columns.completion, split))
        ]
        blank = [row for row, answer in enumerate(answers) if not answer.strip()]
        if blank:
            raise DataError(
                f"column {columns.completion} of the {split} data has no answer in "
                f"{labels.rows_of(np.array(blank))}; add it, or remove the rows"
            )
        table["completion"] = answers
    return Dataset.from_dict(table)


def _values(rows: Dataset, path: str, split: str) -> list[Any]:
    """The values at a column, or at a path into it (`instances.0.output`)."""
    if path in rows.column_names:
        return labels.arrow_column(rows, path).to_pylist()
    root, *steps = path.split(".")
    if root not in rows.column_names:
        raise DataError(
            f"the {split} data has no column {root}{nearest(root, rows.column_names)}; it has "
            f"{', '.join(rows.column_names)}"
        )
    values = labels.arrow_column(rows, root).to_pylist()
    return [_walk(value, steps, path, split, row) for row, value in enumerate(values)]


def _walk(value: Any, steps: Sequence[str], path: str, split: str, row: int) -> Any:
    for step in steps:
        try:
            value = value[int(step)] if isinstance(value, list) else value[step]
        except (KeyError, IndexError, ValueError, TypeError):
            raise DataError(
                f"{path} of the {split} data leads nowhere in row {row + 1} (counted from 1): no {step} in "
                f"{value!r:.60}"
            ) from None
    return value


def _text(value: Any, column: str, split: str, row: int) -> str:
    if not isinstance(value, str):
        raise DataError(
            f"{column} of the {split} data, row {row + 1} (counted from 1): found {value!r:.60}; expected "
            "text"
        )
    return value


def _conversation(value: Any, column: str, split: str, row: int) -> list[dict[str, str]]:
    """Turns as `role` and `content`, whichever of the two usual forms they had."""
    where = f"column {column} of the {split} data, row {row + 1} (counted from 1)"
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: found {value!r:.60}; expected a list of turns with role and content")
    turns = []
    for turn in value:
        role = content = None
        if isinstance(turn, dict):
            # A table gives each turn the keys of all: those of the other form are null.
            role, content = turn.get("role") or turn.get("from"), turn.get("content")
            content = turn.get("value") if content is None else content
        if not isinstance(role, str) or not isinstance(content, str):
            raise DataError(f"{where}: found the turn {turn!r:.60}; expected text under role and content")
        turns.append({"role": _ROLES.get(role, role), "content": content})
    return turns


def _answered(turns: Sequence[dict[str, str]]) -> bool:
    return any(turn["role"] == "assistant" and turn["content"].strip() for turn in turns)
