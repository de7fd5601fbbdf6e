"""What this machine can train on."""

from __future__ import annotations


def has_accelerator() -> bool:
    """Whether this machine has a device that torch can train on beside the CPU."""
    import torch

    return torch.accelerator.is_available() and torch.accelerator.current_accelerator() is not None
