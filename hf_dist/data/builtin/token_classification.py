"""Built-in data for tagging: lines of the standard library's source, and what their names stand for.

A word is a token of Python, a row is a logical line, and the entities are the names that the syntax tree says
something of: the same name is a function where it is defined, a call elsewhere, and an attribute or a keyword
argument in a third place. Which it is shows only in the words around it.
"""

from __future__ import annotations

import ast
import io
import json
import sysconfig
import tokenize
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Value

from hf_dist.data.builtin.docstrings import SPLITS, Split, builtin_folder, digest, library_modules, split_of
from hf_dist.data.cache import build_once

TYPES = ("attribute", "call", "class", "function", "keyword", "module", "parameter", "variable")
TAGS = ("O", *(f"{prefix}-{name}" for name in TYPES for prefix in "BI"))

# Part of the cache's name: raise it when other rows are found.
_SCHEMA = 1
_MOST_ROWS = 9_000
_ROWS_PER_MODULE = 60
_SHORTEST, _LONGEST = 5, 40
_LONGEST_WORD = 30

_Place: TypeAlias = tuple[int, int]
_Row: TypeAlias = tuple[list[str], list[str]]
_SKIPPED = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER}
)


def source_lines() -> DatasetDict:
    """Words of a logical line of Python -> what the names in it are.

    Entities, tagged by BIO: `function`, `class` and `parameter` where they are defined, `module` (a dotted
    name that is imported, or imported from), `call` (a dotted name that is called: `os.path.join`),
    `attribute` (a dotted name that is not), `keyword` (the name of a keyword argument) and `variable` (a
    name that is assigned to). Every other word is O. The modules come in the order of a hash of their
    names, and each gives at most 60 lines; copies are left out. Computed once a machine.

    Returns:
        train, validation and test with the columns `tokens` (list of strings) and `tags` (list of
        ClassLabel).
    """

    def build(folder: Path) -> None:
        with open(folder / "lines.jsonl", "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in _collect())

    folder = build_once(builtin_folder() / f"tagging-{_SCHEMA}", build)
    table: dict[Split, tuple[list[list[str]], list[list[str]]]] = {split: ([], []) for split in SPLITS}
    with open(folder / "lines.jsonl", encoding="utf-8") as file:
        for line in file:
            words, tags = json.loads(line)
            for column, values in zip(table[split_of(" ".join(words))], (words, tags), strict=True):
                column.append(values)
    features = Features({"tokens": List(Value("string")), "tags": List(ClassLabel(names=list(TAGS)))})
    return DatasetDict(
        {
            split: Dataset.from_dict({"tokens": tokens, "tags": tags}, features=features)
            for split, (tokens, tags) in table.items()
        }
    )


def _collect() -> list[_Row]:
    root = Path(sysconfig.get_path("stdlib"))
    found: dict[str, _Row] = {}
    taken: Counter[str] = Counter()
    for module, path in sorted(library_modules(root), key=lambda pair: digest(pair[0])):
        for row in _lines_of(path):
            name = digest(" ".join(row[0]))
            if name not in found and taken[module] < _ROWS_PER_MODULE:
                taken[module] += 1
                found[name] = row
        if len(found) >= _MOST_ROWS:
            break
    # The order of the hash mixes the modules.
    return [found[name] for name in sorted(found)]


def _lines_of(path: Path) -> Iterator[_Row]:
    """The logical lines of a file that are neither short nor long and have an entity."""
    try:
        source = path.read_bytes()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes such as "\\d"
            entities = _entities(ast.parse(source))
        words: list[str] = []
        tags: list[str] = []
        inside = ""  # type of the entity that the next word may belong to
        last: _Place = (0, 0)
        for token in tokenize.tokenize(io.BytesIO(source).readline):
            if token.type == tokenize.NEWLINE:
                whole = _SHORTEST <= len(words) <= _LONGEST and max(map(len, words)) <= _LONGEST_WORD
                if whole and set(tags) != {"O"}:
                    yield words, tags
                words, tags, inside = [], [], ""
            elif token.type not in _SKIPPED:
                # The tree counts bytes, the tokenizer characters.
                start = (token.start[0], len(token.line[: token.start[1]].encode()))
                if start in entities:
                    inside, last = entities[start]
                    tags.append(f"B-{inside}")
                elif inside and start < last:
                    tags.append(f"I-{inside}")
                else:
                    inside = ""
                    tags.append("O")
                words.append(token.string)
    except (SyntaxError, ValueError, OSError, tokenize.TokenError):
        return  # samples of other versions of Python


def _entities(tree: ast.Module) -> dict[_Place, tuple[str, _Place]]:
    """Type and end of the entity that starts at each (line, byte)."""
    found: dict[_Place, tuple[str, _Place]] = {}

    def add(kind: str, line: int, column: int, length: int) -> None:
        found.setdefault((line, column), (kind, (line, column + length)))

    def dotted(node: ast.expr, kind: str) -> None:
        """A name, or names with dots between them, all on one line."""
        base = node
        while isinstance(base, ast.Attribute):
            base = base.value
        if isinstance(base, ast.Name) and node.end_lineno == node.lineno and node.end_col_offset:
            add(kind, node.lineno, node.col_offset, node.end_col_offset - node.col_offset)

    for node in ast.walk(tree):  # parents go before their children, and the first type of a place stays
        if isinstance(node, ast.Call):
            dotted(node.func, "call")
        elif isinstance(node, ast.keyword) and node.arg:
            add("keyword", node.lineno, node.col_offset, len(node.arg.encode()))
        elif isinstance(node, ast.Attribute):
            dotted(node, "attribute")
        elif isinstance(node, ast.arg):
            add("parameter", node.lineno, node.col_offset, len(node.arg.encode()))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            dotted(node, "variable")
        elif isinstance(node, ast.FunctionDef):
            add("function", node.lineno, node.col_offset + len("def "), len(node.name.encode()))
        elif isinstance(node, ast.ClassDef):
            add("class", node.lineno, node.col_offset + len("class "), len(node.name.encode()))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                add("module", alias.lineno, alias.col_offset, len(alias.name.encode()))
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            add("module", node.lineno, node.col_offset + len("from "), len(node.module.encode()))
    return found
