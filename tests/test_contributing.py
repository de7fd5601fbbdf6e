"""What CONTRIBUTING.md names is there, and what it says needs no list has none."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import subprocess

import pytest

from hf_dist.data.readers import files
from hf_dist.data.readers.formats import ColumnFormat, TextFormat
from hf_dist.metrics import load_metric
from hf_dist.presets.catalogue import Preset
from tests.launch import ROOT

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
# Those that a reader is to write.
NEW = {
    "recipes/spelling.py",
    "hf_dist/tasks/spelling.py",
    "hf_dist/tasks/spelling/",
    "hf_dist/data/readers/fasta.py",
    "hf_dist/metrics/chrf.py",
}


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def test_files_and_imported_names_are_there():
    named = set(re.findall(r"`((?:hf_dist|recipes|ds_configs|docs)/[\w/.]*)`", PAGE))
    assert named > NEW
    for path in named:
        assert (ROOT / path).exists() != (path in NEW), path
    imported = [
        (node.module, name.name)
        for block in blocks()
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.ImportFrom) and node.module != "hf_dist.tasks.spelling"
        for name in node.names
    ]
    assert len(imported) > 8
    for module, name in imported:
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"
    assert isinstance(files._READERS, tuple)


def test_the_preset_the_format_and_the_metric_of_the_page_work(tmp_path):
    preset, reader, metric = blocks()[1:]
    made = eval(preset, {"Preset": Preset})
    assert made.config()["zero_optimization"]["reduce_bucket_size"] == 5_000_000
    names: dict = {}
    exec("from collections.abc import Iterator\nfrom pathlib import Path\n" + reader, names)
    (tmp_path / "a.fa").write_text("one\ntwo\n")
    with files.file_formats(*names["FORMATS"]):
        assert files.load_file(tmp_path / "a.fa")["text"][:] == ["one", "two"]
    exec(metric, names)
    assert names["scores"]["mse"] == 0.125  # (0 + 0.5 * 0.5) / 2


def test_every_reader_is_listed_and_every_metric_loads():
    folder = ROOT / "hf_dist" / "data" / "readers"
    having = {file.stem for file in folder.glob("*.py") if re.search("^FORMATS", file.read_text(), re.M)}
    assert having == set(files._READERS)
    assert all(isinstance(form, TextFormat | ColumnFormat) for form in files.formats().values())
    metrics = [file.stem for file in (ROOT / "hf_dist" / "metrics").glob("*.py") if file.stem != "__init__"]
    for name in metrics:
        assert load_metric(name).description


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_lists_recipes_and_rooms_by_their_files():
    def make(*words: str) -> str:
        return subprocess.run(
            ["make", "-s", *words], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout

    listed = make("help")
    for file in (ROOT / "recipes").glob("[a-z]*.py"):
        first = (ast.get_docstring(ast.parse(file.read_text())) or "").splitlines()[0]
        target = file.stem.replace("_", "-")
        assert re.search(rf"^  {target} +{re.escape(first)}$", listed, re.M), target
        assert f"recipes/{file.name} --preset zero2" in make("-n", target, "PRESET=zero2")
    rooms = make("rooms")
    for file in (ROOT / "hf_dist").glob("*/**/__init__.py"):
        assert re.search(rf"^{file.parent.relative_to(ROOT)} +\w.+$", rooms, re.M), file
