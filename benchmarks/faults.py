"""What a run survives: killed anywhere, damaged files, full disks, other processes; and what a save costs.

    python benchmarks/faults.py [--quick] [--only PART ...] [--json FILE]

A small classifier with dropout is trained for 24 steps, with a save each 4 and an evaluation each 6. Its runs
are real processes that are really killed. "Exact" compares the final weights with those of the run that
nobody disturbed. Full and read-only disks need the right to mount a tmpfs, and are left out without it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed  # noqa: F401  # imported here, once, and not in every run
import torch
import transformers
from common import Results, main
from faults_cost import cost
from faults_runs import kill_at_random, start
from transformers import AutoModelForSequenceClassification, Trainer

from hf_dist.training.checkpoints import files

PARTS = ("kills", "damage", "disk", "elastic", "signal", "cost")
ENGINES = (("ddp", "none", 2), ("zero2", "zero2", 2), ("zero3", "zero3", 2))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The saved weights, by the names of the model."""
    return AutoModelForSequenceClassification.from_pretrained(folder).state_dict()


def distance(one: Path, other: Path) -> float:
    """Largest difference of two runs' final weights."""
    mine, theirs = weights(one), weights(other)
    return max((mine[name].double() - theirs[name].double()).abs().max().item() for name in theirs)


def whole(folder: Path, *flags: str, **settings: Any) -> None:
    """Runs to the end, undisturbed."""
    run = start(folder, *flags, **settings)
    codes = run.wait()
    if any(codes):
        sys.exit(f"a run that nobody disturbed failed with {codes}:\n{run.log.read_text()[-4000:]}")


