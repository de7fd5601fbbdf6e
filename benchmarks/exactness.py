"""One step, one gradient: every head's gradient however the step is split, stock Trainer and ours.

    python benchmarks/exactness.py [--quick] [--all] [--lora] [--only kind/model_type ...] [--json FILE]

A step of 16 rows is split into processes x accumulation steps with uneven micro-batches, in fp32 without
dropout. An error is |gradient - reference| / |reference| over all parameters, the worst of the splits. The
stock Trainer's reference is the model's own loss on the unsplit batch, ours is the textbook formula (plain
torch, benchmarks/exactness_heads.py); the two differ for question answering, where the model's own softmax
runs over padding.

Heads whose outputs change with padding can't be split exactly by anyone; they are listed with the change and
held to no bound.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import exactness_heads as heads
import exactness_runs as runs
import torch
import transformers
from common import Results, main

BOUND = 1e-5
PADDING_BOUND = 1e-4
SPLITS = ("1x1", "1x4", "2x1", "2x4")
# One head a task; two encoder-decoders, since they get their decoder inputs in two ways.
ZERO_HEADS = [
    "classification/bert",
    "regression/bert",
    "multi_label/roberta",
    "tagging/bert",
    "question_answering/bert",
    "masked_lm/bert",
    "causal_lm/gpt2",
    "seq2seq/t5",
    "seq2seq/bart",
]


def start_pair(engine: str, chosen: list[heads.Head], folder: Path) -> Any:
    """Runs exactness_runs.py on two processes; returns what it found."""
    (folder / "heads.json").write_text(json.dumps([head.name for head in chosen]))
    here = Path(__file__).resolve().parent
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
         str(here / "exactness_runs.py"), engine, str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(here.parent)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"the pair of {engine} failed:\n{done.stderr[-3000:]}")
    return json.loads((folder / f"{engine}.json").read_text())


def by_padding(chosen: list[heads.Head]) -> tuple[list[heads.Head], dict[str, float], dict[str, str]]:
    """(heads that padding leaves alone, change of the others, what can't be built)."""
    stable, changed, failed = [], {}, {}
    for head in chosen:
        try:
            if heads.too_big(head):
                failed[head.name] = "its config has no small sizes"
                continue
            change = heads.padding_change(head)
        except Exception as error:
            failed[head.name] = f"{type(error).__name__}: {error}".splitlines()[0][:100]
            continue
        if change <= PADDING_BOUND:
            stable.append(head)
        else:
            changed[head.name] = change
        gc.collect()
    return stable, changed, failed


def splits_table(results: Results, stable: list[heads.Head], changed: dict[str, float], folder: Path) -> None:
    one = runs.measure_all(stable, ["1x1", "1x4"])
    works = [head for head in stable if isinstance(one[head.name], dict)]
    two = start_pair("ddp", works, folder)
    rows, stock_right, ours_right, worst, worst_empty = [], 0, 0, 0.0, 0.0
    for head in works:
        errors = {**one[head.name], **two[head.name]}
        stock = max(errors[split][0] for split in SPLITS)
        ours = max(errors[split][1] for split in SPLITS)
        stock_right += stock <= BOUND
        ours_right += ours <= BOUND
        worst = max(worst, ours)
        worst_empty = max(worst_empty, errors[runs.EMPTY][1])
        stocks = [errors[split][0] for split in SPLITS]
        rows.append([head.name, *map(_short, stocks), _short(ours), _short(errors[runs.EMPTY][1])])
    title = "relative error of the step's gradient (processes x accumulation steps)"
    columns = ["head", *(f"stock {split}" for split in SPLITS), "ours, worst", "ours, empty"]
    results.table(title, columns, rows)
    broken = {name: error for name, error in one.items() if isinstance(error, str)}
    if broken:
        results.table("heads that one of the Trainers can't train", ["head", "error"], list(broken.items()))
    if changed:
        listed = [[name, _short(change)] for name, change in changed.items()]
        results.table("outputs change with padding: listed, not counted", ["head", "relative change"], listed)
    architectures = {head.model_type for head in works}
    summary = [
        ["heads", len(works)],
        ["architectures", len(architectures)],
        [f"stock Trainer right in all splits (error <= {BOUND:g})", stock_right],
        [f"hf_dist right in all splits (error <= {BOUND:g})", ours_right],
    ]
    results.table("counts", ["", "number"], summary)
    results.at_most("largest error of hf_dist, any head and split", worst, BOUND)
    results.at_most("largest error of hf_dist with an empty micro-batch", worst_empty, BOUND)
    results.at_most("heads that can't be trained", len(broken), 0)


def zero_table(results: Results, chosen: list[heads.Head], folder: Path) -> None:
    for head in chosen:
        where = folder / "initial" / head.name
        heads.base(head).save_pretrained(where)
        torch.save(heads.formula_gradient(head), where / "gradient.pt")
    found = {stage: start_pair(f"zero{stage}", chosen, folder) for stage in (1, 2, 3)}
    rows = [[head.name, *(_short(found[stage][head.name]) for stage in found)] for head in chosen]
    columns = ["head", *(f"ZeRO-{stage}" for stage in found)]
    title = "two processes through DeepSpeed, 3 accumulation steps and an empty micro-batch"
    results.table(title, columns, rows)
    worst = max(error for errors in found.values() for error in errors.values())
    results.at_most("largest error of hf_dist through ZeRO-1, 2 and 3", worst, BOUND)


def _short(value: float) -> str:
    return f"{value:.1e}" if value < 0.01 else f"{value:.2f}"


def run(results: Results, options: argparse.Namespace) -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    chosen = heads.quick_heads() if options.quick else heads.chosen_heads()
    if options.all:
        chosen = [
            *heads.all_heads(),
            *(head for head in chosen if head.kind in ("regression", "multi_label")),
        ]
    if options.lora:
        chosen = [dataclasses.replace(head, adapter=True) for head in chosen]
    if options.only:
        chosen = [heads.Head.parse(name) for name in options.only]
    stable, changed, failed = by_padding(chosen)
    lora = "+lora" if options.lora else ""
    with tempfile.TemporaryDirectory() as folder:
        splits_table(results, stable, changed, Path(folder))
        if not options.only:
            quick = ZERO_HEADS[:1] + ZERO_HEADS[6:8] if options.quick else ZERO_HEADS
            zero_table(results, [heads.Head.parse(f"{name}{lora}") for name in quick], Path(folder))
    if failed:
        results.table("types whose tiny model does not run", ["head", "why"], list(failed.items()))
    if not options.quick and not options.only:
        counted = len({head.model_type for head in stable})
        results.at_least("architectures", counted, 40)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="every model type of the six auto-classes")
    parser.add_argument("--lora", action="store_true", help="adapters beside frozen weights")
    parser.add_argument("--only", nargs="+", metavar="HEAD", help="only these heads, without DeepSpeed")


if __name__ == "__main__":
    main(run, __doc__, add_arguments)
