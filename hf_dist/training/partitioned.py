"""Parameters that ZeRO-3 has partitioned: each rank holds an empty tensor, and beside it what was whole."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from torch import nn


def is_partitioned(parameter: nn.Parameter) -> bool:
    """Whether ZeRO-3 manages this parameter."""
    return hasattr(parameter, "ds_id")


def whole_shape(parameter: Any) -> tuple[int, ...]:
    """The shape that a parameter has when it is whole."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def whole_numel(parameter: Any) -> int:
    """The elements that a parameter has when it is whole."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def gathered(parameters: Iterable[nn.Parameter]) -> Any:
    """Makes those of the parameters whole that are partitioned, inside the block; rank 0's change stays.

    All ranks enter it together, if there is one.
    """
    parts = [parameter for parameter in parameters if is_partitioned(parameter)]
    if not parts:
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parts, modifier_rank=0)
