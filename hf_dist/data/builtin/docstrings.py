"""The documentation of the Python that runs, read from the standard library's source.

Source files are parsed and never imported, so nothing in them runs, and `python -OO` (which drops
docstrings from compiled code) sees the same text. Everything is a pure function of the files: the same
rows in the same order and the same splits for one Python version.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import json
import platform
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from hf_dist.data.cache import build_once, cache_dir, key_of
from hf_dist.errors import DataError

Kind = Literal["module", "class", "function", "topic"]
Split = Literal["train", "validation", "test"]

SPLITS: tuple[Split, ...] = ("train", "validation", "test")

# Part of the cache's key: raise it when the rows that this module finds change.
_SCHEMA = 1
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "turtledemo"}
)
_FEWEST_DOCSTRINGS = 1000


@dataclass(frozen=True, kw_only=True)
class Docstring:
    """A docstring, or a topic of `help()`.

    Attributes:
        module: dotted name of the module that it comes from, such as `email.message`.
        name: dotted name inside the module, empty for the module's own; for a topic, its title.
        kind: what it documents.
        text: the text, with the common indentation removed.
    """

    module: str
    name: str
    kind: Kind
    text: str

    @property
    def package(self) -> str:
        """The top-level module or package."""
        return self.module.partition(".")[0]


def split_of(text: str) -> Split:
    """The split that a text belongs to, by its hash alone: 80 % train, 10 % validation, 10 % test.

    White space and case do not count, so that copies of a text never lie in two splits, and adding or
    removing other rows moves none.
    """
    bucket = int(digest(text)[:8], 16) % 100
    return "train" if bucket < 80 else "validation" if bucket < 90 else "test"


def docstrings() -> tuple[Docstring, ...]:
    """All docstrings of the standard library and the topics of `help()`, sorted by module and position.

    The first call on a machine parses the library (some seconds); later ones read the cache.

    Raises:
        DataError: this Python ships without the source of its library.
    """
    root = Path(sysconfig.get_path("stdlib"))

    def build(folder: Path) -> None:
        found = [asdict(row) for row in _scan(root)]
        if len(found) < _FEWEST_DOCSTRINGS:
            raise DataError(
                f"the built-in data needs the source of Python's standard library, and {root} has only "
                f"{len(found)} docstrings in .py files; use a full Python, or give --train_file or "
                "--dataset_name"
            )
        with open(folder / "docstrings.jsonl", "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in found)

    folder = build_once(builtin_folder() / "docstrings", build)
    with open(folder / "docstrings.jsonl", encoding="utf-8") as file:
        return tuple(Docstring(**json.loads(line)) for line in file)


def builtin_folder() -> Path:
    """Where what is derived from this Python's library is cached: one folder a Python and schema."""
    version = f"{platform.python_implementation().lower()}-{platform.python_version()}"
    return cache_dir() / "builtin" / f"{version}-{key_of(_SCHEMA, sys.version, sysconfig.get_path('stdlib'))}"


def digest(text: str) -> str:
    """A name for a text in which white space and case do not count."""
    return hashlib.sha256(" ".join(text.casefold().split()).encode()).hexdigest()


def library_modules(root: Path) -> Iterator[tuple[str, Path]]:
    """Dotted name and file of each module of the library at `root`, without its tests, sorted by path."""
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).parts):
        parts = path.relative_to(root).with_suffix("").parts
        if _SKIPPED_FOLDERS.isdisjoint(parts) and all(part.isidentifier() for part in parts):
            yield ".".join(parts).removesuffix(".__init__"), path


def _scan(root: Path) -> Iterator[Docstring]:
    # The trees hold no cycles: the collector would walk millions of nodes for nothing.
    collecting = gc.isenabled()
    gc.disable()
    try:
        for module, path in library_modules(root):
            yield from _of_file(path, module)
    finally:
        if collecting:
            gc.enable()


def _of_file(path: Path, module: str) -> Iterator[Docstring]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes such as "\d"
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return  # such as lib2to3's samples of Python 2
    if module == "pydoc_data.topics":
        yield from _topics(tree, module)
        return
    if text := ast.get_docstring(tree):
        yield Docstring(module=module, name="", kind="module", text=text)
    yield from _of_body(tree.body, module, "")


def _of_body(body: list[ast.stmt], module: str, prefix: str) -> Iterator[Docstring]:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            kind: Kind = "class" if isinstance(node, ast.ClassDef) else "function"
            if text := ast.get_docstring(node):
                yield Docstring(module=module, name=prefix + node.name, kind=kind, text=text)
            if kind == "class":
                yield from _of_body(node.body, module, f"{prefix}{node.name}.")
        elif isinstance(node, ast.If | ast.Try):  # a definition that depends on the platform
            yield from _of_body(node.body, module, prefix)
            yield from _of_body(node.orelse, module, prefix)


def _topics(tree: ast.Module, module: str) -> Iterator[Docstring]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for title, text in sorted(ast.literal_eval(node.value).items()):
                yield Docstring(module=module, name=title, kind="topic", text=text.strip())
