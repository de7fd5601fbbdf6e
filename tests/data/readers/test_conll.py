"""CoNLL: sentences, columns, comments, and lines that don't fit."""

from __future__ import annotations

import pytest

from hf_dist.data.readers.files import load_file
from hf_dist.errors import DataError


def read(tmp_path, content: str) -> list[dict]:
    path = tmp_path / "a.conll"
    path.write_bytes(content.encode())
    return list(load_file(path))


def test_the_first_column_is_the_token_and_the_last_the_tag(tmp_path):
    """A sample in the form of the CoNLL-2003 task: four columns, parted by blanks, and documents."""
    content = (
        "-DOCSTART- -X- -X- O\n\nOslo NNP B-NP B-LOC\nis VBZ B-VP O\n\n\n"
        "-DOCSTART- -X- O O\n\nYes UH B-INTJ O\n"
    )
    for end in ("\n", "\r\n"):
        assert read(tmp_path, "\ufeff" + content.replace("\n", end)) == [
            {"tokens": ["Oslo", "is"], "tags": ["B-LOC", "O"]},
            {"tokens": ["Yes"], "tags": ["O"]},
        ]


def test_tabs_keep_blanks_in_tokens_and_blank_lines_may_hold_blanks(tmp_path):
    assert read(tmp_path, "New York\tB\n\u00a0\tO\n \t \nx\tO") == [
        {"tokens": ["New York", "\u00a0"], "tags": ["B", "O"]},
        {"tokens": ["x"], "tags": ["O"]},
    ]
    assert read(tmp_path, "a  \tO\nb\tO\n") == [{"tokens": ["a  ", "b"], "tags": ["O", "O"]}]
    assert read(tmp_path, "a   O  \n\u3000 O\n") == [{"tokens": ["a", "\u3000"], "tags": ["O", "O"]}]


def test_a_document_ends_a_sentence(tmp_path):
    assert [row["tokens"] for row in read(tmp_path, "a O\n-DOCSTART- O\nb O\n")] == [["a"], ["b"]]


def test_comments_stand_before_a_sentence_and_a_hash_may_be_a_token(tmp_path):
    content = (
        "# id 12 of a corpus\tdomain=en\nBonn _ _ B-LOC\n# _ _ O\n\n# one comment more here\n#one _ _ O\n"
    )
    assert read(tmp_path, content) == [
        {"tokens": ["Bonn", "#"], "tags": ["B-LOC", "O"]},
        {"tokens": ["#one"], "tags": ["O"]},
    ]
    assert read(tmp_path, "# O\n#tag O\n\n# O\n") == [
        {"tokens": ["#", "#tag"], "tags": ["O", "O"]},
        {"tokens": ["#"], "tags": ["O"]},
    ]


def test_a_hash_before_a_sentence_is_a_token_where_its_tag_says_so(tmp_path):
    assert read(tmp_path, "a NN\nb SYM\n\n# SYM\n\n# B-x\n")[1:] == [
        {"tokens": ["#"], "tags": ["SYM"]},
        {"tokens": ["#"], "tags": ["B-x"]},
    ]
    assert read(tmp_path, "#\tSYM\n") == [{"tokens": ["#"], "tags": ["SYM"]}]


def test_tokens_alone(tmp_path):
    assert read(tmp_path, "a\nb\n\n#\nc\n") == [{"tokens": ["a", "b"]}, {"tokens": ["#", "c"]}]


@pytest.mark.parametrize(
    "content, wanted",
    [
        ("a O\nb\n", r"a.conll, line 2: 1 column\(s\) where line 1 has 2"),
        ("\na O\n\nb X O\n", r"line 4: 3 column\(s\) where line 2 has 2"),
        ("a O\n\n# comment\nb O\n", "line 3 may be a comment, or the token # with the tag comment"),
        ("a O\n# a comment inside\n", r"line 2: 4 column\(s\)"),
        ("a\tO\nb O\n", r"line 2: 1 column\(s\).*tabs"),
        ("a\tO\nb\t\n", "line 2: the tag is empty"),
        ("a\tO\n\tO\n", "line 2: the token is empty"),
        ("# text\n1\tA\tO\n2\tb\tO\n3\tc\tO\n", "line 2: the first column counts the tokens"),
        ("\n\n", "has no rows"),
        ("-DOCSTART- O\n", "has no rows"),
    ],
)
def test_lines_that_do_not_fit(tmp_path, content, wanted):
    with pytest.raises(DataError, match=wanted):
        read(tmp_path, content)
