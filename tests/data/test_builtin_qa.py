"""The built-in data for question answering: each answer is at its place, and stands in one split."""

from __future__ import annotations

import pytest

from hf_dist.data.builtin_qa import docstring_questions
from hf_dist.data.docstrings import docstrings


@pytest.fixture(scope="module")
def splits():
    return docstring_questions()


def test_answers_are_at_their_place(splits):
    for rows in splits.values():
        assert len(rows) > 500
        for row in rows:
            (text,), (start,) = row["answers"]["text"], row["answers"]["answer_start"]
            assert row["context"][start : start + len(text)] == text
            name = row["question"].removeprefix("What does ").removesuffix(" do?")
            assert (
                row["context"][:start].endswith(f"{name}: ") and f" {row['context']}".count(f" {name}: ") == 1
            )


def test_answers_are_the_first_sentences_of_docstrings(splits):
    first = {}
    for row in docstrings():
        first.setdefault(row.name.rpartition(".")[2], set()).add(" ".join(row.text.split()))
    for row in splits["test"]:
        name = row["question"].removeprefix("What does ").removesuffix(" do?")
        assert any(text.startswith(" ".join(row["answers"]["text"][0].split())) for text in first[name])


def test_no_answer_and_no_context_is_in_two_splits(splits):
    for column in ("context", "answer"):
        found = [
            {row["context"] if column == "context" else row["answers"]["text"][0].lower() for row in rows}
            for rows in splits.values()
        ]
        assert sum(map(len, found)) == len(set.union(*found))


def test_ids_differ_and_every_place_is_asked_for(splits):
    rows = splits["validation"]
    assert len(set(rows["id"])) == len(rows)
    places = [row["context"][: row["answers"]["answer_start"][0]].count(": ") for row in rows]
    shares = [places.count(place) / len(rows) for place in sorted(set(places))]
    assert max(shares) < 1.1 / len(shares)
