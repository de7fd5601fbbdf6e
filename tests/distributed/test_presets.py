"""Every preset trains the text classification recipe in two processes, as its name promises."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors import safe_open

from hf_dist.presets.catalogue import PRESETS
from tests import launch
from tests.distributed.processes import ROOT, torchrun


def _has_libaio() -> bool:
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder("AsyncIOBuilder")
    return builder is not None and builder.has_function("io_submit", ("aio",))


@pytest.mark.parametrize(
    "preset",
    [pytest.param(name, marks=() if name == "zero2" else pytest.mark.slow) for name in PRESETS],
)
def test_a_preset_trains_and_its_engine_is_read_back(preset: str, tmp_path: Path) -> None:
    environment = {}
    if PRESETS[preset].offload_optimizer == "nvme":
        if not _has_libaio():
            pytest.skip("libaio with its headers is missing: make system-deps")
        environment["HF_DIST_NVME_PATH"] = str(tmp_path / "swap")
    output = tmp_path / "out"
    flags = [*(flag for flag in launch.SMALL if "max_steps" not in flag), "--max_steps=3"]
    done = torchrun(
        ROOT / "recipes" / "text_classification.py",
        *flags,
        f"--preset={preset}",
        f"--output_dir={output}",
        **environment,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    results = json.loads((output / "all_results.json").read_text())
    assert results["world_size"] == 2
    expected = "ddp" if preset == "none" else f"deepspeed-{preset.replace('_', '-')}"
    assert results["engine"] == expected
    assert results["train_loss"] > 0 and results["eval_loss"] > 0

    with safe_open(output / "model.safetensors", "pt") as tensors:
        sizes = {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118 (not a dict)
    assert sizes and all(0 not in shape for shape in sizes.values())
    if environment:
        swapped = [path for path in (tmp_path / "swap").rglob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in swapped) > 0
        shutil.rmtree(tmp_path / "swap")
