"""What of a model with an adapter is trained: a table, and the refusal of everything or nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from peft import PeftModel
from torch import nn

from hf_dist.errors import ConfigError
from hf_dist.training.models.partitioned import whole_numel

# Where the name of a module ends and that of a part that peft added begins.
_PARTS = ("base_layer", "modules_to_save", "original_module", "token_adapter")


@dataclass(kw_only=True)
class Trained:
    """Parameters of one kind of module.

    Attributes:
        modules: Names of the modules.
        trainable: Parameters that are trained.
        all: All of them, with those of the adapter.
    """

    modules: set[str]
    trainable: int = 0
    all: int = 0


def _owners(adapted: PeftModel) -> Iterator[tuple[str, nn.Parameter]]:
    """Each parameter with the name of the module of the base that it belongs to.

    The frozen original of a module that is kept in full is left out: it takes no part.
    """
    for name, parameter in adapted.named_parameters():
        words = name.removeprefix("base_model.model.").split(".")
        ends = [i for i, word in enumerate(words) if word in _PARTS or word.startswith("lora_")]
        if "original_module" not in words:
            yield ".".join(words[: min(ends, default=len(words) - 1)]), parameter


def trained_parameters(adapted: PeftModel) -> dict[str, Trained]:
    """Parameters by the kind of module (the last part of its name), in the order of the model."""
    found: dict[str, Trained] = {}
    for owner, parameter in _owners(adapted):
        words = owner.split(".")
        kind = next((word for word in reversed(words) if not word.isdigit()), owner)
        entry = found.setdefault(kind, Trained(modules=set()))
        count = whole_numel(parameter)
        entry.modules.add(owner)
        entry.all += count
        entry.trainable += count if parameter.requires_grad else 0
    return found


def table_lines(found: Mapping[str, Trained]) -> list[str]:
    """A table: trainable / all parameters by kind of module, and their sum."""
    trainable = sum(entry.trainable for entry in found.values())
    every = sum(entry.all for entry in found.values())
    rows = [
        (kind, f"{len(e.modules):,}", f"{e.trainable:,}", f"{e.all:,}", f"{e.trainable / max(e.all, 1):.1%}")
        for kind, e in found.items()
    ]
    count = sum(len(entry.modules) for entry in found.values())
    rows = [
        ("module", "number", "trainable", "all", "share"),
        *rows,
        ("sum", f"{count:,}", f"{trainable:,}", f"{every:,}", f"{trainable / max(every, 1):.1%}"),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def refuse_all_or_nothing(found: Mapping[str, Trained]) -> None:
    """Checks that something is trained, and something is not.

    Raises:
        ConfigError: If so.
    """
    trainable = sum(entry.trainable for entry in found.values())
    frozen = sum(entry.all - entry.trainable for entry in found.values())
    if trainable == 0:
        raise ConfigError("no parameter of the adapter would be trained; name modules with --lora_target")
    if frozen == 0:
        raise ConfigError(
            "every parameter would be trained in full, so that the adapter adds nothing; name fewer "
            "--lora_modules_to_save, or say --peft none"
        )
