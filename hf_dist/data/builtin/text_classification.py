"""The built-in data sets: what each task makes of the standard library's docstrings."""

from __future__ import annotations

from collections import Counter

from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

from hf_dist.data.builtin.docstrings import SPLITS, Docstring, Split, digest, docstrings, split_of


def docstring_modules(*, classes: int = 20, rows_per_class: int = 300) -> DatasetDict:
    """Docstring -> the top-level module that it comes from, for the modules with the most docstrings.

    A text that several modules share is left out, and so are copies within one. Rows come in the order of
    their hash, which mixes the classes.

    Args:
        classes: number of modules.
        rows_per_class: most rows of one module over all splits; it keeps the majority baseline low.

    Returns:
        train, validation and test with the columns `text` (string) and `label` (ClassLabel, names sorted).
    """
    owners: dict[str, set[str]] = {}
    rows: dict[str, Docstring] = {}
    for row in docstrings():
        if row.kind != "topic":
            key = digest(row.text)
            owners.setdefault(key, set()).add(row.package)
            rows.setdefault(key, row)
    unique = [rows[key] for key in sorted(rows) if len(owners[key]) == 1]
    counts = Counter(row.package for row in unique)
    names = sorted(sorted(counts, key=lambda name: (-counts[name], name))[:classes])

    taken: Counter[str] = Counter()
    table: dict[Split, tuple[list[str], list[int]]] = {split: ([], []) for split in SPLITS}
    for row in unique:
        if row.package in names and taken[row.package] < rows_per_class:
            taken[row.package] += 1
            texts, labels = table[split_of(row.text)]
            texts.append(row.text)
            labels.append(names.index(row.package))
    features = Features({"text": Value("string"), "label": ClassLabel(names=names)})
    return DatasetDict(
        {
            split: Dataset.from_dict({"text": texts, "label": labels}, features=features)
            for split, (texts, labels) in table.items()
        }
    )
