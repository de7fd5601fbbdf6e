"""Which modules of a model get an adapter, which are kept in full beside it, and which are left alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peft import PeftModel
from peft.utils import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from transformers import PreTrainedModel

from hf_dist.errors import ConfigError, nearest
from hf_dist.training.models.parts import LINEAR, embedding_name, is_in

EMBEDDINGS = "embeddings"
"""What a user may call the input embeddings of any model."""


def kept_by_name(model: PreTrainedModel, names: Sequence[str]) -> list[str]:
    """Full names of the modules that a user named by their last parts."""
    modules = {name for name, _ in model.named_modules() if name}
    found: list[str] = []
    for name in names:
        if name == EMBEDDINGS:
            matching = [embedding_name(model)]
        else:
            matching = [full for full in modules if full == name or full.endswith(f".{name}")]
        if not matching:
            known = {full.split(".")[-1] for full in modules if not full.split(".")[-1].isdigit()}
            raise ConfigError(
                f"--lora_modules_to_save {name}: the model has no such module{nearest(name, known)}; it has "
                f"{EMBEDDINGS}, {', '.join(sorted(known))}"
            )
        found += sorted(matching)
    return found


def outermost(modules: Sequence[str]) -> list[str]:
    """The modules that are no part of another one among them."""
    distinct = list(dict.fromkeys(modules))
    return [name for name in distinct if not is_in(name, [other for other in distinct if other != name])]


def check_targets(model: PreTrainedModel, targets: Sequence[str]) -> None:
    """Checks that every named target is there: peft only complains where none is."""
    modules = [name for name, _ in model.named_modules() if name]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in modules):
            known = _linear_names(model)
            raise ConfigError(
                f"--lora_target {target}: the model has no such module{nearest(target, known)}; its linear "
                f"layers are {', '.join(known)}"
            )


def _linear_names(model: PreTrainedModel) -> list[str]:
    return sorted({n.split(".")[-1] for n, module in model.named_modules() if isinstance(module, LINEAR)})


def no_target(model: PreTrainedModel, targets: Sequence[str], error: ValueError) -> ConfigError:
    """The error for a model that peft finds nothing to adapt in."""
    asked = ", ".join(list(targets) or ["all linear layers"])
    return ConfigError(
        f"--lora_target {asked}: no adapter can be added to {type(model).__name__} "
        f"({' '.join(str(error).split())[:200]}); its linear layers are {', '.join(_linear_names(model))}"
    )


def check_kept(adapted: PeftModel, kept: list[str]) -> None:
    """Checks that peft, which matches names by their ends, keeps in full what was meant and no more."""
    prefix = "base_model.model."
    wrapped = {
        name.removeprefix(prefix)
        for name, module in adapted.named_modules()
        if isinstance(module, AuxiliaryTrainingWrapper)
    }
    surplus = sorted(name for name in wrapped if not is_in(name, kept))
    missing = sorted(name for name in kept if name not in wrapped and not is_in(name, list(wrapped)))
    if surplus or missing:
        raise ConfigError(
            f"peft keeps {', '.join(surplus) or 'nothing'} in full besides, and leaves "
            f"{', '.join(missing) or 'nothing'} out; give --lora_modules_to_save names that end "
            "no other module's name"
        )


# ---- Tied embeddings ----


def tied_to_embeddings(model: PreTrainedModel, kept: list[str]) -> list[str]:
    """Modules that share their weight with the input embeddings, if one of them is kept in full.

    All of them must be, or one would go on with the frozen weight. peft 0.21 sees to it only for embeddings
    called embed_tokens, and then turns each of the others into a linear layer without a bias.
    """
    embeddings: Any = model.get_input_embeddings()
    shared = getattr(embeddings, "weight", None)
    if shared is None:
        return []
    tied = [
        name
        for name, module in model.named_modules(remove_duplicate=False)
        if module._parameters.get("weight") is shared
    ]
    return tied if any(is_in(name, kept) for name in tied) else []


def tie_kept(adapted: PeftModel) -> None:
    """Lets the trained copies of modules that shared their weight share one again.

    Each is saved under its own name: whoever loads the adapter ties nothing.
    """
    trained: dict[int, Any] = {}
    for module in adapted.modules():
        if not isinstance(module, ModulesToSaveWrapper):
            continue
        frozen = module.original_module._parameters.get("weight")
        copy_of = module.modules_to_save[adapted.active_adapter]
        if frozen is not None:
            copy_of.weight = trained.setdefault(id(frozen), copy_of.weight)
