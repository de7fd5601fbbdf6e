"""Quiet fallbacks end in an error, and what works runs: the launchers themselves, with real engines."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.processes import accelerate, start, torchrun

SCRIPT = str(Path(__file__).with_name("tiny_training.py"))
TWO = ("--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no")


def engine(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What the script found to run."""
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith('{"name"')]
    return json.loads(line)


def error(done: subprocess.CompletedProcess[str]) -> str:
    """The one error line of a run that was refused."""
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    return line


def test_a_dropped_process_count_is_an_error() -> None:
    message = error(accelerate("--cpu", "--num_processes", "2", SCRIPT))
    assert "asked for 2 processes, but started 1" in message
    assert "torchrun --standalone --nproc_per_node 2" in message


@pytest.mark.slow
def test_deepspeed_dropped_by_the_cpu_flag_is_an_error() -> None:
    message = error(accelerate("--cpu", "--num_processes", "1", SCRIPT, "--preset", "zero2"))
    assert "drop DeepSpeed" in message and "--preset zero2" in message


@pytest.mark.slow
def test_deepspeed_turned_into_ddp_by_the_environment_is_an_error() -> None:
    done = accelerate("--use_deepspeed", *TWO, SCRIPT, "--preset", "zero2", ACCELERATE_USE_CPU="true")
    assert "ACCELERATE_USE_CPU" in error(done)


@pytest.mark.slow
def test_fsdp_is_an_error() -> None:
    assert "FSDP" in error(accelerate("--use_fsdp", *TWO, SCRIPT))


@pytest.mark.slow
def test_an_accelerate_config_of_another_stage_is_an_error() -> None:
    config = ("--config_file", "ds_configs/accelerate/zero2.yaml", "--num_processes", "2")
    message = error(accelerate(*config, SCRIPT, "--preset", "zero1"))
    assert "ZeRO stage is 1 in preset 'zero1', but 2 in ds_configs/zero2.json" in message


@pytest.mark.slow
def test_a_stage_named_on_accelerates_command_line_is_an_error() -> None:
    done = accelerate("--use_deepspeed", "--zero_stage", "1", *TWO, SCRIPT, "--preset", "zero3")
    assert "but 1 in --zero_stage of accelerate launch" in error(done)


@pytest.mark.parametrize("environment", [{"WORLD_SIZE": "2"}, {"RANK": "0", "LOCAL_RANK": "0"}])
def test_ranks_set_by_half_are_an_error(environment: dict[str, str]) -> None:
    message = error(start(sys.executable, SCRIPT, "--preset", "zero2", **environment))
    assert "a launcher sets all of" in message


def test_a_count_that_make_asked_for_is_compared() -> None:
    message = error(start(sys.executable, SCRIPT, HF_DIST_NPROC="2"))
    assert "HF_DIST_NPROC asks for 2 processes, but the launcher started 1" in message


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["none", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload"])
def test_one_process_runs_the_real_engine(preset: str) -> None:
    found = engine(start(sys.executable, SCRIPT, "--preset", preset))
    names = {"none": "single"}
    assert found["name"] == names.get(preset, f"deepspeed-{preset.replace('_', '-')}")
    assert found["world_size"] == 1


@pytest.fixture(scope="module")
def ddp() -> dict[str, Any]:
    return engine(torchrun(Path(SCRIPT)))


@pytest.mark.slow
def test_ddp_runs_with_its_settings(ddp: dict[str, Any]) -> None:
    assert ddp["name"] == "ddp" and ddp["world_size"] == 2 and ddp["bucket_view"] is True


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["zero1", "zero2", "zero3", "zero2_offload", "zero3_hpz"])
def test_every_engine_ends_at_the_same_weights_as_ddp(preset: str, ddp: dict[str, Any]) -> None:
    found = engine(torchrun(Path(SCRIPT), "--preset", preset))
    assert found["name"] == f"deepspeed-{preset.replace('_', '-')}"
    # fp32 sums in another order, and CPUAdam's own arithmetic, over 3 steps of lr 5e-5
    assert found["norm"] == pytest.approx(ddp["norm"], rel=1e-6)


@pytest.mark.slow
def test_two_nodes_of_two_processes_form_a_hierarchy() -> None:
    """Two launchers on this machine, which only know each other by the port, stand for two nodes."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=2")
    address = ("--master_addr=127.0.0.1", f"--master_port={port}")

    def node(rank: int) -> subprocess.CompletedProcess[str]:
        command = (*launcher, *address, f"--node_rank={rank}", SCRIPT, "--preset", "zero3_hpz")
        return start(*command, HF_DIST_NPROC="2")

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(node, range(2))
    found = engine(first)
    assert second.returncode == 0, second.stderr[-4000:]
    assert (found["name"], found["hpz_size"], found["world_size"]) == ("deepspeed-zero3-hpz", 2, 4)


@pytest.mark.slow
def test_bf16_is_read_from_the_engine() -> None:
    found = engine(torchrun(Path(SCRIPT), "--preset", "zero2", "--bf16"))
    assert found["precision"] == "bf16" and found["name"] == "deepspeed-zero2"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "name"),
    [
        ((SCRIPT,), "single"),
        (("--use_deepspeed", *TWO, SCRIPT), "deepspeed-zero2"),
        (("--use_deepspeed", *TWO, SCRIPT, "--preset", "zero3"), "deepspeed-zero3"),
        (("--config_file", "ds_configs/accelerate/zero1.yaml", *TWO[:2], SCRIPT), "deepspeed-zero1"),
        (("--config_file", "ds_configs/accelerate/zero3.yaml", *TWO[:2], SCRIPT), "deepspeed-zero3"),
        (("--config_file", "ds_configs/accelerate/none.yaml", *TWO[:2], SCRIPT), "ddp"),
    ],
)
def test_accelerate_launch_runs_what_it_says(words: tuple[str, ...], name: str) -> None:
    assert engine(accelerate(*words))["name"] == name


@pytest.mark.slow
def test_a_json_of_the_users_own_with_its_optimizer(tmp_path: Path) -> None:
    file = tmp_path / "own.json"
    file.write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": "auto",
                "gradient_accumulation_steps": "auto",
                "gradient_clipping": "auto",
                "zero_optimization": {"stage": 1},
                "optimizer": {
                    "type": "AdamW",
                    "params": {"lr": 1e-3, "weight_decay": 0.1, "torch_adam": True},
                },
            }
        )
    )
    refused = error(torchrun(Path(SCRIPT), "--preset", str(file)))
    assert "--optim_from_json" in refused
    found = engine(torchrun(Path(SCRIPT), "--preset", str(file), "--optim_from_json"))
    assert found["name"] == "deepspeed-zero1" and found["lr"] == 1e-3
