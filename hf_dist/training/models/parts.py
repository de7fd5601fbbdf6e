"""Which parts a model has: its linear layers, its head, its embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_dist.training.models.partitioned import whole_shape

LINEAR = (nn.Linear, Conv1D)
"""The linear layers of a transformer; GPT-2's are Conv1D."""


def head_modules(model: PreTrainedModel) -> list[str]:
    """Names of the modules that are the head of a classifier, tagger or span model.

    It is what stands beside the base model (`base_model_prefix`) and has weights. A model with output
    embeddings has none: its head was trained with it.
    """
    if model.get_output_embeddings() is not None:
        return []
    base = model.base_model
    if base is model:
        # T5ForQuestionAnswering: its encoder and decoder are its own children.
        return [name for name, child in model.named_children() if isinstance(child, LINEAR)]
    return [
        name
        for name, child in model.named_children()
        if child is not base and any(True for _ in child.parameters())
    ]


def modules_of(model: PreTrainedModel, weights: Sequence[str]) -> list[str]:
    """Names of the modules that these weights belong to; a weight of the model itself has none."""
    found = dict.fromkeys(weight.rpartition(".")[0] for weight in weights)
    return [name for name in found if name]


def embedding_name(model: PreTrainedModel) -> str:
    """Name of the module that holds the input embeddings."""
    embeddings = model.get_input_embeddings()
    return next(name for name, module in model.named_modules() if module is embeddings)


def embedding_rows(model: PreTrainedModel) -> int:
    """Tokens that have an embedding."""
    weight: Any = model.get_input_embeddings().weight
    return whole_shape(weight)[0]


def is_in(name: str, modules: Sequence[str]) -> bool:
    """Whether a module is one of these, or part of one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)
