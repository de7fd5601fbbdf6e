"""What each preset costs: peak memory, step time and saved size of one model in two processes.

    python benchmarks/presets.py [--quick] [--only PRESET ...] [--json FILE]

The model is a BERT of about 110 million parameters built from a config (--quick: 11 million, and four of the
presets), in fp32, on random tokens of one length. Memory is the most that a process had resident while it
trained (the larger of the two processes), and that less what it had before the model was loaded. On a CPU
"offload to CPU" moves nothing away: its rows show what it costs, not what it saves on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import transformers
from common import Results, main

from hf_dist.presets.catalogue import PRESETS

HERE = Path(__file__).resolve().parent
QUICK = ("none", "zero2", "zero3", "zero3_offload")
PROCESSES = 2


def build_model(folder: Path, *, quick: bool) -> None:
    """Writes the initial weights that every preset loads."""
    size = {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}
    config = transformers.BertConfig(**(size if quick else {}))  # the default is BERT base
    transformers.set_seed(1)
    transformers.BertForSequenceClassification(config).save_pretrained(folder)


def measure(preset: str, initial: Path, folder: Path, *, quick: bool) -> dict[str, Any]:
    """Trains with one preset; returns what the worker wrote, and the sizes of what was saved."""
    folder.mkdir()
    steps = 4 if quick else 6
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc_per_node", str(PROCESSES), str(HERE / "presets_worker.py"), "--preset", preset),
            *("--initial", str(initial), "--folder", str(folder), "--steps", str(steps)),
            *("--rows", "2", "--length", "32"),
        ],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(HERE.parent),
            "HF_DIST_NVME_PATH": str(folder / "swap"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{preset} failed:\n{done.stderr[-3000:]}")
    found = json.loads((folder / "measured.json").read_text())
    found["model"] = size_of(folder / "saved" / "model.safetensors")
    found["checkpoint"] = size_of(folder / f"checkpoint-{steps}")
    found["swap"] = size_of(folder / "swap")
    shutil.rmtree(folder)
    return found


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def run(results: Results, options: argparse.Namespace) -> None:
    chosen = options.only or (QUICK if options.quick else tuple(PRESETS))
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        initial = Path(name, "initial")
        build_model(initial, quick=options.quick)
        for preset in chosen:
            found[preset] = measure(preset, initial, Path(name, preset), quick=options.quick)
    rows = []
    for preset, one in found.items():
        peak = max(rank["train_peak"] for rank in one["ranks"])
        one["own"] = max(rank["train_peak"] - rank["imported"] for rank in one["ranks"])
        # The first step also allocates the optimizer's states.
        one["step"] = statistics.median(one["ranks"][0]["seconds"][1:])
        rows.append(
            [preset, one["engine"], peak / 1e9, one["own"] / one["parameters"], one["step"]]
            + [one[key] / 1e9 for key in ("model", "checkpoint", "swap")]
        )
    parameters = next(iter(found.values()))["parameters"]
    results.table(
        f"{parameters / 1e6:.0f} million parameters, fp32, {PROCESSES} processes",
        ["preset", "engine", "peak GB", "bytes/parameter", "s/step", "model GB", "checkpoint GB", "swap GB"],
        rows,
    )
    claims(results, found)


def claims(results: Results, found: dict[str, dict[str, Any]]) -> None:
    """What docs/presets.md says."""
    for preset, one in found.items():
        expected = "ddp" if preset == "none" else f"deepspeed-{preset.replace('_', '-')}"
        results.holds(f"{preset} runs {expected}", one["engine"] == expected)
        exact = one["parameters"] * 4
        results.at_most(f"{preset} saves a whole fp32 model (GB)", abs(one["model"] - exact) / 1e9, 1e-3)
    if "zero3_nvme" in found:
        results.at_least(
            "zero3_nvme swaps (bytes/parameter)",
            found["zero3_nvme"]["swap"] / found["zero3_nvme"]["parameters"],
            8,
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=list(PRESETS), help="only these presets")


if __name__ == "__main__":
    main(run, __doc__, add_arguments)
