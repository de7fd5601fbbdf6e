"""What a causal language model is trained on: plain text, a prompt and its answer, or a conversation."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from datasets import Dataset, DatasetDict

from hf_dist.data import labels
from hf_dist.data.loading import sources
from hf_dist.data.readers.json_cells import JsonColumns, plain_cells
from hf_dist.errors import DataError, nearest
from hf_dist.tasks.causal_lm.chat_turns import (
    Conversation,
    has_answer,
    read_conversation,
    without_last_answer,
)
from hf_dist.tasks.plain_text import TEXT_COLUMNS, texts_of

logger = logging.getLogger(__name__)

Form = Literal["text", "prompt", "chat"]

PROMPT_COLUMNS = ("prompt", "instruction", "question", "query")
INPUT_COLUMNS = ("input", "context")
COMPLETION_COLUMNS = ("completion", "response", "output", "answer", "chosen")
MESSAGES_COLUMNS = ("messages", "conversations", "conversation", "dialog")
TOOLS_COLUMNS = ("tools",)


@dataclass(frozen=True)
class CausalColumns:
    """Where the data has what is trained on; a name may be a path such as `instances.0.output`."""

    form: Form
    main: str
    input: str | None = None
    completion: str | None = None
    tools: str | None = None


def json_columns(settings: Any) -> JsonColumns:
    """The columns of local files that may hold conversations or tools, and are kept as JSON text."""
    if settings.messages_column:
        messages: tuple[str, ...] = (settings.messages_column,)
    elif settings.text_column or settings.prompt_column or settings.completion_column:
        return frozenset()
    else:
        messages = MESSAGES_COLUMNS
    tools = (settings.tools_column,) if settings.tools_column else TOOLS_COLUMNS
    return frozenset(name.split(".")[0].strip().lower() for name in (*messages, *tools))


def find_form(splits: DatasetDict, settings: Any) -> CausalColumns:
    """The form that the flags say, or that the columns show.

    Args:
        splits: raw splits.
        settings: `text_column`, `prompt_column`, `input_column`, `completion_column`, `messages_column`,
            `tools_column`.

    Raises:
        DataError: a named column isn't there, or no form is recognised.
    """
    first = splits[sources.first_split(splits)]
    there = first.column_names
    anywhere = list(dict.fromkeys(name for rows in splits.values() for name in rows.column_names))
    tools = settings.tools_column or sources.usual_column(anywhere, TOOLS_COLUMNS)
    if settings.messages_column:
        return _found(CausalColumns("chat", settings.messages_column, tools=tools), there, anywhere)
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
        return _found(CausalColumns("chat", messages, tools=tools), there, anywhere)
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


def _found(
    columns: CausalColumns, there: Sequence[str], anywhere: Sequence[str] | None = None
) -> CausalColumns:
    needed = [(name, there) for name in (columns.main, columns.input, columns.completion)]
    # Another split than the first may be the only one with tools.
    for name, names in [*needed, (columns.tools, anywhere or there)]:
        if name is not None and name not in names and name.split(".")[0] not in names:
            raise DataError(
                f"there is no column {name}{nearest(name, names)}; the data has {', '.join(names)}"
            )
    shown = {
        columns.form: columns.main,
        "tools": columns.tools,
        "input": columns.input,
        "answer": columns.completion,
    }
    logger.info("columns: %s", ", ".join(f"{key} {name}" for key, name in shown.items() if name))
    return columns


def read_form(rows: Dataset, columns: CausalColumns, *, split: str) -> Dataset:
    """The rows in our own columns: `text`; `prompt` and `completion`; or `conversation`.

    A conversation is JSON text of a `chat_turns.Conversation`. A blank text is left out and counted, and so
    is a conversation whose answers all have weight 0. A test split may lack the answers.

    Raises:
        DataError: with the row number of what is missing or of another kind.
    """
    if columns.form == "text":
        return texts_of(rows, columns.main, split=split)
    if columns.form == "prompt":
        return _prompts(rows, columns, split)
    return _conversations(rows, columns, split)


def _conversations(rows: Dataset, columns: CausalColumns, split: str) -> Dataset:
    messages = _json_values(rows, columns.main, split)
    tools: list[Any] = [None] * len(messages)
    if columns.tools is not None and columns.tools.split(".")[0] in rows.column_names:
        tools = _json_values(rows, columns.tools, split)
    chats = [
        read_conversation(
            turns,
            given,
            column=columns.main,
            tools_column=columns.tools or "",
            row=f"the {split} data, row {row + 1} (counted from 1)",
        )
        for row, (turns, given) in enumerate(zip(messages, tools, strict=True))
    ]
    if split == "test":
        unasked = [row for row, chat in enumerate(chats) if not without_last_answer(chat["turns"])]
        if unasked:
            raise DataError(
                f"column {columns.main} of the test data has nothing to answer in "
                f"{labels.rows_of(np.array(unasked))}; add a turn of the user, or remove the rows"
            )
    else:
        unanswered = [row for row, chat in enumerate(chats) if not any(map(has_answer, chat["turns"]))]
        if unanswered:
            raise DataError(
                f"column {columns.main} of the {split} data has no answer of the assistant in "
                f"{labels.rows_of(np.array(unanswered))}; add it, or remove the rows"
            )
        chats = _with_weight(chats, split)
    return Dataset.from_dict({"conversation": [json.dumps(chat, ensure_ascii=False) for chat in chats]})


def _with_weight(chats: list[Conversation], split: str) -> list[Conversation]:
    """The conversations that have something to learn; the others are counted in the log."""
    kept = [chat for chat in chats if any(chat["learned"])]
    if len(kept) < len(chats):
        logger.info(
            "%s: %d of %d conversations have weight 0 in every answer and are left out",
            split,
            len(chats) - len(kept),
            len(chats),
        )
    return kept


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


def _json_values(rows: Dataset, path: str, split: str) -> list[Any]:
    """The values at a column or a path of conversations or tools, which may be JSON text.

    Raises:
        DataError: a text is no JSON.
    """
    root, *steps = (path,) if path in rows.column_names else path.split(".")
    if root not in rows.column_names:
        return _values(rows, path, split)  # says so
    values = [
        _from_json(cell, root, split, row) if isinstance(cell, str) else cell
        for row, cell in enumerate(plain_cells(labels.arrow_column(rows, root)))
    ]
    return [_walk(value, steps, path, split, row) for row, value in enumerate(values)]


def _from_json(text: str, column: str, split: str, row: int) -> Any:
    if not text.strip():
        return None
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(
            f"column {column} of the {split} data, row {row + 1} (counted from 1): found the text "
            f"{text!r:.60}, which is no JSON ({error}); expected a list, or JSON text of one"
        ) from error


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
