"""Built-in data for question answering: "What does X do?", and the sentence that says so."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from datasets import Dataset, DatasetDict, Features, List, Value

from hf_dist.data.docstrings import SPLITS, Split, digest, docstrings, split_of

_SENTENCE_END = re.compile(r"(?<=[.!?])\s|\n")
_FEWEST_WORDS, _MOST_WORDS = 3, 12
_NAMES_PER_CONTEXT = 3
_CONTEXTS_PER_NAME = 2


def docstring_questions() -> DatasetDict:
    """Question about a function -> the first sentence of its docstring, in a list of functions.

    A context lists three functions, as `name: first sentence`, in random order; each of them is asked for.
    Every function stands in two contexts with others of its split. Functions of one sentence, sentences of
    one function, and those with 3 to 12 words are taken, names with a double underscore left out.

    Returns:
        train, validation and test with the columns of SQuAD: `id`, `question`, `context` and `answers`
        (`text` and `answer_start`).
    """
    functions: dict[Split, list[tuple[str, str]]] = {split: [] for split in SPLITS}
    for name, sentence in _functions():
        functions[split_of(sentence)].append((name, sentence))
    features = Features(
        {
            **{name: Value("string") for name in ("id", "question", "context")},
            "answers": {"text": List(Value("string")), "answer_start": List(Value("int64"))},
        }
    )
    return DatasetDict(
        {split: Dataset.from_list(list(_rows(rows)), features=features) for split, rows in functions.items()}
    )


def _functions() -> list[tuple[str, str]]:
    """Name and first sentence, in the order of a hash of the sentence; each sentence once."""
    found: dict[str, tuple[str, str]] = {}
    for row in docstrings():
        if row.kind != "function":
            continue
        name = row.name.rpartition(".")[2]
        sentence = _SENTENCE_END.split(row.text.strip(), maxsplit=1)[0].strip()
        words = len(sentence.split())
        if _FEWEST_WORDS <= words <= _MOST_WORDS and not name.startswith("__") and ":" not in sentence:
            found.setdefault(digest(sentence), (name, sentence))
    return [found[key] for key in sorted(found)]


def _rows(functions: list[tuple[str, str]]) -> Iterator[dict[str, object]]:
    draw = random.Random(0)
    for turn in range(_CONTEXTS_PER_NAME):
        order = draw.sample(functions, len(functions))
        for first in range(0, len(order) - _NAMES_PER_CONTEXT + 1, _NAMES_PER_CONTEXT):
            group = order[first : first + _NAMES_PER_CONTEXT]
            if len({name for name, _ in group}) < len(group):
                continue
            context = " ".join(f"{name}: {sentence}" for name, sentence in group)
            at = 0
            for name, sentence in group:
                start = at + len(name) + 2
                at = start + len(sentence) + 1
                yield {
                    "id": f"{turn}-{first}-{name}",
                    "question": f"What does {name} do?",
                    "context": context,
                    "answers": {"text": [sentence], "answer_start": [start]},
                }
