"""Settings that contradict each other: DeepSpeed JSON, accelerate's settings and TrainingArguments.

All are found before the model is loaded and reported together, each with both values, where they stand
and which to change.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

from hf_dist.errors import ConfigError
from hf_dist.presets.reading import Json, lookup, offload_device, zero_stage
from hf_dist.training.engines.devices import has_accelerator
from hf_dist.training.engines.launch import (
    accelerate_stage,
    asked_config,
    effective_preset,
    is_true,
    parent_flag,
    world_size,
)

# JSON path -> the field of TrainingArguments that the Trainer compares it with (transformers 5.24,
# HfTrainerDeepSpeedConfig), which raises one mismatch late, once the model is loaded.
_PAIRS = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "bf16.enabled": "bf16",
    "fp16.enabled": "fp16",
}
_OPTIMIZER_PAIRS = {
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_num_steps": "warmup_steps",
    "scheduler.params.warmup_max_lr": "learning_rate",
}
_CPU_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adagrad")


def find_conflicts(
    preset: str,
    training_arguments: Mapping[str, Any],
    environ: Mapping[str, str] | None = None,
    *,
    optim_from_json: bool = False,
    on_cpu: bool | None = None,
) -> list[str]:
    """Every contradiction between the preset or JSON, accelerate's settings and TrainingArguments.

    Args:
        preset: a preset's name or a JSON file.
        training_arguments: the fields that were set, by the user or by the plan; the others count with
            their defaults.
        environ: the environment; default: that of this process.
        optim_from_json: the JSON's optimizer and scheduler are wanted.
        on_cpu: whether there is no accelerator; default: looked up.

    Returns:
        One line a conflict.
    """
    environ = os.environ if environ is None else environ
    if on_cpu is None:
        on_cpu = not has_accelerator()
    config = asked_config(preset, environ)
    conflicts = [
        *_devices(config, training_arguments, on_cpu),
        *_launcher(preset, training_arguments, environ),
    ]
    if config is None:
        return conflicts + list(_ddp(training_arguments))
    name = effective_preset(preset, environ)
    conflicts += _no_training(config, name, training_arguments)
    conflicts += _values(config, name, training_arguments)
    conflicts += _batch_size(config, name, training_arguments, world_size(environ))
    conflicts += _optimizer(config, name, training_arguments, optim_from_json)
    return conflicts


def refuse_conflicts(preset: str, training_arguments: Mapping[str, Any], **options: Any) -> None:
    """Raises one ConfigError with all conflicts; see `find_conflicts`."""
    conflicts = find_conflicts(preset, training_arguments, **options)
    if conflicts:
        count = "settings contradict each other" if len(conflicts) == 1 else f"{len(conflicts)} conflicts"
        raise ConfigError(f"{count}: {'; '.join(conflicts)}")


def defaults() -> dict[str, Any]:
    """The defaults of TrainingArguments' fields."""
    from transformers import TrainingArguments

    return {
        field.name: field.default
        for field in dataclasses.fields(TrainingArguments)
        if field.default is not dataclasses.MISSING
    }


def _value(arguments: Mapping[str, Any], name: str) -> tuple[Any, str]:
    """The value of a field and how it is called in a message."""
    if name in arguments:
        return arguments[name], f"--{name} is {arguments[name]}"
    value = defaults().get(name)
    return value, f"--{name} is {value} (its default)"


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, bool) or isinstance(right, bool):
        return bool(left) == bool(right)
    if isinstance(left, (int, float)) and isinstance(right, (int, float)):
        return math.isclose(left, right, rel_tol=1e-9)
    return left == right


def _no_training(config: Json, name: str, arguments: Mapping[str, Any]) -> Iterator[str]:
    """ZeRO-1 and 2 shard what training needs: DeepSpeed starts no engine for them to evaluate with."""
    evaluates = [flag for flag in ("do_eval", "do_predict") if arguments.get(flag)]
    if zero_stage(config) < 3 and evaluates and not arguments.get("do_train"):
        yield (
            f"{name} is ZeRO-{zero_stage(config)}, which shards only what training needs, and "
            f"--{evaluates[0]} trains nothing; use --preset none, or zero3 if one device is too small"
        )


def _values(config: Json, name: str, arguments: Mapping[str, Any]) -> Iterator[str]:
    for path, field in _PAIRS.items():
        in_json = lookup(config, path)
        if in_json is None or in_json == "auto":
            continue
        value, said = _value(arguments, field)
        if not _same(in_json, value or 0):
            yield f'{path} is {in_json} in {name}, but {said}; write "auto" in the JSON, or change the flag'


def _batch_size(config: Json, name: str, arguments: Mapping[str, Any], processes: int) -> Iterator[str]:
    in_json = config.get("train_batch_size")
    if in_json is None or in_json == "auto":
        return
    micro, _ = _value(arguments, "per_device_train_batch_size")
    accumulation, _ = _value(arguments, "gradient_accumulation_steps")
    if in_json != micro * accumulation * processes:
        yield (
            f"train_batch_size is {in_json} in {name}, but --per_device_train_batch_size {micro} x "
            f"--gradient_accumulation_steps {accumulation} x {processes} processes are "
            f'{micro * accumulation * processes}; write "auto" in the JSON'
        )


