import math

import pytest
import torch
from torch import nn

from hf_dist.training.steps.grad_norm import gradient_norm


def with_gradients(*gradients):
    model = nn.ParameterList([nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients])
    for parameter, gradient in zip(model, gradients, strict=True):
        parameter.grad = gradient
    return model


def test_the_norm_of_a_large_model_is_right_to_single_precision():
    torch.manual_seed(0)
    gradients = [torch.randn(3000, 1001) * 1e-3, torch.randn(7), torch.randn(2048)]
    expected = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
    assert float(gradient_norm(with_gradients(*gradients))) == pytest.approx(expected, rel=1e-7)


def test_upstream_still_adds_large_tensors_in_single_precision():
    """Once this fails, torch's own clipping will do and `grad_norm` can go."""
    torch.manual_seed(0)
    values = torch.randn(10_000_000)
    assert abs(float(values.norm()) / float(values.double().norm()) - 1) > 1e-5


def test_views_half_precision_and_nothing():
    gradient = torch.arange(6.0).reshape(2, 3).t()
    assert float(gradient_norm(with_gradients(gradient))) == pytest.approx(math.sqrt(55))
    assert float(gradient_norm(with_gradients(torch.ones(4096, dtype=torch.bfloat16)))) == 64
    assert float(gradient_norm(nn.Linear(2, 2))) == 0
    assert math.isnan(float(gradient_norm(with_gradients(torch.tensor([1.0, math.nan])))))
