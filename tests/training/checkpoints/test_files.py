"""Checkpoint folders: whole or passed over, never deleted by mistake."""

from __future__ import annotations

import pytest

from hf_dist.errors import CheckpointError
from hf_dist.training.checkpoints import files

FACTS = {"model": "m", "plan": "p"}


def make(folder, step, *, sealed=True, content=b"x" * 5000):
    scratch = folder / files.SCRATCH / f"checkpoint-{step}"
    (scratch / "global_step").mkdir(parents=True)
    (scratch / "model.safetensors").write_bytes(content)
    (scratch / "global_step" / "states.pt").write_bytes(content[::-1])
    (scratch / "empty.json").write_bytes(b"")
    if sealed:
        files.seal(scratch, {**FACTS, "step": step})
    place = folder / f"checkpoint-{step}"
    files.publish(scratch, place)
    return place


def test_the_newest_whole_one(tmp_path):
    for step in (5, 10, 100):
        make(tmp_path, step)
    make(tmp_path, 200, sealed=False)
    (tmp_path / "checkpoint-x").mkdir()
    (tmp_path / "checkpoint-300").write_text("a file")
    found, passed = files.newest_whole(tmp_path)
    assert found.step == 100 and found.facts["step"] == 100
    assert len(passed) == 1 and "checkpoint-200" in passed[0] and "manifest.json is missing" in passed[0]
    assert files.newest_whole(tmp_path / "nowhere") == (None, [])


NAMES = ["model.safetensors", "global_step/states.pt", "manifest.json", "empty.json"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("harm", ["truncated", "emptied", "flipped", "removed"])
def test_each_harm_to_each_file_is_found_and_named(tmp_path, name, harm):
    older, newer = make(tmp_path, 1), make(tmp_path, 2)
    path = newer / name
    content = path.read_bytes()
    if not content and harm != "removed":
        content = b"not empty any more"
        path.write_bytes(content)
    elif harm == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif harm == "emptied":
        path.write_bytes(b"")
    elif harm == "flipped":
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    else:
        path.unlink()
    found, passed = files.newest_whole(tmp_path)
    assert found.path == older and newer.is_dir()
    assert len(passed) == 1 and str(newer) in passed[0] and name.split("/")[-1] in passed[0]
    with pytest.raises(CheckpointError, match=name.split("/")[-1]):
        files.named(newer)


def test_publishing_over_a_damaged_one_keeps_it(tmp_path):
    make(tmp_path, 3, sealed=False)
    make(tmp_path, 3, content=b"new")
    assert files.damage(tmp_path / "checkpoint-3") is None
    assert (tmp_path / "checkpoint-3.replaced-1" / "model.safetensors").read_bytes() == b"x" * 5000


@pytest.mark.parametrize(
    ("limit", "best", "left"),
    [
        (None, [], {1, 2, 3, 4}),
        (1, [], {4}),
        (2, [], {3, 4}),
        (2, [1], {1, 4}),
        (1, [2], {2, 4}),
        (9, [], {1, 2, 3, 4}),
    ],
)
def test_rotation_keeps_the_best_and_the_newest_whole_one(tmp_path, limit, best, left):
    for step in (1, 2, 3, 4):
        make(tmp_path, step)
    make(tmp_path, 5, sealed=False)
    files.rotate(tmp_path, limit, [tmp_path / f"checkpoint-{step}" for step in best])
    assert {one.step for one in files.checkpoints(tmp_path)} == left | {5}


def test_a_checkpoint_of_another_run_lists_the_differences(tmp_path):
    make(tmp_path, 1)
    found, _ = files.newest_whole(tmp_path)
    files.refuse_other_run(found, FACTS)
    with pytest.raises(CheckpointError, match=r"plan: the checkpoint has p, this run q; data: .*None.*d"):
        files.refuse_other_run(found, {"model": "m", "plan": "q", "data": "d"})
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        files.named(tmp_path / "checkpoint-7")
