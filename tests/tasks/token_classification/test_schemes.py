"""Tagging schemes: which one the tags are in, and what isn't well formed in it."""

from __future__ import annotations

import logging

import numpy as np
import pyarrow as pa
import pytest

from hf_dist.errors import ConfigError
from hf_dist.tasks.token_classification.schemes import Openings, openings, recognise
from tests.tasks.token_classification.tagged import BIO, loaded


@pytest.mark.parametrize(
    "tags, wanted, scheme",
    [
        (["O", "B-a", "I-a"], "auto", "iob2"),
        (["O", "B-a"], "auto", "iob2"),
        (["O", "I-a", "I-b"], "auto", "iob1"),
        (["O", "B-a", "I-a"], "iob1", "iob1"),
        (["O", "B-a", "I-a", "E-a", "S-b-c"], "auto", "iobes"),
        (["O", "B-a", "L-a", "U-a"], "auto", "bilou"),
        (["B", "I", "O"], "auto", "iob2"),
        (["O", "B-a", "I-a"], "plain", "plain"),
        (["NOUN", "VERB"], "auto", "plain"),
        (["I", "E"], "auto", "plain"),
        (["B-a", "NN"], "auto", "plain"),
        (["O"], "auto", "plain"),
        (["0", "1"], "auto", "plain"),
    ],
)
def test_schemes_are_recognised_by_their_tags(tags, wanted, scheme):
    assert recognise(tags, wanted) == scheme


@pytest.mark.parametrize(
    "rows, expected, scheme",
    [
        # CoNLL-2003 as it was published: B- only where an entity follows one of its type.
        (["O I-a I-a O", "I-a B-a I-b"], Openings(inside=3, begin=0), "iob1"),
        (["B-a I-a O B-b", "B-a B-a"], Openings(inside=0, begin=4 - 1), "iob2"),
        # A slip in either.
        (["B-a I-a", "B-b", "O I-a"], Openings(inside=1, begin=2), "iob2"),
        (["I-a I-a", "I-b O I-b", "B-a"], Openings(inside=3, begin=1), "iob1"),
        (["B I", "I O B B"], Openings(inside=1, begin=2), "iob2"),
        (["S-a O", "B-a E-a"], Openings(inside=0, begin=1), "iobes"),
    ],
)
def test_iob1_is_told_by_how_entities_open(rows, expected, scheme):
    tags = [tag for row in rows for tag in row.split()]
    ends = np.cumsum([0, *(len(row.split()) for row in rows)])
    found = openings(pa.chunked_array([pa.array(tags)]), ends)
    assert found == expected
    assert recognise(sorted({*tags, "O"}), "auto", found) == scheme


def test_tags_outside_of_their_scheme_are_named(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="hf_dist"):
        logging.getLogger("hf_dist").propagate = True
        loaded(tmp_path, train=[*BIO, (["a"], ["I-PER"])])
        assert "scheme IOB2: a B- opens each entity" in caplog.text
        assert "1 entities open with an I-, which is not well formed in IOB2" in caplog.text
        caplog.clear()
        loaded(tmp_path, train=[*BIO, (["a"], ["_"])])
        assert "scheme plain" in caplog.text and "as most others are: _;" in caplog.text


def test_a_scheme_that_the_tags_are_not_in():
    with pytest.raises(ConfigError, match="--tag_scheme iobes: the tags are NOUN, VERB; expected O, B-TYPE"):
        recognise(["NOUN", "VERB"], "iobes")
