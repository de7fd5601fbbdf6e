"""Question answering in the JSON of SQuAD 1.1 and 2.0 (XQuAD, MLQA and others have the same).

Rajpurkar et al. 2016 (arXiv:1606.05250) and 2018 (arXiv:1806.03822): articles hold paragraphs, those hold
questions, and an answer is a text and the place of its first character in the paragraph.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_dist.data.readers.cells import kind_of
from hf_dist.data.readers.formats import Row
from hf_dist.errors import DataError


def is_squad(document: Any) -> bool:
    """Whether a JSON document is `{"data": [{"paragraphs": [...]}, ...]}`."""
    articles = document.get("data") if isinstance(document, dict) else None
    return (
        isinstance(articles, list)
        and bool(articles)
        and isinstance(articles[0], dict)
        and isinstance(articles[0].get("paragraphs"), list)
    )


def squad_rows(path: Path, document: dict[str, Any]) -> Iterator[Row]:
    """One row a question: `id`, `title`, `context`, `question` and `answers` (`text`, `answer_start`: lists).

    A question without an answer has empty lists, and one whose answers are left out (hidden) a null.

    Raises:
        DataError: something is missing or of another kind; with its place, counted from 0.
    """
    for at, article in enumerate(document["data"]):
        place = f"data[{at}]"
        title = _get(path, place, article, "title", str, default="")
        for number, paragraph in enumerate(_get(path, place, article, "paragraphs", list)):
            part = f"{place}.paragraphs[{number}]"
            context = _get(path, part, paragraph, "context", str)
            for asked_at, asked in enumerate(_get(path, part, paragraph, "qas", list)):
                question = f"{part}.qas[{asked_at}]"
                yield (
                    question,
                    {
                        "id": str(_get(path, question, asked, "id", str | int)),
                        "title": title,
                        "context": context,
                        "question": _get(path, question, asked, "question", str),
                        "answers": _answers(path, question, asked),
                    },
                )


def _answers(path: Path, place: str, asked: dict[str, Any]) -> dict[str, list[Any]] | None:
    impossible = _get(path, place, asked, "is_impossible", bool, default=False)
    answers = _get(path, place, asked, "answers", list | None, default=[] if impossible else None)
    if answers is None:
        return None
    if impossible and answers:
        raise DataError(
            f"{path}, {place}: is_impossible is true and there are answers; remove either (SQuAD 2.0 keeps "
            "such answers under plausible_answers)"
        )
    texts, starts = [], []
    for at, answer in enumerate(answers):
        part = f"{place}.answers[{at}]"
        texts.append(_get(path, part, answer, "text", str))
        starts.append(_get(path, part, answer, "answer_start", int))
    return {"text": texts, "answer_start": starts}


_REQUIRED = object()
_KINDS = {
    str: "a string",
    str | int: "a string",
    int: "a whole number",
    bool: "true or false",
    list: "a list",
    list | None: "a list",
}


def _get(path: Path, place: str, value: Any, key: str, kind: Any, *, default: Any = _REQUIRED) -> Any:
    if not isinstance(value, dict):
        raise DataError(f"{path}, {place}: expected an object, found {kind_of(value)}")
    found = value.get(key, default)
    if found is _REQUIRED:
        raise DataError(f"{path}, {place} has no {key}; the JSON of SQuAD needs it")
    if found is not default and (not isinstance(found, kind) or (isinstance(found, bool) and kind is int)):
        raise DataError(f"{path}, {place}.{key} is {kind_of(found)}; expected {_KINDS[kind]}")
    return found
