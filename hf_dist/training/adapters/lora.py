"""Adapters (LoRA, DoRA, rank-stabilised LoRA) beside frozen weights, by the library peft.

What is decided here is which modules get one, which are kept in full beside it (a new head always is), and
that the adapter is the same on every engine; peft does the rest.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.util
import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from peft import (
    LoraConfig,
    PeftModel,
    TaskType,
    get_peft_model,
    prepare_model_for_kbit_training,
)
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_dist.config import PeftConfig, RunConfig
from hf_dist.errors import CheckpointError, ConfigError, EngineError
from hf_dist.training.adapters.files import BASE_FOLDER, base_of, has_no_name, keep_base
from hf_dist.training.adapters.modules import (
    EMBEDDINGS,
    check_kept,
    check_targets,
    kept_by_name,
    no_target,
    outermost,
    tie_kept,
    tied_to_embeddings,
)
from hf_dist.training.adapters.table import refuse_all_or_nothing, table_lines, trained_parameters
from hf_dist.training.models.initial import resize_embeddings
from hf_dist.training.models.partitioned import gathered
from hf_dist.training.models.parts import (
    LINEAR,
    embedding_name,
    embedding_rows,
    head_modules,
    is_in,
    modules_of,
)
from hf_dist.training.ranks.gather import on_main

logger = logging.getLogger("hf_dist")

# peft has no type for masked language models; without one it wraps the model all the same.
_TASK_TYPES = {
    "AutoModelForSequenceClassification": TaskType.SEQ_CLS,
    "AutoModelForTokenClassification": TaskType.TOKEN_CLS,
    "AutoModelForQuestionAnswering": TaskType.QUESTION_ANS,
    "AutoModelForCausalLM": TaskType.CAUSAL_LM,
    "AutoModelForSeq2SeqLM": TaskType.SEQ_2_SEQ_LM,
}


# peft asks transformers by a name that is deprecated, and doesn't know that we tie what it unties.
_NOISE = ".is_gradient_checkpointing|Model has .tie_word_embeddings|The PEFT config"


def wrap(
    model: Any,
    auto_class: Any,
    config: RunConfig,
    *,
    seed: int,
    drawn: Sequence[str] = (),
    trains: bool = True,
    checkpoint: Path | None = None,
    base_rows: int | None = None,
) -> Any:
    """The model with an adapter, if the config says so; else as it is.

    Needs no other rank, but where ZeRO-3 has partitioned the base: then all ranks call it.

    Args:
        model: The base, as `load_model` gives it.
        auto_class: The transformers auto class that loaded it.
        config: The whole config.
        seed: Draws a new adapter.
        drawn: Names of the base's weights that no file holds.
        trains: Whether it is trained, and not only evaluated.
        checkpoint: The adapter is taken from this folder instead of drawn.
        base_rows: Embeddings that the base has where it was saved, if the model may have others.

    Raises:
        ConfigError: If the modules that the config names aren't there.
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
        return load_adapter(model, named, trains=trains, base_rows=base_rows)
    return add_adapter(model, auto_class, settings, seed=seed, drawn=drawn, base_rows=base_rows)


def prepare(adapted: Any, config: RunConfig, *, output_dir: Path, trains: bool = True) -> None:
    """Readies a wrapped model for the Trainer, on all ranks together: names its base, shows what is trained.

    Raises:
        ConfigError: If nothing or everything would be trained.
    """
    if not isinstance(adapted, PeftModel):
        return
    if trains:
        table = trained_parameters(adapted)
        refuse_all_or_nothing(table)
        logger.info("\n".join(table_lines(table)))
    _name_base(adapted, config, output_dir, trains=trains)


def with_base(config: RunConfig) -> RunConfig:
    """The config with the base model, its config and the tokenizer of the adapter that is gone on with.

    What the user named stays.

    Raises:
        CheckpointError: If the folder holds no adapter, or its base is gone.
        ConfigError: If there is no such adapter.
    """
    name, model = config.peft.adapter_name_or_path, config.model
    if name is None or model.model_name_or_path is not None:
        return config
    if not Path(name).is_dir():
        try:
            saved = peft.PeftConfig.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--adapter_name_or_path {name}: no adapter can be loaded from there "
                f"({' '.join(str(error).split())[:200]}); expected a folder, or a name on the hub"
            ) from error
        found = {"model_name_or_path": saved.base_model_name_or_path}
    else:
        base = base_of(Path(name))
        found = {"model_name_or_path": base.name, "model_revision": base.revision}
        if base.config != base.name:
            found["config_name"] = base.config
        if (Path(name) / "tokenizer_config.json").is_file():
            found["tokenizer_name"] = name
    kept = {field: value for field, value in found.items() if getattr(model, field) in (None, "main")}
    # Its tokenizer may have tokens that are new to the base.
    model = dataclasses.replace(model, resize_embeddings=True, **kept)
    return dataclasses.replace(config, model=model)


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


