"""Tagged rows, the task that loads them, and a model that is always right."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from hf_dist.config import DataConfig, ModelConfig
from hf_dist.tasks.token_classification.task import TokenClassification

NO_MODEL = ModelConfig()

BIO = [
    (["Ann", "Lee", "lives", "in", "Rome"], ["B-PER", "I-PER", "O", "O", "B-LOC"]),
    (["Rome", "is", "old"], ["B-LOC", "O", "O"]),
    (["she", "left"], ["O", "O"]),
    (["Lee", "left", "Rome"], ["B-PER", "O", "B-LOC"]),
]


def json_lines(path: Path, rows: list, names: tuple[str, str] = ("tokens", "tags")) -> str:
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    return str(path)


def loaded(tmp_path, train=BIO, validation=None, model=NO_MODEL, settings=None, **data):
    """The task with its raw and encoded splits."""
    task = TokenClassification(settings)
    config = DataConfig(
        train_file=json_lines(tmp_path / "train.jsonl", train),
        validation_file=json_lines(tmp_path / "dev.jsonl", validation or BIO),
        **{"max_length": 64, **data},
    )
    raw = task.load(config, model)
    tokenizer = task.tokenizer(config, model)
    task.model_config(tokenizer, model)
    encoded, truncated = task.encode(raw, tokenizer, config)
    return task, tokenizer, encoded, truncated


def perfect(task, rows) -> list[np.ndarray]:
    """What a model would predict that is always right at the first sub-words, and wrong elsewhere."""
    found = []
    for row in rows:
        tags = np.full(len(row["input_ids"]), len(task.classes) - 1)
        for place, tag in zip(row["first"], row["tags"], strict=True):
            if place >= 0:
                tags[place] = tag
        found.append(tags)
    return found
