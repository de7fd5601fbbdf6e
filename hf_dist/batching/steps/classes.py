"""Classes of like cost, from which steps draw their micro-batches.

However well micro-batches are cut, rows are whole: six rows that fill six sevenths of the cap have no room
for a seventh. A rank with such a micro-batch waits for the others. Steps that draw at random from micro-
batches of *like cost* wait less, and since cost is a saw-tooth over length (it falls each time one row less
fits), a class still mixes lengths. Few classes do most of it, and few are best: with many, the class of
long rows of which only one or two fit would make steps of few rows and fewer tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Classes are added until the costliest of each class, over the mean, is expected to be at most this.
_GOAL = 1.045
_MOST_CLASSES = 6
# A class of very few steps would hold the same rows in every epoch.
_LEAST_STEPS = 4
_GRID = 64


def class_bounds(cost: NDArray[np.float64], per_step: int) -> NDArray[np.int64]:
    """Bounds of the classes, in steps, over micro-batches in rising order of cost.

    The fewest classes for which sum(steps of a class x its costliest micro-batch) is within the goal of the
    mean cost; the best bounds for that many, on a grid.

    Args:
        cost: costs in rising order, a whole number of steps.
        per_step: micro-batches of a step.
    """
    steps = len(cost) // per_step
    # With one micro-batch a step there is nobody to wait for.
    most = 1 if per_step == 1 else max(1, min(_MOST_CLASSES, steps // _LEAST_STEPS))
    grid = np.unique(np.linspace(0, steps, max(1, min(_GRID, steps // _LEAST_STEPS)) + 1).astype(np.int64))
    goal = _GOAL * float(cost.sum()) / per_step
    costliest = cost[grid[1:] * per_step - 1]
    # price[i, j]: what steps grid[i] to grid[j + 1] take if each takes as long as its costliest micro-batch.
    price = (grid[1:] - grid[:-1, None]) * costliest
    price[grid[1:] <= grid[:-1, None]] = np.inf
    best = price[0]
    chosen: list[NDArray[np.int64]] = []
    while best[-1] > goal and len(chosen) + 1 < most:
        total = best[:-1, None] + price[1:]
        chosen.append(np.argmin(total, axis=0))
        best = np.min(total, axis=0)
    bounds = [len(grid) - 1]
    for choice in reversed(chosen):
        bounds.append(int(choice[bounds[-1] - 1]) + 1)
    return grid[[0, *reversed(bounds)]]


def draw_steps(cost: NDArray[np.float64], per_step: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Micro-batches of all steps, step after step; what is left of whole steps comes last.

    Args:
        cost: cost of each micro-batch.
        per_step: micro-batches of a step.
        random: draws within the classes, and the order of the steps.
    """
    parts = random.permutation(len(cost))
    steps = len(cost) // per_step
    if not steps:
        return parts
    whole, rest = parts[: steps * per_step], parts[steps * per_step :]
    bounds = class_bounds(np.sort(cost[whole]), per_step)
    if len(bounds) > 2:
        whole = whole[np.argsort(cost[whole], kind="stable")]
        for left, right in np.column_stack([bounds[:-1], bounds[1:]]) * per_step:
            random.shuffle(whole[left:right])
        whole = whole.reshape(steps, per_step)[random.permutation(steps)].ravel()
    return np.concatenate([whole, rest])
