"""Ten steps of text classification against a plain Trainer: a class, several classes, a number."""

from __future__ import annotations

import pytest
import torch
from transformers import DataCollatorWithPadding

from recipes.text_classification import build
from tests.recipes.seq2seq_runs import write
from tests.recipes.stock import compare_with_stock

WORDS = ("file", "socket", "thread", "class", "module", "string")
ROWS = {
    "class": [("text", "label")] + [(f"the {word} opens", place % 3) for place, word in enumerate(WORDS * 8)],
    "classes": [("text", "labels")]
    + [(f"the {word} opens", ["a", "b"][: 1 + place % 2]) for place, word in enumerate(WORDS * 8)],
    "number": [("text", "label")] + [(f"the {word} opens", len(word) / 3) for word in WORDS * 8],
}


def stock_collator(recipe):
    return DataCollatorWithPadding(recipe.tokenizer)


def several_labels(recipe):
    """The stock collator with the classes of a row as zeros and ones, which the model wants."""
    padding = DataCollatorWithPadding(recipe.tokenizer)

    def collate(rows):
        batch = padding([{key: value for key, value in row.items() if key != "labels"} for row in rows])
        hot = [[float(place in row["labels"]) for place in range(2)] for row in rows]
        return {**batch, "labels": torch.tensor(hot)}

    return collate


@pytest.mark.parametrize("kind", ROWS)
def test_ten_steps_equal_the_stock_trainer(kind, tmp_path):
    names, *rows = ROWS[kind]
    for split in ("train", "dev"):
        write(tmp_path / f"{split}.jsonl", [dict(zip(names, row, strict=True)) for row in rows])
    recipe = compare_with_stock(
        build,
        tmp_path,
        collator=several_labels if kind == "classes" else stock_collator,
        rows_per_step=16,
        learning_rate=3e-3,
        train_file=str(tmp_path / "train.jsonl"),
        validation_file=str(tmp_path / "dev.jsonl"),
        **({"problem": "regression"} if kind == "number" else {}),
    )
    expected = {"class": None, "classes": "multi_label_classification", "number": "regression"}[kind]
    assert expected is None or recipe.model.config.problem_type == expected
