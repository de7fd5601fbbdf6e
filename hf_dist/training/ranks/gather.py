"""Predictions of all ranks, by row number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from hf_dist.errors import HfDistError


def _running() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def gather_rows(local: Sequence[tuple[int, Any]], rows: int, *, everywhere: bool) -> list[Any] | None:
    """Gathers (row number, object) pairs into one list in row order.

    Args:
        local: This rank's pairs. Ranks that see the same data may give the same pairs.
        rows: Number of rows that must come together.
        everywhere: On all ranks; else only on rank 0, and None elsewhere.

    Raises:
        RuntimeError: If a row is missing (a fault of the evaluation plan).
    """
    parts: list[Any] = [local]
    if _running():
        parts = [None] * dist.get_world_size()
        if everywhere:
            dist.all_gather_object(parts, list(local))
        else:
            is_main = dist.get_rank() == 0
            dist.gather_object(list(local), parts if is_main else None, dst=0)
            if not is_main:
                return None
    found = {row: value for part in parts for row, value in part}
    if sorted(found) != list(range(rows)):
        raise RuntimeError(f"{len(found)} of {rows} rows were predicted; every row must be, once")
    return [found[row] for row in range(rows)]


def on_main(compute: Callable[[], Any]) -> Any:
    """Runs `compute` on rank 0 and gives its result, or raises its error, on all ranks.

    Without this an error in scoring would raise on rank 0 and leave the others waiting forever.
    """
    if not _running():
        return compute()
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = compute()
        except HfDistError as error:
            box[1] = error
        except Exception as error:
            # Only the text travels: not every exception can be pickled.
            dist.broadcast_object_list([None, RuntimeError(f"{type(error).__name__}: {error}")], src=0)
            raise
    dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise box[1]
    return box[0]
