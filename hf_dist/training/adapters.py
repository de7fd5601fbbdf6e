"""Adapters (LoRA, DoRA, rank-stabilised LoRA) beside frozen weights, by the library peft.

What is decided here is which modules get one, which are kept in full beside it (a new head always is), and
that the adapter is the same on every engine; peft does the rest.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model, prepare_model_for_kbit_training
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_dist.config import PeftConfig, RunConfig
from hf_dist.errors import CheckpointError, ConfigError, EngineError, nearest
from hf_dist.training.adapter_files import BASE_FOLDER, keep_base
from hf_dist.training.gather import on_main

logger = logging.getLogger("hf_dist")

# peft has no type for masked language models; without one it wraps the model all the same.
_TASK_TYPES = {
    "AutoModelForSequenceClassification": TaskType.SEQ_CLS,
    "AutoModelForTokenClassification": TaskType.TOKEN_CLS,
    "AutoModelForQuestionAnswering": TaskType.QUESTION_ANS,
    "AutoModelForCausalLM": TaskType.CAUSAL_LM,
    "AutoModelForSeq2SeqLM": TaskType.SEQ_2_SEQ_LM,
}
_EMBEDDINGS = "embeddings"
_LINEAR = (nn.Linear, Conv1D)
# Where the name of a module ends and that of a part that peft added begins.
_PARTS = ("base_layer", "modules_to_save", "original_module", "token_adapter")


def prepare(
    model: Any,
    auto_class: Any,
    config: RunConfig,
    *,
    output_dir: Path,
    seed: int,
    trains: bool = True,
    checkpoint: Path | None = None,
) -> Any:
    """The model as it is trained: with an adapter, if the config says so; else as it is.

    Called on all ranks, before the Trainer is made and after ZeRO-3 has partitioned the base.

    Args:
        model: The base, as `load_model` gives it.
        auto_class: The transformers auto class that loaded it.
        config: The whole config.
        output_dir: The run's folder; a base without a name is copied into it.
        seed: Draws the adapter.
        trains: Whether it is trained, and not only evaluated.
        checkpoint: The adapter is taken from this folder instead of drawn.

    Raises:
        ConfigError: If the modules that the config names aren't there, or nothing or everything would be
            trained.
        CheckpointError: If the adapter to go on with doesn't fit.
    """
    settings = config.peft
    if not settings.trains_adapter:
        return model
    if settings.quantize is not None:
        checkpointing = bool(config.training_arguments.get("gradient_checkpointing"))
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=checkpointing)
    named = str(checkpoint) if checkpoint is not None else settings.adapter_name_or_path
    if named is not None:
        adapted = load_adapter(model, named, trains=trains)
    else:
        adapted = add_adapter(model, auto_class, settings, seed=seed)
    _name_base(adapted, config, output_dir, trains=trains)
    # With a frozen base nothing that goes into the first layer has a gradient, and reentrant checkpointing
    # would give none to what it computes.
    adapted.get_base_model().enable_input_require_grads()
    table = trained_parameters(adapted)
    if trains:
        _refuse_all_or_nothing(table)
        logger.info("\n".join(table_lines(table)))
    return adapted


def facts(settings: PeftConfig) -> str | None:
    """What a checkpoint must agree on with the run that resumes it; None without an adapter."""
    if not settings.trains_adapter:
        return None
    if settings.peft == "none":
        return "continued"
    words = [settings.peft, f"r={settings.lora_r}", f"alpha={alpha(settings)}"]
    for name in ("lora_target", "lora_modules_to_save"):
        if (modules := getattr(settings, name)) is not None:
            words.append(f"{name.removeprefix('lora_')}={','.join(modules)}")
    return " ".join(words)


def alpha(settings: PeftConfig) -> int:
    """The alpha that is used: by default twice the rank."""
    return settings.lora_alpha if settings.lora_alpha is not None else 2 * settings.lora_r


# ---- The adapter ----


def add_adapter(model: PreTrainedModel, auto_class: Any, settings: PeftConfig, *, seed: int) -> PeftModel:
    """Wraps a model with a new adapter, drawn with `seed` and the same on every rank.

    Raises:
        ConfigError: If a named module isn't there.
    """
    heads = head_modules(model)
    kept = [*heads, *_kept_by_name(model, settings.lora_modules_to_save or ())]
    embeddings = model.get_input_embeddings()
    tied = bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
    keeps_embeddings = any(model.get_submodule(name) is embeddings for name in kept)
    linear = [name for name, module in model.named_modules() if isinstance(module, _LINEAR)]
    adapter = LoraConfig(
        task_type=_TASK_TYPES.get(auto_class.__name__),
        r=settings.lora_r,
        lora_alpha=alpha(settings),
        lora_dropout=settings.lora_dropout,
        target_modules=settings.lora_target or "all-linear",
        exclude_modules=[name for name in linear if _is_in(name, kept)] or None,
        # A copy: peft adds the usual names of heads to it.
        modules_to_save=list(kept) or None,
        use_dora=settings.peft == "dora",
        use_rslora=settings.peft == "rslora",
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        # Else an output layer that shares the embedding would keep the frozen one.
        ensure_weight_tying=tied and keeps_embeddings and model.get_output_embeddings() is not None,
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # peft sets fan_in_fan_out layer by layer, and says so each time.
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to True|.is_gradient_checkpointing")
        torch.manual_seed(seed)
        try:
            adapted = get_peft_model(model, adapter)
        except ValueError as error:
            raise _no_target(model, settings, error) from error
    assert isinstance(adapted, PeftModel)
    _check_kept(adapted, kept)
    return adapted


def load_adapter(model: PreTrainedModel, name: str, *, trains: bool) -> PeftModel:
    """Wraps a model with a saved adapter.

    Raises:
        CheckpointError: If it isn't there, or doesn't fit the model.
    """
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            adapted = PeftModel.from_pretrained(model, name, is_trainable=trains)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"the adapter {name} can't be loaded onto {model.name_or_path} ({reason}); name an adapter that "
            "was trained on this model"
        ) from error
    missing = [str(one.message) for one in said if "missing adapter keys" in str(one.message)]
    if missing:
        raise CheckpointError(
            f"the adapter {name} doesn't fit {model.name_or_path}: {missing[0][:300]}; name an adapter that "
            "was trained on this model"
        )
    return adapted


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
        return [name for name, child in model.named_children() if isinstance(child, _LINEAR)]
    return [
        name
        for name, child in model.named_children()
        if child is not base and any(True for _ in child.parameters())
    ]


def _is_in(name: str, modules: list[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _kept_by_name(model: PreTrainedModel, names: tuple[str, ...] | list[str]) -> list[str]:
    """Full names of the modules that a user named by their last parts."""
    modules = {name for name, _ in model.named_modules() if name}
    embeddings = model.get_input_embeddings()
    found: list[str] = []
    for name in names:
        if name == _EMBEDDINGS:
            matching = [full for full, module in model.named_modules() if module is embeddings]
        else:
            matching = [full for full in modules if full == name or full.endswith(f".{name}")]
        if not matching:
            known = {full.split(".")[-1] for full in modules if not full.split(".")[-1].isdigit()}
            raise ConfigError(
                f"--lora_modules_to_save {name}: the model has no such module{nearest(name, known)}; expected "
                f"{_EMBEDDINGS}, or some of {', '.join(sorted(known))}"
            )
        found += sorted(matching)
    return found


def _no_target(model: PreTrainedModel, settings: PeftConfig, error: ValueError) -> ConfigError:
    known = sorted({n.split(".")[-1] for n, module in model.named_modules() if isinstance(module, _LINEAR)})
    asked = ", ".join(settings.lora_target or ["all linear layers"])
    return ConfigError(
        f"--lora_target {asked}: no adapter can be added to {type(model).__name__} "
        f"({' '.join(str(error).split())[:200]}); its linear layers are {', '.join(known)}"
    )


def _check_kept(adapted: PeftModel, kept: list[str]) -> None:
    """Checks that peft, which matches names by their ends, keeps in full what was meant and no more."""
    prefix = "base_model.model."
    wrapped = {
        name.removeprefix(prefix)
        for name, module in adapted.named_modules()
        if isinstance(module, AuxiliaryTrainingWrapper)
    }
    surplus = sorted(name for name in wrapped if not _is_in(name, kept) and not _is_output(adapted, name))
    missing = sorted(name for name in kept if name not in wrapped and not _is_in_other(name, wrapped))
    if surplus or missing:
        raise ConfigError(
            f"peft keeps {', '.join(surplus) or 'nothing'} in full besides, and leaves "
            f"{', '.join(missing) or 'nothing'} out; name modules with --lora_modules_to_save whose names end "
            "no other module's name"
        )


def _is_output(adapted: PeftModel, name: str) -> bool:
    """Whether a module is the output layer (tied to embeddings that are kept in full)."""
    return adapted.get_base_model().get_output_embeddings() is adapted.get_base_model().get_submodule(name)


def _is_in_other(name: str, modules: set[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)


# ---- The base ----


def _name_base(adapted: PeftModel, config: RunConfig, output_dir: Path, *, trains: bool) -> None:
    """Makes the saved adapter name a base that can be loaded again."""
    adapter = adapted.active_peft_config
    base = adapted.get_base_model()
    if config.model.model_name_or_path is None:
        source = Path(str(base.name_or_path))
        place = str((output_dir / BASE_FOLDER).absolute())
        if trains:
            place = on_main(lambda: str(keep_base(source, output_dir)))
        adapter.base_model_name_or_path = place
        return
    name = config.model.model_name_or_path
    adapter.base_model_name_or_path = str(Path(name).absolute()) if Path(name).is_dir() else name
    adapter.revision = config.model.model_revision if config.model.model_revision != "main" else None


def save_beside(adapted: PeftModel, folder: Path) -> None:
    """Writes what is needed to load the base as it was: its config, and how it generates."""
    base = adapted.get_base_model()
    base.config.save_pretrained(folder / BASE_FOLDER)
    if base.can_generate():
        base.generation_config.save_pretrained(folder)


def load_options(settings: PeftConfig, training_arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What `load_model` is given to load the base quantised.

    Raises:
        EngineError: If bitsandbytes or a CUDA GPU is missing.
    """
    if settings.quantize is None:
        return {}
    asked = f"--quantize {settings.quantize}"
    if not torch.cuda.is_available():
        raise EngineError(f"{asked} needs a CUDA GPU and this machine has none; leave it out")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise EngineError(f"{asked} needs bitsandbytes; install it: pip install bitsandbytes")
    half = torch.bfloat16 if training_arguments.get("bf16") else None
    four = settings.quantize == "4bit"
    quantization = BitsAndBytesConfig(
        load_in_4bit=four,
        load_in_8bit=not four,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=half or (torch.float16 if training_arguments.get("fp16") else torch.float32),
    )
    # Quantised weights can't be moved afterwards: each process loads them onto its own GPU.
    return {"quantization_config": quantization, "device_map": {"": int(os.environ.get("LOCAL_RANK", "0"))}}


# ---- What is trained ----


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
        # A parameter that ZeRO-3 has partitioned says how large it was.
        count = int(getattr(parameter, "ds_numel", parameter.numel()))
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


def _refuse_all_or_nothing(found: Mapping[str, Trained]) -> None:
    trainable = sum(entry.trainable for entry in found.values())
    frozen = sum(entry.all - entry.trainable for entry in found.values())
    if trainable == 0:
        raise ConfigError("no parameter of the adapter would be trained; name modules with --lora_target")
    if frozen == 0:
        raise ConfigError(
            "every parameter would be trained and saved in full, so that the adapter adds nothing; name fewer "
            "--lora_modules_to_save, or say --peft none"
        )
