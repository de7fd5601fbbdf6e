"""The built-in data for tagging: what the names in the library's source are."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from hf_dist.data.builtin import token_classification as builtin_tagging
from hf_dist.data.builtin.token_classification import TAGS, TYPES, source_lines

SOURCE = '''
import os.path as p, sys
from json.decoder import JSONDecoder

class Reader(Base, metaclass=Meta):
    """Read."""

    def é_read(self, size: int = -1) -> bytes:
        self.file.data = wrapped = open(size, mode="rb").read().decode
        for line in os.path.join("a" if size else "b", *size):
            del line.x
        return 1
'''


@pytest.fixture(scope="module")
def splits():
    return source_lines()


def test_names_are_what_the_syntax_says(tmp_path):
    path = tmp_path / "reader.py"
    path.write_text(SOURCE, encoding="utf-8")
    lines = [" ".join(f"{w}/{t}" if t != "O" else w for w, t in zip(words, tags, strict=True))
             for words, tags in builtin_tagging._lines_of(path)]  # fmt: skip
    assert lines == [
        "import os/B-module ./I-module path/I-module as p , sys/B-module",
        "from json/B-module ./I-module decoder/I-module import JSONDecoder",
        "class Reader/B-class ( Base , metaclass/B-keyword = Meta ) :",
        "def é_read/B-function ( self/B-parameter , size/B-parameter : int = - 1 ) -> bytes :",
        "self/B-attribute ./I-attribute file/I-attribute ./I-attribute data/I-attribute = wrapped/B-variable "
        '= open/B-call ( size , mode/B-keyword = "rb" ) . read ( ) . decode',
        "for line/B-variable in os/B-call ./I-call path/I-call ./I-call join/I-call "
        '( "a" if size else "b" , * size ) :',
        # Too short: del line.x has four words, return 1 two.
    ]


def test_source_of_another_python_gives_nothing(tmp_path):
    path = tmp_path / "old.py"
    path.write_text("print 'hello', world\n")
    assert list(builtin_tagging._lines_of(path)) == []


def test_rows_are_lines_of_python(splits):
    assert set(splits) == {"train", "validation", "test"}
    assert len(splits["train"]) > 5000 and min(len(rows) for rows in splits.values()) > 500
    parsed = 0
    for words in splits["test"]["tokens"][:200]:
        text = " ".join(words)
        try:
            ast.parse(text if not text.endswith(":") else f"{text} pass")
        except SyntaxError:
            continue  # elif, except and lines of a decorator stand in no tree of their own
        parsed += 1
    assert parsed > 170


def test_tags_are_whole_entities(splits):
    counts: Counter[str] = Counter()
    names = splits["train"].features["tags"].feature.names
    assert tuple(names) == TAGS
    for rows in splits.values():
        for words, tags in zip(rows["tokens"], rows["tags"], strict=True):
            assert len(words) == len(tags) and 5 <= len(words) <= 40
            before = "O"
            for tag in (names[number] for number in tags):
                if tag.startswith("I-"):
                    assert before[2:] == tag[2:]
                before = tag
                counts[tag] += 1
    assert all(counts[f"B-{kind}"] > 100 for kind in TYPES)


def test_no_line_is_in_two_splits(splits):
    lines = [" ".join(words) for rows in splits.values() for words in rows["tokens"]]
    assert len(lines) == len(set(lines))


def test_the_same_name_has_several_tags(splits):
    """Or else there would be nothing to learn from the context."""
    names = splits["train"].features["tags"].feature.names
    seen: dict[str, set[str]] = {}
    for words, tags in zip(splits["train"]["tokens"], splits["train"]["tags"], strict=True):
        for word, tag in zip(words, tags, strict=True):
            seen.setdefault(word, set()).add(names[tag])
    assert sum(len(tags) > 2 for tags in seen.values()) > 300
