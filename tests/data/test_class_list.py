"""Labels that only some splits have: where they stand in the class list, and who is told."""

from __future__ import annotations

import logging

import numpy as np
import pyarrow as pa
import pytest

from hf_dist.data.class_list import SplitLabels, Words, all_classes, check_seen
from hf_dist.errors import DataError

WORDS = Words(column="label")


def of(*names: str | None) -> SplitLabels:
    return SplitLabels(pa.chunked_array([pa.array(names, pa.string())]))


@pytest.mark.parametrize(
    "train, validation, known, keeps_order, expected",
    [
        (["b", "d"], ["a", "b", "c"], (), False, ("a", "b", "c", "d")),
        (["10", "9"], ["9", "2"], (), False, ("2", "9", "10")),
        (["z", "b"], ["b", "c", "a"], (), True, ("z", "b", "a", "c")),
        # A model that knows the training labels keeps its list, with what it doesn't know behind it.
        (["b", "a"], ["a", "c"], ("c", "b", "a"), False, ("c", "b", "a")),
        (["b", "a"], ["a", "e", "d"], ("c", "b", "a"), False, ("c", "b", "a", "d", "e")),
        (["b", "x"], ["x", "a"], ("c", "b", "a"), False, ("a", "b", "x")),
    ],
)
def test_the_order(train, validation, known, keeps_order, expected):
    for rows in (validation, validation[::-1]):
        splits = {"validation": of(*rows), "train": of(*train)}
        order = train if keeps_order else sorted(train)
        assert all_classes(splits, order, known, words=WORDS, keeps_order=keeps_order) == expected


def test_labels_and_rows_are_counted_in_one_line_a_split(caplog):
    several = SplitLabels(of("x", "y", "a", "x", "b", "z").names, np.array([0, 2, 3, 4, 4, 6]))
    splits = {"train": of("a", "b", None), "validation": several, "test": of("a", "q", "b")}
    with caplog.at_level(logging.WARNING):
        assert all_classes(splits, ["a", "b"], (), words=WORDS) == ("a", "b", "q", "x", "y", "z")
    assert [record.message for record in caplog.records] == [
        "3 labels occur only in the validation data (3 rows) and never in the training data: x, y, z "
        "(classes, but not learned ones)",
        "1 label occurs only in the test data (1 row) and never in the training data: q (classes, but not "
        "learned ones)",
    ]


def test_a_split_without_any_label_of_the_training_data_is_refused():
    splits = {"train": of("0", "1"), "validation": of("neg", "pos")}
    with pytest.raises(
        DataError, match="validation data has only labels that the training data never shows: neg"
    ):
        all_classes(splits, ["0", "1"], (), words=WORDS)
    # A model may know them.
    known = ("0", "1", "neg", "pos")
    assert all_classes(splits, ["0", "1"], known, words=WORDS) == known
    assert all_classes({**splits, "validation": of(None)}, ["0", "1"], (), words=WORDS) == ("0", "1")


def test_unseen_labels_give_the_first_row_and_the_nearest_name():
    found = of("pos", "neg", "possitive")
    with pytest.raises(DataError, match=r"possitive \(did you mean positive\?\), first in row 3"):
        check_seen(found, ["pos", "neg", "positive"], split="validation", words=WORDS, by="the model")
    check_seen(found, ["pos", "neg", "possitive"], split="validation", words=WORDS, by="the model")
    several = SplitLabels(of("a", "b", "a", "x").names, np.array([0, 2, 3, 4]))
    with pytest.raises(DataError, match="shows: x, first in row 3"):
        check_seen(several, ["a", "b"], split="validation", words=WORDS, by="the model")