def _optimizer(config: Json, name: str, arguments: Mapping[str, Any], wanted: bool) -> Iterator[str]:
    present = [key for key in ("optimizer", "scheduler") if key in config]
    if present and not wanted:
        yield (
            f"{name} has {' and '.join(present)}, which belong to TrainingArguments (--optim, "
            "--learning_rate, --lr_scheduler_type ...); delete them there, or say --optim_from_json"
        )
    if wanted and "optimizer" not in config:
        yield f"--optim_from_json is set, but {name} has no optimizer; add one, or drop the flag"
    steps = lookup(config, "scheduler.params.total_num_steps")
    if wanted and isinstance(steps, int) and steps != arguments.get("max_steps", -1):
        yield f'scheduler.params.total_num_steps is {steps} in {name}; write "auto", the Trainer knows it'
    if offload_device(config, "optimizer") != "none" and "optimizer" not in config:
        optim, said = _value(arguments, "optim")
        optim = getattr(optim, "value", optim)
        if optim not in _CPU_OPTIMIZERS:
            yield (
                f"{name} offloads the optimizer, which DeepSpeed runs on the CPU as AdamW or Adagrad, but "
                f"{said}; use --optim adamw_torch, or a preset without offload"
            )


def _devices(config: Json | None, arguments: Mapping[str, Any], on_cpu: bool) -> Iterator[str]:
    fp16 = arguments.get("fp16") or (config is not None and lookup(config, "fp16.enabled") is True)
    if on_cpu and fp16:
        yield "fp16 is on, but this machine has no accelerator and a CPU trains in fp32 or bf16; use --bf16"
    if not on_cpu and arguments.get("bf16"):
        import torch

        if torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False):
            yield "--bf16 is set, but this GPU has no bf16 units; use --fp16"
    if not on_cpu and arguments.get("use_cpu") and config is not None:
        yield (
            "--use_cpu is set on a machine with an accelerator, and DeepSpeed would still take it; "
            "hide it instead: CUDA_VISIBLE_DEVICES= and no --use_cpu"
        )
    if arguments.get("bf16") and arguments.get("fp16"):
        yield "--bf16 and --fp16 are both set; choose one"
    for field in ("fsdp", "fsdp_config"):
        if arguments.get(field):
            yield (
                f"--{field} is {arguments[field]!r}, and hf_dist doesn't run FSDP yet; use --preset zero3, "
                "which shards the same states"
            )
    if arguments.get("deepspeed"):
        yield f"--deepspeed is {arguments['deepspeed']!r}; give the JSON as --preset instead"


def _launcher(preset: str, arguments: Mapping[str, Any], environ: Mapping[str, str]) -> Iterator[str]:
    precision = environ.get("ACCELERATE_MIXED_PRECISION", "no")
    chosen = "bf16" if arguments.get("bf16") else "fp16" if arguments.get("fp16") else "no"
    if precision not in ("no", chosen):
        yield (
            f"accelerate's mixed_precision is {precision}, but TrainingArguments say "
            f"{'fp32' if chosen == 'no' else chosen}; add --{precision}, or launch with --mixed_precision no"
        )
    if not is_true(environ, "ACCELERATE_USE_DEEPSPEED"):
        return
    if preset != "none":
        yield from _stage(preset, environ)
    for variable, field, unset in (
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "gradient_accumulation_steps", "1"),
        ("ACCELERATE_GRADIENT_CLIPPING", "max_grad_norm", "auto"),
    ):
        said = environ.get(variable, "auto")
        value, spelled = _value(arguments, field)
        # accelerate passes its own default on, whether or not anybody asked for it.
        if said not in ("auto", "none", unset) and not _same(float(said), value):
            yield f"accelerate's {variable[11:].lower()} is {said}, but {spelled}; set it only by --{field}"


def _stage(preset: str, environ: Mapping[str, str]) -> Iterator[str]:
    config = asked_config(preset, environ)
    if config is None:
        return
    theirs = accelerate_stage(environ)
    ours = (zero_stage(config), offload_device(config, "optimizer"), offload_device(config, "param"))
    file = environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    names = ("ZeRO stage", "optimizer offload", "parameter offload")
    flags = ("zero_stage", "offload_optimizer_device", "offload_param_device")
    for name, flag, their, our in zip(names, flags, theirs, ours, strict=True):
        if their == our:
            continue
        if file not in ("", "none"):
            where = file
        elif parent_flag(flag) is not None:
            where = f"--{flag} of accelerate launch"
        elif environ.get("ACCELERATE_CONFIG_DS_FIELDS", "").find(flag) >= 0:
            where = "the accelerate config"
        else:
            continue  # accelerate's own default: nobody asked for it, and the preset overrides it
        yield (
            f"{name} is {our} in preset {preset!r}, but {their} in {where}; "
            "drop one of the two (the preset alone is enough)"
        )


def _ddp(arguments: Mapping[str, Any]) -> Iterator[str]:
    accumulation = arguments.get("gradient_accumulation_steps", 1)
    if arguments.get("ddp_static_graph") and accumulation > 1:
        yield (
            f"--ddp_static_graph is set with --gradient_accumulation_steps {accumulation}, and DDP's static "
            "graph fails on accumulated steps; drop the flag"
        )
