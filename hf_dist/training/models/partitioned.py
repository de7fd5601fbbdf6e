"""Parameters that ZeRO-3 has partitioned: each rank holds an empty tensor, and beside it what was whole."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_dist.training.ranks.gather import on_main


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


def partition_from_main(
    whole: Callable[[], PreTrainedModel], auto_class: Any, *, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Gives every rank its part of a model that rank 0 holds; all ranks call it together.

    Args:
        whole: Called on rank 0 only, makes the model.
        auto_class: The transformers auto class of the model.
        trust_remote_code: Whether the model's own code may run.

    Raises:
        HfDistError: What `whole` raises, on all ranks.
    """
    held: list[PreTrainedModel] = []

    def make() -> dict[str, Any]:
        model = whole()
        held.append(model)
        buffers = {name for name, _ in model.named_buffers()}
        return {
            "config": model.config,
            "dtype": model.dtype,
            "generation_config": model.generation_config if model.can_generate() else None,
            # Small ones that are saved, such as a batch norm's; ZeRO-3 leaves them whole.
            "buffers": {n: t for n, t in model.state_dict().items() if n in buffers},
        }

    made = on_main(make)
    # Its draws are overwritten, and must not move rank 0's random state away from the others'.
    with torch.random.fork_rng(devices=[]):
        model = auto_class.from_config(
            copy.deepcopy(made["config"]), dtype=made["dtype"], trust_remote_code=trust_remote_code
        )
    source = dict(held[0].named_parameters()) if held else {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            with gathered([parameter]):
                if held:
                    parameter.data.copy_(source[name])
        for name, buffer in model.named_buffers():
            if name in made["buffers"]:
                buffer.copy_(made["buffers"][name])
    if made["generation_config"] is not None:
        model.generation_config = made["generation_config"]
    return model.eval()