def losses(folder: Path) -> list[float]:
    """The loss of each step."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


# ---- 1: kills ----


def kills(results: Results, home: Path, *, quick: bool) -> None:
    """Kills runs at random moments, resumes them until they are done."""
    rows = []
    chosen = random.Random(7)
    for name, preset, processes in (("single", "none", 1), *ENGINES):
        tried = (8 if quick else 50) if processes == 1 else (2 if quick else 8)
        unbroken = home / f"{name}-unbroken"
        whole(unbroken, processes=processes, preset=preset)
        struck: Counter[str] = Counter()
        left, runs, worst, equal = tried, 0, 0.0, True
        while left:
            runs += 1
            folder = home / f"{name}-{runs}"
            for _ in range(min(left, 6)):
                phase = ("step", "save", "evaluation", "save", "start")[(tried - left) % 5]
                ranks = None if processes == 1 or left % 3 else [chosen.randrange(processes)]
                run = start(folder, processes=processes, preset=preset)
                where = kill_at_random(run, chosen, phase, ranks)
                run.wait()
                if where is None:
                    break
                struck[where] += 1
                left -= 1
            if not (folder / "all_results.json").exists():
                whole(folder, processes=processes, preset=preset)
            worst = max(worst, distance(folder, unbroken))
            equal = equal and (losses(folder) == losses(unbroken))
            shutil.rmtree(folder)
        where_struck = ", ".join(f"{count} in {phase}" for phase, count in struck.most_common())
        rows.append([name, tried, tried - left, runs, where_struck, worst])
        results.at_least(f"kills survived, {name}", tried - left, tried)
        results.at_most(
            f"difference of the final weights after kills, {name}", worst, 0 if processes == 1 else 1e-6
        )
        if processes == 1:
            results.holds("losses of killed runs equal to the last digit, single", equal)
    results.table(
        "killed with SIGKILL and started again until done",
        ["engine", "tried", "survived", "runs", "where", "largest difference of weights"],
        rows,
    )


# ---- 2: damage ----


def _harm(path: Path, harm: str) -> None:
    content = path.read_bytes()
    if harm == "removed":
        path.unlink()
    elif harm == "emptied" or not content:
        path.write_bytes(b"" if content else b"x")
    elif harm == "truncated":
        path.write_bytes(content[: len(content) // 2])
    else:
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])


def damage(results: Results, home: Path, *, quick: bool) -> None:
    """Harms each file of a checkpoint in turn, and resumes."""
    unbroken = home / "damage-unbroken"
    whole(unbroken)
    newest, older = unbroken / "checkpoint-24", unbroken / "checkpoint-20"
    names = sorted(str(path.relative_to(newest)) for path in newest.rglob("*") if path.is_file())
    rows, passed, exact, named = [], 0, 0, 0
    tried = trained = 0
    harms = ("truncated", "emptied", "one bit flipped", "removed")
    for number, name in enumerate(names):
        for place, harm in enumerate(harms):
            tried += 1
            folder = home / "damaged"
            for source in (newest, older):
                shutil.copytree(source, folder / source.name)
            _harm(folder / newest.name / name, harm)
            found, said = files.newest_whole(folder)
            passed += found is not None and found.step == 20
            named += len(said) == 1 and name in said[0] and (folder / newest.name).is_dir()
            # One harm of each file is followed by a training, to see where it goes on from.
            if place == number % len(harms) and not (quick and number % 4):
                trained += 1
                run = start(folder)
                code = run.wait()[0]
                log = run.log.read_text()
                run.log.unlink()
                went_on = code == 0 and f"{newest.name} is passed over: {name}" in log and older.name in log
                exact += went_on and distance(folder, unbroken) == 0
            shutil.rmtree(folder)
    rows.append(["files x harms", tried, passed, named])
    rows.append(["of them trained on", trained, exact, exact])
    results.table("damaged files", ["", "tried", "older one taken, exact", "file named"], rows)
    results.at_least("damaged checkpoints passed over", passed, tried)
    results.at_least("damaged files named", named, tried)
    results.at_least("runs that went on from the older one, to the same weights", exact, trained)


# ---- 3: disks ----


def _mount(place: Path, megabytes: int) -> bool:
    place.mkdir()
    size = f"size={megabytes}m"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", size, "tmpfs", place], capture_output=True, check=False
    )
    return done.returncode == 0


def disk(results: Results, home: Path, *, quick: bool) -> None:
    """A disk that is full, a folder that becomes read-only, and one that vanishes under a run."""
    unbroken = home / "disk-unbroken"
    whole(unbroken)
    size = files.size_of(unbroken / "checkpoint-24")
    megabyte = 1_000_000
    rows = []

    def look(name: str, folder: Path, code: int, log: str, *, least: int) -> None:
        kept = [one for one in files.checkpoints(folder) if files.damage(one.path) is None]
        torn = [one for one in files.checkpoints(folder) if files.damage(one.path) is not None]
        said = [
            line for line in log.splitlines() if "could not be saved" in line or line.startswith("error:")
        ]
        traceback = "Traceback" in log
        rows.append([name, code, len(kept), len(torn), (said or ["-"])[-1][:90]])
        results.holds(
            f"{name}: {least} or more checkpoints are whole, none is torn", len(kept) >= least and not torn
        )
        results.holds(f"{name}: no traceback", not traceback)

    place = home / "full"
    if not _mount(place, int(2.6 * size / megabyte) + 2):
        place.rmdir()
        results.table("disks", ["case"], [["left out: a tmpfs can't be mounted here"]])
        return
    try:
        folder = place / "run"
        run = start(folder, "--save_total_limit=9")
        code = run.wait()[0]
        log = run.log.read_text() if run.log.exists() else ""
        look("full disk, to the last save", folder, code, log, least=2)
        results.holds("full disk: the last save that fails is an error", code == 2)
        results.holds(
            "full disk: the training went on to the last step", "checkpoint-24 could not be saved" in log
        )
        for old in files.checkpoints(folder)[1:]:
            shutil.rmtree(old.path)
        (place / "run.log").unlink(missing_ok=True)
        run = start(folder, "--save_total_limit=1")
        code = run.wait()[0]
        results.holds("full disk: with room made, the same command ends well", code == 0)
        results.at_most("full disk: difference of the final weights", distance(folder, unbroken), 0)
    finally:
        subprocess.run(["umount", "-l", place], check=False)

    folder = home / "readonly"
    run = start(folder)
    while not (folder / "checkpoint-8").exists():
        time.sleep(0.005)
    # Immutable, which binds the superuser as well.
    if subprocess.run(["chattr", "+i", folder], check=False, capture_output=True).returncode == 0:
        try:
            code = run.wait()[0]
            look("folder becomes read-only", folder, code, run.log.read_text(), least=2)
            results.holds("read-only folder: the run ends with an error", code == 2)
        finally:
            subprocess.run(["chattr", "-i", folder], check=True)
        whole(folder)
        results.at_most("read-only folder: difference of the final weights", distance(folder, unbroken), 0)
    else:
        run.wait()
        rows.append(["folder becomes read-only", "-", "-", "-", "left out: chattr +i is not allowed here"])

    folder = home / "vanishes"
    run = start(folder)
    while not (folder / "checkpoint-8").exists():
        time.sleep(0.005)
    shutil.rmtree(folder, ignore_errors=True)
    code = run.wait()[0]
    look("folder vanishes", folder, code, run.log.read_text(), least=1)
    results.table("disks", ["case", "exit", "whole", "torn", "what was said last"], rows)


# ---- 4: other processes, other engines ----


def elastic(results: Results, home: Path, *, quick: bool) -> None:
    """1 -> 2 -> 1 processes, and DDP -> ZeRO-3 -> DDP, against the unbroken run."""
    unbroken = home / "elastic-unbroken"
    whole(unbroken, "--dropout=0")
    paths = {
        "1 -> 2 -> 1 processes": (("none", 1), ("none", 2), ("none", 1)),
        "ddp -> zero3 -> ddp": (("none", 2), ("zero3", 2), ("none", 2)),
        "zero2 on 2 -> zero2 on 1 -> zero1 on 2": (("zero2", 2), ("zero2", 1), ("zero1", 2)),
    }
    rows = []
    for number, (name, stages) in enumerate(paths.items()):
        folder = home / f"elastic-{number}"
        for last, (preset, processes) in zip((8, 16, 24), stages, strict=True):
            run = start(
                folder,
                "--dropout=0",
                processes=processes,
                preset=preset,
                on_step=None if last == 24 else _ends_behind(last),
            )
            codes = run.wait()
            if any(code not in (0, 143) for code in codes):
                sys.exit(f"{name}, {preset} on {processes}: {codes}\n{run.log.read_text()[-4000:]}")
        worst = max(abs(a - b) for a, b in zip(losses(folder), losses(unbroken), strict=True))
        rows.append([name, len(losses(folder)), worst, distance(folder, unbroken)])
        results.at_most(f"difference of the loss curve, {name}", worst, 1e-4)
    results.table(
        "the same run on other processes and engines",
        ["path", "steps", "largest difference of the loss", "of the weights"],
        rows,
    )


def _ends_behind(step: int) -> Any:
    def end(trainer: Trainer) -> None:
        # The ranks agree on what came at the start of the next step.
        if trainer.state.global_step == step - 2 and trainer.is_world_process_zero():
            os.kill(os.getpid(), signal.SIGTERM)

    return end


# ---- 5: a signal to one rank ----


def signals(results: Results, home: Path, *, quick: bool) -> None:
    """SIGTERM to one of two ranks, at random moments."""
    chosen = random.Random(3)
    rows = []
    for name, preset, _ in ENGINES[: 1 if quick else 3]:
        for rank in (0, 1):
            folder = home / f"signal-{name}-{rank}"
            run = start(folder, processes=2, preset=preset)
            while run.moment.count < chosen.randrange(4, 12):
                time.sleep(0.002)
            began = time.perf_counter()
            run.kill(signal.SIGTERM, [rank])
            codes = run.wait()
            seconds = time.perf_counter() - began
            newest, _ = files.newest_whole(folder)
            state = json.loads((newest.path / "trainer_state.json").read_text()) if newest else {}
            ranks = len(list(newest.path.glob("rng_state_*.pth"))) if newest else 0
            rows.append([name, rank, codes, newest.step if newest else "-", ranks, seconds])
            results.holds(
                f"SIGTERM to rank {rank}, {name}: both exit with 143 and saved one step",
                codes == [143, 143] and ranks == 2 and state["global_step"] == newest.step,
            )
    results.table(
        "SIGTERM to one of two ranks",
        ["engine", "to rank", "exit of both", "saved step", "ranks in it", "seconds"],
        rows,
    )


def run(results: Results, options: argparse.Namespace) -> None:
    """Runs the chosen parts."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    parts = {
        "kills": kills,
        "damage": damage,
        "disk": disk,
        "elastic": elastic,
        "signal": signals,
        "cost": cost,
    }
    with tempfile.TemporaryDirectory(prefix="hf_dist-faults-") as folder:
        # The last part builds Trainers in this process, after which nothing is forked any more.
        for name in PARTS:
            if name in options.only:
                home = Path(folder) / name
                home.mkdir()
                parts[name](results, home, quick=options.quick)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="run these parts")


if __name__ == "__main__":
    main(run, __doc__, _arguments)
