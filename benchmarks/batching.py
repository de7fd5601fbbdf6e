"""Dynamic batching: padding, waiting, planning time and training speed, against the stock samplers.

    python benchmarks/batching.py [--quick] [--json FILE] [--only plans,cost,training,overhead]

Lengths are short, long-tailed, two-peaked and real (docstrings of the Python that runs this, split at white
space, drawn with replacement to the same number of rows). The cap is 8 x the 95th percentile, and no row
exceeds it. Peers get the same mean number of tokens a step, by as many rows; they know no cap.

*padding efficiency* is real / computed tokens, empty micro-batches included. *imbalance* is the sum over
(step, accumulation index) of the slowest rank's cost over the mean cost.

A row is whole. Where a step has fewer micro-batches than there are ranks, a rank's share is one or two rows,
and no split can be even: such cases are shown beside a bound that holds for every split of whole rows
(*least*), and are held to that instead.
"""

from __future__ import annotations

import argparse
import ast
import math
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import batching_speed
import numpy as np
from common import Results, main

from hf_dist.batching.plan import Plan, TokenBatching
from hf_dist.batching.steps.cost import attention_weight

PARTS = ("plans", "cost", "training", "overhead")
# Dealing every step of the largest plans takes minutes and says nothing new.
SAMPLED_STEPS = 200


