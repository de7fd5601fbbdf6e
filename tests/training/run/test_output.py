import importlib.metadata
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from hf_dist.config import RunConfig
from hf_dist.errors import CheckpointError
from hf_dist.training.run import output


def test_next_run_is_one_more_than_the_last(tmp_path):
    (tmp_path / "x-007").mkdir()
    (tmp_path / "other-012").mkdir()
    (tmp_path / "x-notes").mkdir()
    assert output.claim_next_run("x", tmp_path).name == "x-008"
    assert output.claim_next_run("x", tmp_path).name == "x-009"


def test_runs_that_start_together_get_different_folders(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        claimed = list(pool.map(lambda _: output.claim_next_run("x", tmp_path), range(16)))
    assert len(set(claimed)) == 16


def test_a_file_is_no_output_dir(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        output.check_output_dir(str(tmp_path / "x"))


def test_run_file_holds_config_and_versions(tmp_path):
    output.write_run_file(tmp_path, recipe="x", config=RunConfig(), seed=3)
    content = json.loads((tmp_path / "run.json").read_text())
    assert content["seed"] == 3
    assert content["config"]["engine"]["preset"] == "none"

    assert content["versions"]["torch"] == importlib.metadata.version("torch")
    assert not list(tmp_path.glob("*.tmp"))
