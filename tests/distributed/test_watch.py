"""A rank that dies, freezes or hangs ends the job soon, with its name, its host and the last step."""

from __future__ import annotations

import json
import re
import socket
import time
from pathlib import Path

import pytest

from tests.distributed.processes import TORCHRUN, start, torchrun

FLAGS = (
    "--max_train_samples=200",
    "--max_eval_samples=16",
    "--max_length=32",
    "--max_tokens_per_device=512",
    "--tokens_per_step=1024",
    "--max_steps=9",
    "--save_strategy=no",
    "--eval_strategy=no",
    "--logging_steps=1",
    "--do_train=true",
    "--rank_timeout_seconds=8",
    "--hang_timeout_seconds=10",
)


@pytest.mark.parametrize(
    ("fault", "rank", "says"),
    [
        pytest.param("die", 1, r"rank 1 on {host} has not answered for \d+ s, behind step [1-4]:"),
        pytest.param("die", 0, r"rank 0 on {host} is gone, behind step [1-4]:", marks=pytest.mark.slow),
        pytest.param(
            "freeze",
            1,
            r"rank 1 on {host} has not answered for \d+ s, behind step [1-4]:",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "hang",
            1,
            r"no progress for 10 s behind step [1-4]: rank 1 on {host} stands in run \(faulty_recipe",
            marks=pytest.mark.slow,
        ),
        pytest.param("hang", 0, r"no progress for 10 s .*: rank 0 on {host} stands", marks=pytest.mark.slow),
    ],
)
def test_a_faulty_rank_is_named(tmp_path: Path, fault: str, rank: int, says: str) -> None:
    started = time.monotonic()
    done = torchrun(
        Path(__file__).parent / "faulty_recipe.py",
        *FLAGS,
        f"--output_dir={tmp_path / 'run'}",
        HF_DIST_FAULT=fault,
        HF_DIST_FAULTY_RANK=str(rank),
    )
    assert done.returncode != 0
    # Two time-outs of the watch, the launcher's own 30 s for a process that doesn't end, and the start.
    assert time.monotonic() - started < 150
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr[-6000:]
    assert re.search(says.format(host=re.escape(socket.gethostname())), errors[0]), errors[0]


@pytest.mark.slow
def test_a_launcher_that_restarts_goes_on_by_itself(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = start(
        *TORCHRUN,
        "--max_restarts=1",
        str(Path(__file__).parent / "faulty_recipe.py"),
        *(flag for flag in FLAGS if "save_strategy" not in flag),
        "--save_strategy=steps",
        "--save_steps=1",
        f"--output_dir={folder}",
        HF_DIST_FAULT="die",
        HF_DIST_FAULTY_RANK="1",
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert re.search(r"resuming from .*checkpoint-[1-4]\b", done.stderr), done.stderr[-6000:]
    assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == 9


@pytest.mark.slow
def test_torch_still_needs_a_store_of_its_own_to_restart(tmp_path: Path) -> None:
    """Fails once torch is mended: then `launch._restarts` and the line in docs/checkpoints.md can go."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and dist.get_rank() == 1:\n"
        "    os._exit(1)\n"
        "dist.barrier()\n"
    )
    assert start(*TORCHRUN, "--max_restarts=1", str(script)).returncode != 0
    mended = start(*TORCHRUN, "--max_restarts=1", str(script), TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    assert mended.returncode == 0, mended.stderr[-3000:]
