"""Environments and command lines that launchers really make, without processes.

tests/distributed/test_engine.py starts the launchers themselves.
"""

import json

import pytest

from hf_dist.presets.catalogue import ds_config
from hf_dist.training.engines.launch import effective_preset, launch_line, launch_problems
from tests.training.engines.environments import TORCHRUN

LAUNCH = ["/usr/bin/python", "/usr/bin/accelerate", "launch"]


def problems(preset="none", environ=None, ancestors=()):
    return launch_problems(preset, environ or {}, list(ancestors))


@pytest.mark.parametrize("environ", [{}, TORCHRUN, {**TORCHRUN, "HF_DIST_NPROC": "2"}])
@pytest.mark.parametrize("preset", ["none", "zero2"])
def test_a_plain_start_and_torchrun_are_fine(preset, environ):
    assert problems(preset, environ) == []


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"WORLD_SIZE": "2"}, "RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT are not"),
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({key: TORCHRUN[key] for key in TORCHRUN if key != "MASTER_PORT"}, "MASTER_PORT is not"),
        ({**TORCHRUN, "RANK": "2"}, "ranks count from 0"),
        ({**TORCHRUN, "WORLD_SIZE": "two"}, "WORLD_SIZE=two"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "each would train alone"),
    ],
)
def test_ranks_set_by_half_are_refused(environ, said):
    (problem,) = problems("none", environ)
    assert said in problem


def test_restarts_need_a_store_of_their_own():
    told = {**TORCHRUN, "TORCHELASTIC_MAX_RESTARTS": "3"}
    (problem,) = problems("none", {**told, "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in problem
    assert problems("none", {**told, "TORCHELASTIC_USE_AGENT_STORE": "False"}) == []
    assert problems("none", {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}) == []


@pytest.mark.parametrize("value", ["true", "True", "1"])
def test_deepspeed_on_accelerates_cpu_flag_is_refused(value):
    (problem,) = problems("zero2", {"ACCELERATE_USE_CPU": value})
    assert "drop DeepSpeed" in problem
    assert problems("none", {"ACCELERATE_USE_CPU": value}) == []
    assert problems("none", {"ACCELERATE_USE_CPU": value, "ACCELERATE_USE_DEEPSPEED": "true"}) != []


def test_fsdp_is_refused():
    (problem,) = problems("none", {"ACCELERATE_USE_FSDP": "true"})
    assert "--preset zero3" in problem


@pytest.mark.parametrize(
    ("command", "started", "refused"),
    [
        ([*LAUNCH, "--cpu", "--num_processes", "2", "train.py"], {}, True),
        ([*LAUNCH, "--cpu", "--num-processes=2", "train.py"], {}, True),
        (["accelerate-launch", "--num_processes", "2", "train.py"], {}, True),
        (["python", "-m", "accelerate.commands.launch", "--num_processes", "2", "train.py"], {}, True),
        ([*LAUNCH, "--num_processes", "2", "train.py"], TORCHRUN, False),
        ([*LAUNCH, "--num_processes", "1", "train.py"], {}, False),
        ([*LAUNCH, "train.py"], {}, False),
        # These are flags of the script, not of the launcher.
        ([*LAUNCH, "train.py", "--num_processes", "2"], {}, False),
        (["vim", "launch", "accelerate.txt"], {}, False),
    ],
)
def test_processes_that_accelerate_dropped_are_found(command, started, refused):
    found = problems("none", started, [["bash"], command])
    assert bool(found) == refused
    assert all("asked for 2 processes, but started 1" in problem for problem in found)


def test_processes_that_an_accelerate_config_asks_for_are_found(tmp_path):
    file = tmp_path / "accelerate.yaml"
    file.write_text("num_processes: 2\nuse_cpu: true\n")
    (problem,) = problems("none", {}, [[*LAUNCH, "--config_file", str(file), "train.py"]])
    assert "asked for 2 processes" in problem


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"HF_DIST_NPROC": "2"}, "asks for 2 processes, but the launcher started 1"),
        ({**TORCHRUN, "HF_DIST_NPROC": "4"}, "asks for 4 processes, but the launcher started 2"),
        ({"HF_DIST_NPROC": "all"}, "expected the number"),
    ],
)
def test_the_count_in_the_environment_is_compared(environ, said):
    (problem,) = problems("none", environ)
    assert said in problem


def test_two_nodes_count_their_own_processes():
    environ = {**TORCHRUN, "WORLD_SIZE": "4", "HF_DIST_NPROC": "2"}
    assert problems("none", environ) == []


def test_what_accelerate_asks_for_counts_without_a_preset(tmp_path):
    deepspeed = {"ACCELERATE_USE_DEEPSPEED": "true"}
    assert effective_preset("none", {}) == "none"
    assert effective_preset("none", deepspeed) == "zero2"  # accelerate's own default stage
    assert effective_preset("none", {**deepspeed, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}) == "zero3"
    offload = {
        **deepspeed,
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
    }
    assert effective_preset("none", offload) == "zero2_offload"
    assert effective_preset("zero1", offload) == "zero1"
    file = tmp_path / "zero3.json"
    file.write_text(json.dumps(ds_config("zero3")))
    assert effective_preset("none", {**deepspeed, "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}) == "zero3"
    file.write_text('{"zero_optimization": {"stage": 3}}')
    assert effective_preset("none", {**deepspeed, "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}) == str(file)


def test_the_launch_line_names_the_count_the_script_and_the_preset():
    assert launch_line("none", 2, "train.py") == (
        "HF_DIST_NPROC=2 torchrun --standalone --nproc_per_node 2 train.py"
    )
    assert launch_line("my configs/a.json", 4, "train.py").endswith("train.py --preset 'my configs/a.json'")
