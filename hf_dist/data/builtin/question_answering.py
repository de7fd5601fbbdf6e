"""Built-in data for question answering: what a method does, where it is and whose it is."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from datasets import Dataset, DatasetDict, Features, List, Value

from hf_dist.data.builtin.docstrings import SPLITS, Split, digest, docstrings, split_of

_SENTENCE_END = re.compile(r"(?<=[.!?])\s|\n")
_FEWEST_WORDS, _MOST_WORDS = 3, 12


@dataclass(frozen=True)
class _Method:
    """A method, and the first sentence of its docstring."""

    name: str
    owner: str
    module: str
    sentence: str


def docstring_questions() -> DatasetDict:
    """Three questions about each method: what it does, where it is defined, and whose method it is.

    A context tells of one method: the first sentence of its docstring, its module and its class, in random
    order; each of the three is the answer to one question. (A model of the built-in size does not learn
    within minutes to find one name among several, so there is no second method.) Methods with a sentence of 3
    to 12 words are taken, names with two underscores left out, and each sentence only once: the hash of it
    decides the split.

    Returns:
        train, validation and test with the columns of SQuAD: `id`, `question`, `context` and `answers`
        (`text` and `answer_start`).
    """
    methods: dict[Split, list[_Method]] = {split: [] for split in SPLITS}
    for method in _methods():
        methods[split_of(method.sentence)].append(method)
    features = Features(
        {
            **{name: Value("string") for name in ("id", "question", "context")},
            "answers": {"text": List(Value("string")), "answer_start": List(Value("int64"))},
        }
    )
    return DatasetDict(
        {split: Dataset.from_list(list(_rows(found)), features=features) for split, found in methods.items()}
    )


def _methods() -> list[_Method]:
    """In the order of a hash of the sentence."""
    found: dict[str, _Method] = {}
    for row in docstrings():
        owner, _, name = row.name.rpartition(".")
        if row.kind != "function" or not owner or "." in owner or name.startswith("__"):
            continue
        sentence = _SENTENCE_END.split(row.text.strip(), maxsplit=1)[0].strip()
        if _FEWEST_WORDS <= len(sentence.split()) <= _MOST_WORDS and ":" not in sentence:
            found.setdefault(digest(sentence), _Method(name, owner, row.module, sentence))
    return [found[key] for key in sorted(found)]


def _rows(methods: list[_Method]) -> Iterator[dict[str, object]]:
    draw = random.Random(0)
    for number, method in enumerate(methods):
        stop = "" if method.sentence[-1] in ".!?" else "."
        facts = [
            (f"What does {method.name} do?", "", method.sentence, stop),
            (f"Where is {method.name} defined?", "It is defined in ", method.module, "."),
            (f"Which class has {method.name}?", "It is a method of ", method.owner, "."),
        ]
        order = draw.sample(range(3), 3)
        context = f"{method.name}:"
        places = {}
        for fact in order:
            _, before, answer, after = facts[fact]
            places[fact] = len(context) + 1 + len(before)
            context += f" {before}{answer}{after}"
        for fact, (question, _, answer, _) in enumerate(facts):
            yield {
                "id": f"{number}-{fact}",
                "question": question,
                "context": context,
                "answers": {"text": [answer], "answer_start": [places[fact]]},
            }
