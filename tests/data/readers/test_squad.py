"""SQuAD's nested JSON as flat rows, and what is wrong in it."""

from __future__ import annotations

import json

import pytest

from hf_dist.data.readers.files import load_file
from hf_dist.errors import DataError

CONTEXT = "Oslo is the capital of Norway."


def document(*asked, **article) -> dict:
    paragraphs = [{"context": CONTEXT, "qas": list(asked)}]
    return {"version": "v2.0", "data": [{"title": "Oslo", "paragraphs": paragraphs, **article}]}


def question(**other) -> dict:
    answers = [{"text": "Oslo", "answer_start": 0}]
    return {"id": "q", "question": "Which capital?", "answers": answers, **other}


@pytest.fixture
def read(tmp_path):
    def load(content, **how):
        (tmp_path / "a.json").write_text(json.dumps(content, **how))
        return list(load_file(tmp_path / "a.json"))

    return load


@pytest.mark.parametrize("indent", [None, 1])
def test_one_row_a_question(read, indent):
    impossible = {"id": "r", "question": "Who?", "is_impossible": True, "plausible_answers": [{"text": "x"}]}
    second = {"paragraphs": [{"context": "b", "qas": [question(id=3, is_impossible=False)]}]}
    content = document(question(), {**impossible, "answers": []}, impossible)
    content["data"].append(second)
    rows = read(content, indent=indent)
    one = {"text": ["Oslo"], "answer_start": [0]}
    none = {"text": [], "answer_start": []}
    first = {"title": "Oslo", "context": CONTEXT}
    assert rows == [
        {"id": "q", "question": "Which capital?", "answers": one, **first},
        {"id": "r", "question": "Who?", "answers": none, **first},
        {"id": "r", "question": "Who?", "answers": none, **first},
        {"id": "3", "question": "Which capital?", "answers": one, "title": "", "context": "b"},
    ]


def test_hidden_answers_are_null(read):
    asked = question()
    del asked["answers"]
    assert [row["answers"] for row in read(document(question(), asked))] == [
        {"text": ["Oslo"], "answer_start": [0]},
        None,
    ]


def test_other_lists_under_data_are_rows_as_before(read):
    assert read({"data": [{"text": "a"}]}) == [{"text": "a"}]


@pytest.mark.parametrize(
    "content, wanted",
    [
        (
            document(question(), question(question=None)),
            r"paragraphs\[0\].qas\[1\].question is null; .*a string",
        ),
        (document({"id": "q"}), r"data\[0\].paragraphs\[0\].qas\[0\] has no question"),
        (document(question(answers=[{"text": "Oslo"}])), r"qas\[0\].answers\[0\] has no answer_start"),
        (document(question(answers=[{"text": "Oslo", "answer_start": "0"}])), "answer_start is a string"),
        (document(question(answers="Oslo")), "answers is a string; expected a list"),
        (document(question(is_impossible=True)), "is_impossible is true and there are answers"),
        (document("q"), r"qas\[0\]: expected an object, found a string"),
        (document(title=7), r"data\[0\].title is a number; expected a string"),
        (document(), "has no rows"),
    ],
)
def test_what_is_wrong_has_its_place(read, content, wanted):
    with pytest.raises(DataError, match=wanted):
        read(content)
