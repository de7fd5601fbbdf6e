"""The norm of a model's gradients on a CPU, right to single precision however large the model is.

In single precision torch 2.13 adds up a CPU tensor's squares nearly one after the other, so that the norm of
ten million normal numbers is off by more than 1e-5 of its value (a test holds it): more than a split or
another engine may change, and gradients are clipped by it. DeepSpeed adds in double precision itself, and a
GPU adds in a tree.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Squares added up in single precision before double takes over, which throughout would be far slower.
_CHUNK = 1024


def gradient_norm(model: nn.Module) -> Tensor:
    """The Euclidean norm of all gradients together, a float32 scalar; 0 where there are none."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    return torch.stack([_sum_of_squares(gradient) for gradient in gradients]).sum().sqrt().float()


def _sum_of_squares(gradient: Tensor) -> Tensor:
    flat = gradient.reshape(-1)
    whole = flat.numel() // _CHUNK * _CHUNK
    chunks = torch.linalg.vector_norm(flat[:whole].view(-1, _CHUNK).float(), dim=1)
    return chunks.double().square().sum() + flat[whole:].double().square().sum()
