"""Distributes a step's rows over (accumulation index, rank): like costs side by side.

This is the only stage that knows the hardware. What it gets is the step's rows and the micro-batches that
the plan cut them into; what it returns has the same rows.
"""

from __future__ import annotations

import numpy as np

from hf_dist.batching.steps.cost import IntArray, row_cost, row_tokens
from hf_dist.batching.steps.cut import Ordered, Positions, cut_exactly, split_costliest
from hf_dist.errors import ConfigError


def order_by_length(padded_lengths: IntArray) -> Positions:
    """Places of the rows in falling order of tokens."""
    return np.argsort(-row_tokens(padded_lengths).astype(np.int64), kind="stable")


def split_anew(
    lengths: IntArray,
    slots: int,
    *,
    cap: int | None,
    attention_weight: float,
    planned: list[Positions] | None,
    groups: Positions | None = None,
) -> list[Positions]:
    """Splits rows into `slots` micro-batches of nearly equal cost, within the cap.

    Args:
        lengths: padded lengths of the rows, (k,) or (k, d).
        slots: how many micro-batches; fewer come back where there are fewer rows.
        cap: most computed tokens of a micro-batch of more than one row; None for no cap.
        attention_weight: quadratic term of the cost.
        planned: a split that is known to fit the cap, as places in `lengths`. Rows of several parts can't
            always be split anew in as few; then the costliest of these are halved.
        groups: the same as one number for each row, where nothing is planned.

    Raises:
        ConfigError: they don't fit.
    """
    places = order_by_length(lengths)
    ordered = Ordered(lengths[places], cap=cap, attention_weight=attention_weight)
    starts = cut_exactly(ordered, slots)
    if starts is None and planned is None and groups is not None:
        planned = [np.flatnonzero(groups == number) for number in np.unique(groups)]
    if starts is None and planned is not None and _fits(lengths, planned, slots, cap):
        places = np.concatenate(planned)
        ordered = Ordered(lengths[places], cap=cap, attention_weight=attention_weight)
        begin = np.cumsum([0] + [len(part) for part in planned[:-1]])
        starts = split_costliest(ordered, begin, slots)
    if starts is None:
        raise ConfigError(
            f"a step of {len(lengths)} rows does not fit {slots} micro-batches of {cap} tokens; raise "
            "gradient_accumulation_steps or --max_tokens_per_device"
        )
    return np.split(places, starts[1:]) if len(starts) else []


def _fits(lengths: IntArray, parts: list[Positions], slots: int, cap: int | None) -> bool:
    """Whether a split has few enough parts, and none of more than one row is over the cap."""
    tokens = [len(part) * int(row_tokens(lengths[part].max(axis=0, keepdims=True))[0]) for part in parts]
    over = (len(part) > 1 and size > cap for part, size in zip(parts, tokens, strict=True)) if cap else ()
    return len(parts) <= slots and not any(over)


def deal(
    lengths: IntArray,
    planned: list[Positions] | None,
    *,
    groups: Positions | None = None,
    data_parallel_size: int,
    accumulation_steps: int,
    cap: int | None,
    attention_weight: float,
) -> list[Positions | None]:
    """Distributes a step over `accumulation_steps * data_parallel_size` slots.

    Args:
        lengths: padded lengths of the step's rows, (k,) or (k, d).
        planned: the plan's micro-batches as places in `lengths`, or None where the plan has none.
        groups: where it has none, a split that fits the cap (equal numbers are together), for rows that can't
            be cut evenly in as few.
        data_parallel_size: ranks.
        accumulation_steps: forward passes of each rank.
        cap: most computed tokens of a micro-batch of more than one row; None for no cap.
        attention_weight: quadratic term of the cost.

    Returns:
        One array of places per slot, accumulation index by accumulation index, costliest first, and rank by
        rank inside; None where a slot is left without rows.

    Raises:
        ConfigError: there are too few slots for the cap.
    """
    slots = data_parallel_size * accumulation_steps
    if planned is not None and len(planned) > slots:
        raise ConfigError(
            f"a step has {len(planned)} micro-batches, but {data_parallel_size} ranks x {accumulation_steps} "
            f"accumulation steps run {slots}; at least {-(-len(planned) // data_parallel_size)} accumulation "
            "steps are needed"
        )
    parts: list[Positions]
    if planned is None:
        parts = split_anew(
            lengths, slots, cap=cap, attention_weight=attention_weight, planned=None, groups=groups
        )
    else:
        kept, redone = _kept_and_redone(lengths, planned, data_parallel_size, slots)
        parts = kept
        if redone:
            places = np.concatenate(redone)
            local = np.split(np.arange(len(places)), np.cumsum([len(part) for part in redone])[:-1])
            fresh = split_anew(
                lengths[places], slots - len(kept), cap=cap, attention_weight=attention_weight, planned=local
            )
            parts = kept + [places[part] for part in fresh]
    dealt: list[Positions | None] = []
    if parts:
        sizes = np.array([len(part) for part in parts])
        begins = np.cumsum(sizes) - sizes
        longest = np.maximum.reduceat(lengths[np.concatenate(parts)], begins, axis=0)
        costliest_first = np.argsort(-sizes * row_cost(longest, attention_weight), kind="stable")
        dealt += [parts[index] for index in costliest_first]
    return dealt + [None] * (slots - len(dealt))


def _kept_and_redone(
    lengths: IntArray, planned: list[Positions], data_parallel_size: int, slots: int
) -> tuple[list[Positions], list[Positions]]:
    """(micro-batches that stay as planned, those to split anew so that all slots are filled)."""
    missing = slots - len(planned)
    if missing == 0:
        return planned, []
    if missing >= data_parallel_size:
        return [], planned
    # Only one accumulation index is not full: split what would be in it, the micro-batches of the shortest
    # rows, which divide most finely and pad least.
    again = data_parallel_size - missing
    longest = [int(row_tokens(lengths[part]).max()) for part in planned]
    by_length = sorted(range(len(planned)), key=lambda index: longest[index])
    return [planned[index] for index in by_length[again:]], [planned[index] for index in by_length[:again]]
