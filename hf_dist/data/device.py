"""Copies between the host and a device for which the host waits as seldom as possible.

A plain copy to or from a GPU waits until the GPU has done all that it was given before. From pinned memory a
copy is queued instead, and to the host several can share one wait.
"""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A host's tensor on `device`; nothing is waited for."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(*tensors: Tensor) -> list[Tensor]:
    """The tensors on the host, with one wait for all of them."""
    # torch takes pinned memory for what a GPU copies without waiting.
    copies = [tensor.detach().to("cpu", non_blocking=tensor.is_cuda) for tensor in tensors]
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return copies
