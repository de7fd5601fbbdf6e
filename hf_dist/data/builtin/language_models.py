"""Built-in text for language models: the documentation of the Python that runs."""

from __future__ import annotations

from datasets import Dataset, DatasetDict, Features, Value

from hf_dist.data.builtin.docstrings import SPLITS, Split, digest, docstrings, split_of

_FEWEST_CHARACTERS = 40


def docstring_texts() -> DatasetDict:
    """Every docstring of the standard library once, without very short ones; topics of `help()` included.

    Rows come in the order of their hash.

    Returns:
        train, validation and test with the column `text`.
    """
    unique = {digest(row.text): row.text for row in docstrings() if len(row.text) >= _FEWEST_CHARACTERS}
    table: dict[Split, list[str]] = {split: [] for split in SPLITS}
    for _, text in sorted(unique.items()):
        table[split_of(text)].append(text)
    features = Features({"text": Value("string")})
    return DatasetDict(
        {split: Dataset.from_dict({"text": texts}, features=features) for split, texts in table.items()}
    )
