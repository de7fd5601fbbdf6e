"""What the start of a recipe costs, against the libraries it stands on.

    python benchmarks/startup.py [--quick] [--against FOLDER] [--json FILE]

CPU seconds of whole processes, one thread each, taken in turn over several rounds: importing `datasets` and
the stock Trainer, and nothing else; importing a recipe; one optimizer step of the recipe on its built-in data
with a warm cache, without and with the evaluation and the checkpoint that follow. The least of the rounds is
given, since what else a machine does only adds, and the median to tell how much it added. `--against` takes
in another checkout of hf_dist, to compare a change with what was before it.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from common import Results, main

HERE = Path(__file__).resolve().parent.parent
LIBRARIES = "libraries alone"
IMPORTED = "recipe, imported"
STEP = "one step"
EVALUATED = "one step, evaluated and saved"
# On 2 cores the ratios were 1.04 to 1.1 and 1.5 to 1.7.
MOST_TO_IMPORT = 1.2
MOST_TO_RUN = 2.0


def cases(checkout: Path, output: Path) -> dict[str, list[str]]:
    """Arguments of the interpreter for what a checkout is asked for."""
    recipe = [str(checkout / "recipes" / "text_classification.py"), "--max_steps=1", "--resume=never"]
    recipe += [f"--output_dir={output}", "--overwrite_output_dir"]
    return {
        IMPORTED: ["-c", "import recipes.text_classification"],
        STEP: [*recipe, "--do_train", "--eval_strategy=no", "--save_strategy=no"],
        EVALUATED: recipe,
    }


def cpu_seconds(words: list[str], environment: Mapping[str, str]) -> float:
    """User and system time of one interpreter and all its threads."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *words], env=environment, cwd="/", capture_output=True, text=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr[-3000:]}")
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def run(results: Results, options: argparse.Namespace) -> None:
    """Measures, and claims that little is added to the libraries."""
    checkouts = {"": HERE} | ({" (before)": options.against.resolve()} if options.against else {})
    with tempfile.TemporaryDirectory() as scratch:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        jobs = {LIBRARIES: (["-c", "import datasets, transformers.trainer"], environment)}
        for label, checkout in checkouts.items():
            folder = Path(scratch) / (label.strip(" ()") or "now")
            own = {**environment, "PYTHONPATH": str(checkout), "HF_DIST_CACHE": str(folder / "cache")}
            for name, words in cases(checkout, folder / "run").items():
                jobs[name + label] = (words, own)
        # The first time fills the caches.
        for words, environ in jobs.values():
            cpu_seconds(words, environ)
        taken: dict[str, list[float]] = {name: [] for name in jobs}
        for _ in range(2 if options.quick else 6):
            for name, (words, environ) in jobs.items():
                taken[name].append(cpu_seconds(words, environ))
    least = {name: min(seconds) for name, seconds in taken.items()}
    results.table(
        "CPU seconds of a process",
        ["process", "least", "median", "least / libraries"],
        [
            [name, least[name], statistics.median(taken[name]), least[name] / least[LIBRARIES]]
            for name in taken
        ],
    )
    results.at_most(
        "a recipe imported, in libraries alone", least[IMPORTED] / least[LIBRARIES], MOST_TO_IMPORT
    )
    results.at_most(
        "one step and its end, in libraries alone", least[EVALUATED] / least[LIBRARIES], MOST_TO_RUN
    )
    if options.against:
        for name in (IMPORTED, STEP, EVALUATED):
            results.at_most(f"{name}, now / before", least[name] / least[f"{name} (before)"], 1.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flag of this benchmark alone."""
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="another checkout to compare with")


if __name__ == "__main__":
    main(run, __doc__, add_arguments)
