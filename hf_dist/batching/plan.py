"""Lengths -> optimizer steps that know no hardware -> micro-batches for the hardware at hand.

A plan is a pure function of (lengths, budget, seed, epoch): every rank computes it for itself, and no rank
talks to another. Nothing here knows torch.

    plan = Plan.build(lengths, TokenBatching(max_tokens_per_device=4096, tokens_per_step=32768), seed=0)
    accumulation = plan.accumulation_steps(data_parallel_size=2)
    for step in range(plan.steps_per_epoch):
        for forward in plan.epoch(0).deal(step, 2, accumulation):
            rows_of_rank_1 = forward[1].rows

An epoch runs each row exactly once, in the same number of micro-batches and steps whatever the shuffle.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_dist.batching.evaluation import plan_evaluation
from hf_dist.batching.steps.budget import Batching, ExampleBatching, TokenBatching
from hf_dist.batching.steps.cost import IntArray, check_lengths, row_cost, row_tokens
from hf_dist.batching.steps.deal import deal
from hf_dist.batching.steps.layout import ExampleSteps, Layout, TokenSteps
from hf_dist.batching.steps.micro_batch import MicroBatch, Shapes
from hf_dist.errors import ConfigError, DataError

__all__ = ["EpochPlan", "ExampleBatching", "MicroBatch", "Plan", "TokenBatching", "plan_evaluation"]

# Goes into the fingerprint: a change of the algorithm makes other steps of the same arguments.
_VERSION = 3


class EpochPlan:
    """One epoch: its steps, and how each is distributed over the ranks."""

    def __init__(self, plan: Plan, epoch: int, layout: Layout) -> None:
        self.plan = plan
        self.epoch = epoch
        self._layout = layout

    def __len__(self) -> int:
        return len(self._layout.step_bounds) - 1

    def planned(self, step: int) -> list[NDArray[np.int64]] | None:
        """Row numbers of the step's planned micro-batches; None for a plan of examples, which has none."""
        layout = self._layout
        if layout.step_parts is None or layout.bounds is None:
            return None
        left, right = layout.step_bounds[self._check(step) :][:2]
        parts = layout.step_parts[left:right]
        return [layout.rows[layout.bounds[part] : layout.bounds[part + 1]] for part in parts]

    def step_rows(self, step: int) -> NDArray[np.int64]:
        """Row numbers of a step, each once."""
        planned = self.planned(step)
        if planned is not None:
            return np.concatenate(planned)
        left, right = self._layout.step_bounds[self._check(step) :][:2]
        return self._layout.rows[left:right].copy()

    def step_totals(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(rows, real tokens) of every step."""
        layout = self._layout
        lengths = self.plan.shapes.lengths
        tokens = row_tokens(lengths)[layout.rows].astype(np.int64)
        if layout.bounds is None or layout.step_parts is None:
            rows = np.ones(len(tokens), dtype=np.int64)
        elif len(tokens):
            rows, tokens = np.diff(layout.bounds), np.add.reduceat(tokens, layout.bounds[:-1])
            rows, tokens = rows[layout.step_parts], tokens[layout.step_parts]
        if not len(tokens):
            return tokens, tokens
        starts = layout.step_bounds[:-1]
        return np.add.reduceat(rows, starts), np.add.reduceat(tokens, starts)

    def deal(self, step: int, data_parallel_size: int, accumulation_steps: int) -> list[list[MicroBatch]]:
        """Micro-batches of a step as `[accumulation index][rank]`.

        The same rows for every `data_parallel_size`. Slots without rows hold a empty: the step's shortest
        row, to be given weight 0.

        Raises:
            ConfigError: fewer slots than the step needs under the cap.
        """
        slots = self._deal(step, data_parallel_size, accumulation_steps)
        built = [self._micro_batch(rows, step) for rows in slots]
        return [built[i : i + data_parallel_size] for i in range(0, len(built), data_parallel_size)]

    def deal_to_rank(
        self, step: int, data_parallel_size: int, accumulation_steps: int, rank: int
    ) -> list[MicroBatch]:
        """The column of `deal` that belongs to one data-parallel rank, by accumulation index."""
        slots = self._deal(step, data_parallel_size, accumulation_steps)
        return [self._micro_batch(rows, step) for rows in slots[rank::data_parallel_size]]

    def _check(self, step: int) -> int:
        if not 0 <= step < len(self):
            raise IndexError(f"step {step} of an epoch of {len(self)} steps")
        return step

    def _deal(self, step: int, ranks: int, accumulation: int) -> list[NDArray[np.int64] | None]:
        planned = self.planned(step)
        rows = self.step_rows(step)
        places, groups = None, None
        if planned is not None:
            ends = np.cumsum([len(part) for part in planned])
            places = np.split(np.arange(len(rows)), ends[:-1])
        elif self._layout.groups is not None:
            left, right = self._layout.step_bounds[step : step + 2]
            groups = self._layout.groups[left:right]
        dealt = deal(
            self.plan.shapes.padded[rows],
            places,
            groups=groups,
            data_parallel_size=ranks,
            accumulation_steps=accumulation,
            cap=self.plan.batching.max_tokens_per_device,
            attention_weight=self.plan.attention_weight,
        )
        return [None if part is None else rows[part] for part in dealt]

    def _micro_batch(self, rows: NDArray[np.int64] | None, step: int) -> MicroBatch:
        if rows is not None:
            return self.plan.shapes.micro_batch(rows)
        return self.plan.shapes.empty_micro_batch(self.step_rows(step))


class Plan:
    """The steps of a run. Build it with `Plan.build`.

    Attributes:
        batching: the budget.
        seed: the seed of every epoch's shuffle.
        attention_weight: quadratic term of the cost, in tokens per token squared.
        rows: number of rows an epoch runs.
        dropped: number of rows left out by `too_long="drop"`; `dropped_rows` are their numbers.
        window: rows sorted by length together.
        micro_batches_per_epoch: the same for every epoch (0 for a plan of examples).
        micro_batches_per_step: micro-batches of every step but perhaps the last.
        steps_per_epoch: the same for every epoch.
        fingerprint: hex digest of the arguments and the lengths; equal plans have equal fingerprints,
            whatever the hardware.
    """

    def __init__(
        self,
        lengths: IntArray,
        batching: Batching,
        *,
        seed: int,
        attention_weight: float,
        probe_longest_first: bool,
    ) -> None:
        self.batching = batching
        self.seed = seed
        self.attention_weight = attention_weight
        self.probe_longest_first = probe_longest_first
        self.fingerprint = self._fingerprint(lengths)
        self.shapes = Shapes(lengths, batching.pad_to_multiple_of)
        self._kept, self.dropped_rows = _keep(self.shapes, batching)
        self.dropped = len(self.dropped_rows)
        self.rows = len(lengths) - self.dropped
        steps: TokenSteps | ExampleSteps
        if isinstance(batching, TokenBatching):
            steps = TokenSteps(self.shapes, self._kept, batching, seed, self.attention_weight)
            self.micro_batches_per_epoch = steps.micro_batches_per_epoch
        else:
            steps = ExampleSteps(self.shapes, self._kept, batching, seed)
            self.micro_batches_per_epoch = 0
        self._steps = steps
        self.window = steps.window
        self.steps_per_epoch = steps.steps_per_epoch
        self.micro_batches_per_step = steps.micro_batches_per_step
        self._cached: EpochPlan | None = None

    @classmethod
    def build(
        cls,
        lengths: Any,
        batching: Batching,
        *,
        seed: int,
        attention_weight: float = 0.0,
        probe_longest_first: bool = False,
    ) -> Plan:
        """Plans all epochs.

        Args:
            lengths: tokens of each row, whole numbers of shape (n,), or (n, 2) for encoder and decoder.
            batching: what a step holds.
            seed: seed of the shuffles, at least 0.
            attention_weight: see `hf_dist.batching.steps.cost.attention_weight`.
            probe_longest_first: swap the step with the costliest micro-batch to the first place of epoch 0.

        Raises:
            DataError: the lengths are no lengths, or a row exceeds the cap and `too_long` is "error".
            ConfigError: seed or attention weight out of range.
        """
        if seed < 0:
            raise ConfigError(f"seed is {seed}; it must be at least 0")
        if not 0 <= attention_weight < float("inf"):
            raise ConfigError(f"attention_weight is {attention_weight}; it must be a number of at least 0")
        return cls(
            check_lengths(lengths),
            batching,
            seed=seed,
            attention_weight=float(attention_weight),
            probe_longest_first=probe_longest_first,
        )

    @property
    def mean_rows_per_step(self) -> float:
        """Rows of an epoch over its steps; 0 for an empty plan."""
        return self.rows / self.steps_per_epoch if self.steps_per_epoch else 0.0

    def accumulation_steps(self, data_parallel_size: int) -> int:
        """Forward passes of each rank in a step: micro-batches / ranks, rounded up."""
        return max(1, -(-self.micro_batches_per_step // data_parallel_size))

    def epoch(self, epoch: int) -> EpochPlan:
        """The plan of one epoch; the last one asked for is kept."""
        if self._cached is None or self._cached.epoch != epoch:
            self._cached = None  # Two epochs of ten million rows need not be held at once.
            layout = self._steps.layout(epoch)
            if epoch == 0 and self.probe_longest_first:
                cost = row_cost(self.shapes.padded[layout.rows], self.attention_weight)
                layout = layout.costliest_first(cost)
            self._cached = EpochPlan(self, epoch, layout)
        return self._cached

    def _fingerprint(self, lengths: IntArray) -> str:
        arguments = {
            "version": _VERSION,
            "kind": type(self.batching).__name__,
            "batching": asdict(self.batching),
            "seed": self.seed,
            "attention_weight": self.attention_weight,
            "probe_longest_first": self.probe_longest_first,
            "shape": lengths.shape,
        }
        digest = hashlib.blake2b(json.dumps(arguments, sort_keys=True).encode(), digest_size=16)
        digest.update(lengths.astype("<i4", copy=False).data)
        return digest.hexdigest()


def _keep(shapes: Shapes, batching: Batching) -> tuple[NDArray[np.int64] | None, NDArray[np.int64]]:
    """(rows that stay, or None for all; rows that are dropped)."""
    cap = batching.max_tokens_per_device
    none = np.zeros(0, dtype=np.int64)
    if cap is None:
        return None, none
    tokens = row_tokens(shapes.padded)
    too_long = np.flatnonzero(tokens > cap)
    if not len(too_long) or batching.too_long == "alone":
        return None, none
    if batching.too_long == "drop":
        return np.flatnonzero(tokens <= cap), too_long
    worst = int(too_long[np.argmax(tokens[too_long])])
    raise DataError(
        f"{len(too_long)} rows are longer than --max_tokens_per_device {cap} (row {worst} has "
        f"{int(tokens[worst])} tokens with padding); raise it, truncate (--max_length), or say --too_long "
        "alone or drop"
    )
