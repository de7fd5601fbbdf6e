"""Copies of checkpoints: whole in their place, newest first on the way back, damaged ones passed over."""

from __future__ import annotations

import shutil

import fsspec
import pytest

from hf_dist.errors import CheckpointError, ConfigError
from hf_dist.training.checkpoints import files
from hf_dist.training.checkpoints.copies import Copies
from tests.training.checkpoints.test_files import make


@pytest.fixture(params=["file", "memory"])
def url(request, tmp_path):
    yield f"file://{tmp_path}/place" if request.param == "file" else "memory://place"
    memory = fsspec.filesystem("memory")
    if memory.exists("/place"):
        memory.rm("/place", recursive=True)


def names(url):
    filesystem, path = fsspec.core.url_to_fs(url)
    return sorted(str(entry).rstrip("/").rsplit("/", 1)[-1] for entry in filesystem.ls(path, detail=False))


def test_there_and_back(tmp_path, url):
    run = tmp_path / "run"
    copies = Copies(url, limit=None)
    for step in (1, 2):
        copies.start(make(run, step, content=bytes([step]) * 3000), None)
    copies.finish()
    assert names(url) == ["checkpoint-1", "checkpoint-2"]
    shutil.rmtree(run)
    run.mkdir()
    Copies(url, limit=None).fetch(run)
    found, passed = files.newest_whole(run)
    assert found.step == 2 and not passed
    assert (found.path / "model.safetensors").read_bytes() == b"\2" * 3000
    assert [one.step for one in files.checkpoints(run)] == [2] and not (
        run / ".saving" / "checkpoint-2"
    ).exists()


def test_a_newer_one_here_stays_the_newest(tmp_path, url):
    run = tmp_path / "run"
    copies = Copies(url, limit=None)
    copies.start(make(run, 1), None)
    copies.finish()
    make(run, 5)
    newest, _ = files.newest_whole(run)
    assert Copies(url, limit=None).fetch(run, newer_than=newest) is None
    assert [one.step for one in files.checkpoints(run)] == [5, 1]


def test_a_damaged_or_unfinished_copy_is_passed_over(tmp_path, url, caplog):
    run = tmp_path / "run"
    copies = Copies(url, limit=None)
    for step in (1, 2, 3):
        copies.start(make(run, step), None)
    copies.finish()
    filesystem, path = fsspec.core.url_to_fs(url)
    filesystem.rm_file(f"{path}/checkpoint-3/{files.MANIFEST}")
    filesystem.pipe_file(f"{path}/checkpoint-2/model.safetensors", b"y" * 5000)
    shutil.rmtree(run)
    run.mkdir()
    with caplog.at_level("WARNING", logger="hf_dist"):
        Copies(url, limit=None).fetch(run)
    assert [one.step for one in files.checkpoints(run)] == [1]
    assert "checkpoint-2 is passed over: model.safetensors is damaged" in caplog.text


def test_rotation_keeps_the_newest_and_the_best(tmp_path, url):
    copies = Copies(url, limit=2)
    for step in (1, 2, 3, 4):
        copies.start(make(tmp_path / "run", step), tmp_path / "run" / "checkpoint-2" if step > 1 else None)
    copies.finish()
    assert names(url) == ["checkpoint-2", "checkpoint-4"]


def test_a_copy_that_fails_is_a_warning_and_at_the_end_an_error(tmp_path, caplog):
    place = tmp_path / "place"
    copies = Copies(f"file://{place}", limit=None)
    shutil.rmtree(place)
    place.write_text("in the way")
    with caplog.at_level("WARNING", logger="hf_dist"):
        copies.start(make(tmp_path / "run", 1), None)
        with pytest.raises(
            CheckpointError, match=r"checkpoint-1 could not be copied to file://.*local one is whole"
        ):
            copies.finish()
    assert "the next save tries again" in caplog.text


@pytest.mark.parametrize("url", ["nosuch://bucket/run", "file:///proc/nowhere/run"])
def test_a_place_that_cant_be_used(url):
    with pytest.raises(ConfigError, match=r"--checkpoint_copy .* can't be used"):
        Copies(url, limit=None)