def docstring_lengths() -> np.ndarray:
    """Words of every docstring of the standard library."""
    found = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if {"site-packages", "test", "tests", "idle_test"} & set(path.parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                words = (ast.get_docstring(node) or "").split()
                if words:
                    found.append(len(words))
    return np.array(found)


def distributions(rows: int) -> dict[str, tuple[np.ndarray, int]]:
    """Name -> (lengths of `rows` rows, cap)."""
    random = np.random.default_rng(0)
    drawn = {
        "short": np.clip(random.lognormal(3, 0.5, rows), 4, 128),
        "long-tailed": random.lognormal(4.5, 1, rows),
        "two-peaked": np.where(
            random.random(rows) < 0.5, random.normal(40, 8, rows), random.normal(400, 60, rows)
        ),
        "real": random.choice(docstring_lengths(), rows),
    }
    result = {}
    for name, values in drawn.items():
        lengths = np.maximum(1, values.round()).astype(np.int32)
        cap = int(8 * np.quantile(lengths, 0.95))
        result[name] = np.minimum(lengths, cap), cap
    return result


class Waiting:
    """Sums over micro-batches, as the issue defines them: computed here from rows and lengths alone."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths = lengths
        self.real = self.computed = self.slowest = self.mean = self.least = 0.0
        self.largest = 0

    def add_step(self, forwards: Iterable[list[tuple[np.ndarray, bool]]], least: bool = False) -> None:
        """Adds one step: for each accumulation index, (rows, empty) of each rank."""
        for forward in forwards:
            costs = [len(rows) * int(self.lengths[rows].max()) for rows, _ in forward]
            self.real += sum(int(self.lengths[rows].sum()) for rows, empty in forward if not empty)
            self.computed += sum(costs)
            self.slowest += max(costs)
            self.mean += sum(costs) / len(costs)
            self.largest = max(self.largest, *costs)
            if least:
                rows = np.concatenate([rows for rows, empty in forward if not empty])
                self.least += max(least_maximum(self.lengths[rows], len(forward)), sum(costs) / len(costs))

    @property
    def efficiency(self) -> float:
        return self.real / self.computed

    @property
    def imbalance(self) -> float:
        return self.slowest / self.mean


def least_maximum(lengths: np.ndarray, slots: int) -> float:
    """No split of these rows to so many slots has a smaller costliest slot.

    Of the longest j * slots + 1 rows some slot has j + 1, and each of them is at least as long as the last.
    """
    falling = np.sort(lengths)[::-1]
    places = np.arange(0, len(falling), slots)
    return float(((places // slots + 1) * falling[places]).max())


def sampled(steps: int, most: int = SAMPLED_STEPS) -> list[int]:
    """Some steps of an epoch, evenly spread, the last one among them."""
    return np.unique(np.linspace(0, steps - 1, min(steps, most)).astype(int)).tolist()


def measure(plan: Plan, ranks: int, steps: list[int], least: bool = False) -> tuple[Waiting, list[set[int]]]:
    """Deals some steps of epoch 0; also returns the steps as sets of rows."""
    waiting = Waiting(plan.shapes.lengths)
    epoch, accumulation = plan.epoch(0), plan.accumulation_steps(ranks)
    sets = []
    for step in steps:
        dealt = epoch.deal(step, ranks, accumulation)
        waiting.add_step(([(batch.rows, batch.empty) for batch in forward] for forward in dealt), least)
        sets.append({row for f in dealt for batch in f if not batch.empty for row in batch.rows.tolist()})
    return waiting, sets


Step = list[list[tuple[np.ndarray, bool]]]


def peer_steps(
    lengths: np.ndarray, ranks: int, accumulation: int, rows_per_step: float, seed: int = 0
) -> Iterator[tuple[str, list[Step]]]:
    """Some steps of the stock samplers, as transformers' Trainer builds them, at as many rows a step."""
    import torch
    from torch.utils.data import BatchSampler, RandomSampler
    from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler

    torch.manual_seed(seed)
    rows = max(1, round(rows_per_step / (ranks * accumulation)))
    slots = ranks * accumulation
    values = lengths.tolist()
    samplers = {
        "random": RandomSampler(values),
        "group_by_length": LengthGroupedSampler(rows * accumulation, lengths=values),
    }
    for name, sampler in samplers.items():
        batches = [np.array(batch) for batch in BatchSampler(sampler, rows, drop_last=False)]
        steps = []
        for step in sampled(len(batches) // slots):
            part = batches[step * slots : (step + 1) * slots]
            # accelerate's BatchSamplerShard deals batches to the ranks in turn.
            steps.append([[(b, False) for b in part[i : i + ranks]] for i in range(0, slots, ranks)])
        yield name, steps
    rebalance = BatchRebalanceSampler(
        values, effective_batch_size=rows * slots, dp_size=ranks, grad_accum=accumulation, seed=seed
    )
    order = np.random.default_rng(seed).permutation(len(values))
    steps = []
    # It takes its time with many groups: fewer steps then.
    for step in sampled(len(values) // (rows * slots))[:: max(1, slots // 8)]:
        part = order[step * rows * slots : (step + 1) * rows * slots]
        dealt = rebalance._assign(part.tolist(), lengths[part].tolist())
        steps.append([[(np.array(dealt[r][a]), False) for r in range(ranks)] for a in range(accumulation)])
    yield "batch_rebalance", steps


def peers(
    lengths: np.ndarray, ranks: int, accumulation: int, rows_per_step: float
) -> Iterator[tuple[str, Waiting]]:
    """Padding and waiting of the stock samplers."""
    for name, steps in peer_steps(lengths, ranks, accumulation, rows_per_step):
        waiting = Waiting(lengths)
        for step in steps:
            waiting.add_step(step)
        yield name, waiting


def plans(results: Results, options: argparse.Namespace) -> None:
    """Points 1 to 3: padding, waiting, and the same steps on any hardware."""
    sizes, ranks = ((1, 8), (1, 2, 8)) if options.quick else ((1, 8, 64), (1, 2, 8, 64))
    named = distributions(50_000 if options.quick else 1_000_000)
    _fixed_steps(results, named, sizes, ranks)
    _growing_steps(results, named, sizes, ranks)


def _fixed_steps(
    results: Results, named: dict[str, tuple[np.ndarray, int]], sizes: tuple[int, ...], ranks: tuple[int, ...]
) -> None:
    rows = []
    worst = {"efficiency": 1.0, "none": 1.0, "four": 1.0, "split": 1.0}
    same = True
    for (name, (lengths, cap)), size in ((case, size) for case in named.items() for size in sizes):
        plan = Plan.build(
            lengths, TokenBatching(max_tokens_per_device=cap, tokens_per_step=size * cap), seed=0
        )
        held_rows, held_tokens = (
            part[:-1] if len(part) > 1 else part for part in plan.epoch(0).step_totals()
        )
        held = [
            float(held_rows.mean()),
            held_rows.std() / held_rows.mean(),
            held_tokens.std() / held_tokens.mean(),
        ]
        steps = sampled(plan.steps_per_epoch)
        first: list[set[int]] | None = None
        for count in ranks:
            accumulation = plan.accumulation_steps(count)
            split = count > size
            waiting, sets = measure(plan, count, steps, least=split)
            first = first or sets
            same &= first == sets
            least = waiting.least / waiting.mean if split else float("nan")
            rows.append(
                [
                    *(name, size, count, accumulation, waiting.efficiency, waiting.imbalance),
                    *(f"{least:.3f}" if split else "", waiting.largest / cap, *held),
                ]
            )
            if split:
                worst["split"] = max(worst["split"], waiting.imbalance / least)
                continue
            worst["efficiency"] = min(worst["efficiency"], waiting.efficiency)
            if accumulation == 1:
                worst["none"] = max(worst["none"], waiting.imbalance)
            if accumulation >= 4:
                worst["four"] = max(worst["four"], waiting.imbalance)
    results.table(
        "1-3. steps of fixed size, on more and more ranks",
        [
            *("lengths", "micro-batches a step", "ranks", "accumulation"),
            *("padding efficiency", "imbalance", "least"),
            *("largest/cap", "rows a step", "deviation", "tokens deviation"),
        ],
        rows,
    )
    results.at_least("efficiency, fixed steps, ranks up to micro-batches", worst["efficiency"], 0.985)
    results.at_most("imbalance, fixed steps, no accumulation", worst["none"], 1.05)
    results.at_most("imbalance, fixed steps, from 4 accumulation steps on", worst["four"], 1.02)
    results.at_most(
        "slowest rank over the least any split allows, ranks over micro-batches", worst["split"], 1.15
    )
    results.at_most("largest micro-batch over the cap", max(row[7] for row in rows), 1.0)
    results.holds("the same steps for every number of ranks", same)


def _growing_steps(
    results: Results, named: dict[str, tuple[np.ndarray, int]], sizes: tuple[int, ...], ranks: tuple[int, ...]
) -> None:
    rows = []
    worst = {"efficiency": 1.0, "none": 1.0, "four": 1.0, "peer": 0.0}
    cases = ((case, size, count) for case in named.items() for size in sizes for count in ranks)
    for (name, (lengths, cap)), size, count in cases:
        plan = Plan.build(
            lengths, TokenBatching(max_tokens_per_device=cap, tokens_per_step=size * count * cap), seed=0
        )
        accumulation = plan.accumulation_steps(count)
        steps = sampled(plan.steps_per_epoch, max(8, min(SAMPLED_STEPS, 50_000 // (size * count))))
        ours, _ = measure(plan, count, steps)
        found = {"hf_dist": ours}
        if size * count <= 64:  # batch_rebalance takes minutes a step with more
            found.update(peers(lengths[:100_000], count, accumulation, plan.mean_rows_per_step))
        for who, waiting in found.items():
            rows.append(
                [
                    *(name, size, count, who, waiting.efficiency, waiting.imbalance),
                    *(waiting.imbalance / waiting.efficiency, waiting.largest / cap),
                ]
            )
            if waiting is not ours:
                ratio = (ours.imbalance / ours.efficiency) / (waiting.imbalance / waiting.efficiency)
                worst["peer"] = max(worst["peer"], ratio)
        worst["efficiency"] = min(worst["efficiency"], ours.efficiency)
        if accumulation == 1:
            worst["none"] = max(worst["none"], ours.imbalance)
        if accumulation >= 4:
            worst["four"] = max(worst["four"], ours.imbalance)
    results.table(
        "1-2. steps that grow with the ranks, against the stock samplers at equal mean tokens a step",
        [
            *("lengths", "micro-batches a rank and step", "ranks", "sampler"),
            *("padding efficiency", "imbalance"),
            *("time / ideal", "largest/cap"),
        ],
        rows,
    )
    results.at_least("efficiency, growing steps", worst["efficiency"], 0.985)
    results.at_most("imbalance, growing steps, no accumulation", worst["none"], 1.05)
    # On one rank group_by_length, which keeps no cap and orders 50 steps at a time, pads as little.
    results.at_most("time over that of the best stock sampler, at worst", worst["peer"], 1.0025)
    results.at_most("imbalance, growing steps, from 4 accumulation steps on", worst["four"], 1.02)


_PLAN_ALONE = """
import sys, time
import numpy as np
from hf_dist.batching.steps.cost import attention_weight
from hf_dist.batching.plan import Plan, TokenBatching
rows = int(sys.argv[1])
lengths = np.maximum(1, np.random.default_rng(0).lognormal(4.5, 0.8, rows)).astype(np.int32)
cap = int(8 * np.quantile(lengths, 0.95))
lengths = np.minimum(lengths, cap)
before, cpu = time.perf_counter(), time.process_time()
plan = Plan.build(lengths, TokenBatching(max_tokens_per_device=cap, tokens_per_step=8 * cap), seed=0)
plan.epoch(0)
first, cpu = time.perf_counter() - before, time.process_time() - cpu
plan.epoch(1)
memory = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1e6
print(first, cpu, time.perf_counter() - before - first, memory)
"""


def cost(results: Results, options: argparse.Namespace) -> None:
    """Point 4: time and memory of planning, each size in a process of its own, best of three."""
    rows = []
    for exponent in (5, 6) if options.quick else (5, 6, 7):
        runs = []
        for _ in range(3):
            done = subprocess.run(
                [sys.executable, "-c", _PLAN_ALONE, str(10**exponent)],
                capture_output=True,
                text=True,
                check=True,
            )
            runs.append([float(value) for value in done.stdout.split()])
        first, cpu, other, memory = (min(values) for values in zip(*runs, strict=True))
        per_row = 1e9 * cpu / (10**exponent * math.log2(10**exponent))
        rows.append([f"10^{exponent}", first, cpu, other, per_row, memory])
    results.table(
        "4. planning",
        [
            *("rows", "build and epoch 0, s", "of it CPU, s", "another epoch, s"),
            *("CPU ns / (n log2 n)", "peak memory of the process, GB"),
        ],
        rows,
    )
    # CPU time is what it takes on a machine that does nothing else: planning runs on one core.
    results.at_most("CPU seconds to plan the most rows", rows[-1][2], 5.0)
    results.at_most("GB to plan the most rows", rows[-1][5], 1.0)
    results.at_most("growth from 10^6 over n log n", rows[-1][4] / rows[1][4], 1.5)


def training(results: Results, options: argparse.Namespace) -> None:
    """Point 5: real training, and eight ranks by measured times."""
    lengths, cap = distributions(600 if options.quick else 4000)["real"]
    batching_speed.training(results, lengths, cap, rounds=1 if options.quick else 3)
    lengths, cap = distributions(20_000)["real"]
    plan = Plan.build(
        lengths,
        TokenBatching(max_tokens_per_device=cap, tokens_per_step=8 * cap),
        seed=0,
        attention_weight=attention_weight(batching_speed.small_bert(2, 128).config),
    )
    count = 3 if options.quick else 24
    ours = [
        [[(batch.rows, batch.empty) for batch in forward] for forward in plan.epoch(0).deal(step, 8, 1)]
        for step in sampled(plan.steps_per_epoch)
    ]
    found = {batching_speed.OURS: ours, **dict(peer_steps(lengths, 8, 1, plan.mean_rows_per_step))}
    forwards = {
        name: [
            [rows for rows, _ in forward]
            for step in steps[:: max(1, len(steps) // count)]
            for forward in step
        ]
        for name, steps in found.items()
    }
    batching_speed.waiting_for_the_slowest(results, lengths, cap, forwards)


def overhead(results: Results, options: argparse.Namespace) -> None:
    """Point 6: the sampler's own time."""
    lengths, cap = distributions(20_000)["real"]
    batching_speed.overhead(results, lengths, cap, steps=2 if options.quick else 5)


def run(results: Results, options: argparse.Namespace) -> None:
    wanted = set(options.only.split(","))
    if unknown := wanted - set(PARTS):
        sys.exit(f"--only knows {', '.join(PARTS)}; not {', '.join(sorted(unknown))}")
    if "plans" in wanted:
        plans(results, options)
    if "cost" in wanted:
        cost(results, options)
    if "training" in wanted:
        training(results, options)
    if "overhead" in wanted:
        overhead(results, options)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts to run: {', '.join(PARTS)}")


if __name__ == "__main__":
    main(run, __doc__, _arguments)