def add_adapter(
    model: PreTrainedModel,
    auto_class: Any,
    settings: PeftConfig,
    *,
    seed: int,
    drawn: Sequence[str] = (),
    base_rows: int | None = None,
) -> PeftModel:
    """Wraps a model with a new adapter, drawn with `seed` and the same on every rank.

    Args:
        model: The base.
        auto_class: The transformers auto class that loaded it.
        settings: What kind of adapter.
        seed: Draws it.
        drawn: Names of the base's weights that no file holds: their modules (a pooler) are trained and kept
            in full, since nobody could load them again.
        base_rows: Embeddings that the base has where it was saved, if the model has others: they are kept in
            full then.

    Raises:
        ConfigError: If a named module isn't there.
    """
    named = list(settings.lora_modules_to_save or ())
    if base_rows is not None and base_rows != embedding_rows(model):
        # New tokens have new embeddings, which are nowhere else.
        named.append(EMBEDDINGS)
    kept = [*head_modules(model), *modules_of(model, drawn), *kept_by_name(model, named)]
    kept = outermost([*kept, *tied_to_embeddings(model, kept)])
    check_targets(model, settings.lora_target or ())
    linear = [name for name, module in model.named_modules() if isinstance(module, LINEAR)]
    adapter = LoraConfig(
        task_type=_TASK_TYPES.get(auto_class.__name__),
        r=settings.lora_r,
        lora_alpha=alpha(settings),
        lora_dropout=settings.lora_dropout,
        target_modules=settings.lora_target or "all-linear",
        exclude_modules=[name for name in linear if is_in(name, kept)] or None,
        # A copy: peft adds the usual names of heads to it.
        modules_to_save=list(kept) or None,
        use_dora=settings.peft == "dora",
        use_rslora=settings.peft == "rslora",
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_NOISE)
        torch.manual_seed(seed)
        try:
            adapted = get_peft_model(model, adapter)
        except ValueError as error:
            raise no_target(model, settings.lora_target or (), error) from error
    assert isinstance(adapted, PeftModel)
    check_kept(adapted, kept)
    return _finish(adapted, base_rows)


def _finish(adapted: PeftModel, base_rows: int | None) -> PeftModel:
    """Ties what was tied, and fixes what is saved."""
    tie_kept(adapted)
    # Left to itself peft would ask the hub for the base's config at every save, and add frozen embeddings.
    adapted.save_pretrained = functools.partial(  # type: ignore[method-assign]
        adapted.save_pretrained, save_embedding_layers=False
    )
    kept: Any = adapted
    kept.base_rows = base_rows
    return adapted


def load_adapter(
    model: PreTrainedModel, name: str, *, trains: bool, base_rows: int | None = None
) -> PeftModel:
    """Wraps a model with a saved adapter; gives it as many embeddings as the adapter brings.

    Raises:
        CheckpointError: If it isn't there, or doesn't fit the model.
    """
    mend = f"{model.name_or_path or type(model).__name__}; name an adapter that was trained on this model"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_NOISE)
            settings = peft.PeftConfig.from_pretrained(name)
            settings.inference_mode = not trains
            brought, rows = _rows_of(model, name), embedding_rows(model)
            if brought is not None and brought != rows:
                base_rows = base_rows or rows
                resize_embeddings(model, brought, seed=0)
            adapted = get_peft_model(model, settings)
            with gathered(p for p in adapted.parameters() if p.requires_grad):
                found = adapted.load_adapter(name, adapted.active_adapter, is_trainable=trains)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"the adapter {name} can't be loaded ({reason}) onto {mend}") from error
    assert isinstance(adapted, PeftModel)
    if found.missing_keys or found.unexpected_keys:
        problem = (
            f"lacks {found.missing_keys[0]}"
            if found.missing_keys
            else f"brings {found.unexpected_keys[0]}, which the model has no place for,"
        )
        raise CheckpointError(f"the adapter {name} {problem} and doesn't fit {mend}")
    return _finish(adapted, base_rows)


def _rows_of(model: PreTrainedModel, name: str) -> int | None:
    """Embeddings that a saved adapter brings, if it does."""
    module = embedding_name(model)
    tensor = peft.utils.load_peft_weights(name, device="cpu").get(f"base_model.model.{module}.weight")
    return None if tensor is None else int(tensor.shape[0])


# ---- The base ----


def _name_base(adapted: PeftModel, config: RunConfig, output_dir: Path, *, trains: bool) -> None:
    """Makes the saved adapter name a base that can be loaded again."""
    adapter = adapted.active_peft_config
    base: Any = adapted.get_base_model()
    if has_no_name(config.model.model_name_or_path):
        source = Path(str(base.name_or_path))
        place = str((output_dir / BASE_FOLDER).absolute())
        if trains:
            place = on_main(lambda: str(keep_base(source, output_dir)))
        adapter.base_model_name_or_path = place
        return
    name = str(config.model.model_name_or_path)
    adapter.base_model_name_or_path = str(Path(name).absolute()) if Path(name).is_dir() else name
    adapter.revision = config.model.model_revision if config.model.model_revision != "main" else None


def save_beside(adapted: PeftModel, folder: Path) -> None:
    """Writes what is needed to load the base as it was: its config, and how it generates."""
    base: Any = adapted.get_base_model()
    config = copy.deepcopy(base.config)
    # A named base may be saved as another class than the one it was loaded as.
    config.architectures = [type(base).__name__]
    if (rows := getattr(adapted, "base_rows", None)) is not None:
        # As the base is saved; whoever loads the adapter resizes it again.
        config.get_text_config().vocab_size = rows
    config.save_pretrained(folder / BASE_FOLDER)
    if base.can_generate():
        # A task sets it on the model it is given, which is the wrapped one.
        adapted.generation_config.save_pretrained(folder / BASE_FOLDER)


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
