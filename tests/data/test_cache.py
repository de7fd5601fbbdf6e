"""Entries of the cache are whole or absent, and built once."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest

from hf_dist.data.cache import build_once, cache_dir, key_of
from hf_dist.errors import DataError


def _build_slowly(folder: Path, log: Path) -> None:
    def build(scratch: Path) -> None:
        with open(log, "a") as file:
            file.write("built\n")
        time.sleep(0.3)
        (scratch / "a").write_text("whole")

    assert (build_once(folder, build) / "a").read_text() == "whole"


def test_processes_that_start_together_build_once(tmp_path):
    # Forked: importing everything anew takes longer than the race.
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_build_slowly, args=(tmp_path / "entry", tmp_path / "log")) for _ in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert (tmp_path / "log").read_text() == "built\n"


def test_a_failed_build_leaves_nothing_and_is_repeated(tmp_path):
    def fail(scratch: Path) -> None:
        (scratch / "a").write_text("half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        build_once(tmp_path / "entry", fail)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []
    build_once(tmp_path / "entry", lambda scratch: (scratch / "a").write_text("whole"))
    assert (tmp_path / "entry" / "a").read_text() == "whole"


def test_what_a_killed_process_left_is_cleared(tmp_path):
    (tmp_path / "entry.tmp").mkdir()
    (tmp_path / "entry.tmp" / "half").write_text("")
    build_once(tmp_path / "entry", lambda scratch: (scratch / "a").write_text("whole"))
    assert [path.name for path in (tmp_path / "entry").iterdir()] == ["a"]


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_DIST_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(DataError, match="HF_DIST_CACHE"):
        cache_dir()


def test_keys_depend_on_the_values_and_not_on_the_order_of_a_dict():
    assert key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1})
    assert len({key_of(1), key_of("1"), key_of([1]), key_of(1, 1)}) == 4
