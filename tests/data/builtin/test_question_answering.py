"""The built-in data for question answering: each answer is at its place, and stands in one split."""

from __future__ import annotations

import pytest

from hf_dist.data.builtin.docstrings import docstrings
from hf_dist.data.builtin.question_answering import docstring_questions


@pytest.fixture(scope="module")
def splits():
    return docstring_questions()


def test_answers_are_at_their_place(splits):
    for rows in splits.values():
        assert len(rows) > 800
        for row in rows:
            (text,), (start,) = row["answers"]["text"], row["answers"]["answer_start"]
            assert row["context"][start : start + len(text)] == text


def test_answers_are_what_the_library_says(splits):
    known: dict[tuple[str, str, str], str] = {}
    for row in docstrings():
        owner, _, name = row.name.rpartition(".")
        known[name, owner, row.module] = " ".join(row.text.split())
    rows = list(splits["test"])
    for does, where, whose in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        name = does["question"].removeprefix("What does ").removesuffix(" do?")
        assert where["question"] == f"Where is {name} defined?"
        assert whose["question"] == f"Which class has {name}?"
        sentence, module, owner = (one["answers"]["text"][0] for one in (does, where, whose))
        assert does["context"] == where["context"] == whose["context"]
        assert known[name, owner, module].startswith(" ".join(sentence.split()))


def test_no_sentence_and_no_context_is_in_two_splits(splits):
    contexts = [set(rows["context"]) for rows in splits.values()]
    sentences = [{row["answers"]["text"][0].lower() for row in list(rows)[::3]} for rows in splits.values()]
    for found in (contexts, sentences):
        assert sum(map(len, found)) == len(set.union(*found))


def test_ids_differ_and_no_order_is_preferred(splits):
    rows = splits["train"]
    assert len(set(rows["id"])) == len(rows)
    places = [row["context"][: row["answers"]["answer_start"][0]].count(". ") for row in list(rows)[1::3]]
    shares = [places.count(place) / len(places) for place in (0, 1, 2)]
    assert all(0.3 < share < 0.37 for share in shares)
