"""Finds what is wrong in a DeepSpeed JSON before anything is loaded.

DeepSpeed ignores unknown top-level keys, and drops an "auto" that nobody filled; nested mistakes raise only
once the engine starts. Nothing here imports torch or DeepSpeed: the keys come from the checked-in table
`hf_dist.presets.deepspeed_keys`, which a test compares with DeepSpeed's own classes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hf_dist.errors import nearest
from hf_dist.presets.deepspeed_keys import KEYS, VERSION

Kind = Literal[
    "unknown key",
    "dead key",
    "unfilled auto",
    "number as text",
    "float for integer",
    "wrong type",
    "contradiction",
    "no whole model",
    "no effect",
    "name",
]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        kind: what sort of mistake it is.
        path: the key, with dots between the levels.
        message: what was found, what was expected and how to mend it.
        error: whether a run must stop; otherwise it works, but not as its author may think.
    """

    kind: Kind
    path: str
    message: str
    error: bool = True

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


_REMOVED = f"removed from DeepSpeed (it stops DeepSpeed {VERSION} at the start); delete it"
DEAD: dict[str, str] = {
    "amp": f"{_REMOVED}; use bf16 or fp16",
    "bfloat16": "the old name; use bf16",
    "compression_training": _REMOVED,
    "comms_config": "never a key of DeepSpeed; use comms_logger",
    "curriculum_learning": f"{_REMOVED}; use data_efficiency.data_sampling.curriculum_learning",
    "eigenvalue": _REMOVED,
    "elasticity": f"{_REMOVED}; use --per_device_train_batch_size and --gradient_accumulation_steps",
    "grad_clipping": "never a key of DeepSpeed; use gradient_clipping",
    "graph_harvesting": _REMOVED,
    "monitor_config": "never a key of DeepSpeed; use tensorboard, wandb, comet or csv_monitor at the top",
    "nebula": f"{_REMOVED}; checkpoints are saved without it",
    "progressive_layer_drop": _REMOVED,
    "quantize_training": _REMOVED,
    "sparse_attention": f"{_REMOVED}; choose the model's attn_implementation",
    "sparse_gradients": f"{_REMOVED}; embeddings built with sparse=True need no key",
    "bf16.loss_scale": "bf16 has no loss scale; delete it",
    "bf16.initial_scale_power": "bf16 has no loss scale; delete it",
    "bf16.loss_scale_window": "bf16 has no loss scale; delete it",
    "bf16.hysteresis": "bf16 has no loss scale; delete it",
    "bf16.min_loss_scale": "bf16 has no loss scale; delete it",
    "bf16.auto_cast": "only fp16 has it; delete it",
    "fp16.opt_level": "a key of apex, not of DeepSpeed; delete it",
    "optimizer.params.max_grad_norm": "not a setting of the optimizer; use gradient_clipping",
    "zero_optimization.allgather_size": "renamed; use allgather_bucket_size",
    "zero_optimization.cpu_offload": 'deprecated; use "offload_optimizer": {"device": "cpu"}',
    "zero_optimization.cpu_offload_param": 'deprecated; use "offload_param": {"device": "cpu"}',
    "zero_optimization.cpu_offload_params": 'renamed; use "offload_param": {"device": "cpu"}',
    "zero_optimization.cpu_offload_use_pin_memory": (
        "deprecated; use pin_memory in offload_optimizer and in offload_param"
    ),
    "zero_optimization.fast_init": "never a key of this level; delete it",
    "zero_optimization.mics_shard_size": f"{_REMOVED}; use zero_hpz_partition_size",
    "zero_optimization.mics_hierarchical_params_gather": _REMOVED,
    "zero_optimization.offload_param.fast_init": "only offload_optimizer has it; delete it",
    "zero_optimization.reduce_bucket": "renamed; use reduce_bucket_size",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "deprecated; use stage3_gather_16bit_weights_on_model_save"
    ),
    "zero_optimization.zeropp_loco_param": _REMOVED,
}
"""Keys that DeepSpeed has dropped, renamed or never had, by path -> what to do."""

FILLED = frozenset(
    {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "bf16.enabled",
        "fp16.enabled",
        "optimizer.params.lr",
        "optimizer.params.betas",
        "optimizer.params.eps",
        "optimizer.params.weight_decay",
        "scheduler.params.warmup_min_lr",
        "scheduler.params.warmup_max_lr",
        "scheduler.params.warmup_num_steps",
        "scheduler.params.total_num_steps",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.stage3_param_persistence_threshold",
    }
)
"""Where the Trainer puts a sensible value in the place of "auto"."""

_AUTO_IS_A_VALUE = (
    "autotuning",
    "data_types.keep_in_fp32_modules",
    "pipeline",
    "zero_optimization.zenflow.select_interval",
    "zero_optimization.zenflow.select_strategy",
    "zero_optimization.zenflow.update_interval",
)
_FREE = ("optimizer.params", "scheduler.params")
_STAGE_3_ONLY = ("offload_param", "zero_hpz_partition_size", "sub_group_size", "leaf_module")
_GATHER = "stage3_gather_16bit_weights_on_model_save"
_GATHER_NAMES = (_GATHER, "gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save")
_ZERO = "zero_optimization"
_COMMENT = ("_", "//", "#")  # how people comment in JSON; DeepSpeed ignores it


def lint(config: Mapping[str, Any], *, file: str | Path | None = None) -> list[Finding]:
    """Everything that is wrong in a DeepSpeed configuration.

    Args:
        config: the parsed JSON.
        file: its path, if it has one: the name is a promise too.
    """
    findings = [*_walk(config, KEYS, ""), *_contradictions(config)]
    if file is not None:
        findings += _broken_promises(config, Path(file).stem)
    return findings


def _walk(config: Mapping[str, Any], table: Mapping[str, Any], parent: str) -> Iterator[Finding]:
    for key, value in config.items():
        path = f"{parent}.{key}" if parent else key
        if path in DEAD:
            yield Finding(kind="dead key", path=path, message=DEAD[path])
        elif key not in table and not parent and key.startswith(_COMMENT):
            continue
        elif key not in table:
            yield Finding(kind="unknown key", path=path, message=_unknown(key, table, parent))
        elif isinstance(table[key], dict):
            if isinstance(value, Mapping):
                yield from _walk(value, table[key], path)
            elif value is not None:
                yield Finding(
                    kind="wrong type",
                    path=path,
                    message=f"is {value!r}; expected an object with the keys {_some(table[key])}",
                )
        elif path in _FREE and isinstance(value, Mapping):
            yield from _free(value, path)
        else:
            yield from _value(value, table[key], path)


def _unknown(key: str, table: Mapping[str, Any], parent: str) -> str:
    elsewhere = [path for path in _paths(KEYS) if path.split(".")[-1] == key]
    where = parent or "the top level"
    message = f"DeepSpeed {VERSION} has no such key in {where}"
    if not parent:
        message += ", and ignores it without a word"
    if elsewhere:
        return f"{message}; it belongs at {elsewhere[0]}"
    return f"{message}{nearest(key, table) or '; delete it'}"


def _paths(table: Mapping[str, Any], parent: str = "") -> Iterator[str]:
    for key, value in table.items():
        path = f"{parent}.{key}" if parent else key
        yield path
        if isinstance(value, dict):
            yield from _paths(value, path)


def _some(table: Mapping[str, Any]) -> str:
    keys = list(table)
    return ", ".join(keys[:4]) + (" ..." if len(keys) > 4 else "")


def _free(params: Mapping[str, Any], parent: str) -> Iterator[Finding]:
    """Parameters of an optimizer or a scheduler: any key, but numbers must be numbers."""
    for key, value in params.items():
        path = f"{parent}.{key}"
        if path in DEAD:
            yield Finding(kind="dead key", path=path, message=DEAD[path])
        elif isinstance(value, str) and (value == "auto" or _is_number(value)):
            yield from _value(value, "float", path)


def _value(value: Any, kind: str, path: str) -> Iterator[Finding]:
    if value is None:
        return
    if isinstance(value, str) and value == "auto":
        if path not in FILLED and not path.startswith(_AUTO_IS_A_VALUE):
            yield Finding(kind="unfilled auto", path=path, message=_unfilled(path))
    elif kind in ("int", "float"):
        if isinstance(value, str) and _is_number(value):
            number = float(value)
            shown = int(number) if number.is_integer() else number
            yield Finding(
                kind="number as text",
                path=path,
                message=f"is the text {value!r}; write the number {shown} without quotes",
            )
        elif isinstance(value, bool) or not isinstance(value, (int, float)):
            yield Finding(kind="wrong type", path=path, message=f"is {value!r}; expected a number")
        elif kind == "int" and isinstance(value, float):
            whole = value.is_integer()
            yield Finding(
                kind="float for integer",
                path=path,
                message=f"is the float {value!r}; write the whole number {round(value)}",
                error=not whole,
            )
    elif kind == "bool" and not isinstance(value, bool):
        yield Finding(kind="wrong type", path=path, message=f"is {value!r}; expected true or false")
    elif kind == "str" and not isinstance(value, str):
        yield Finding(kind="wrong type", path=path, message=f"is {value!r}; expected a text")


def _unfilled(path: str) -> str:
    if path == f"{_ZERO}.{_GATHER}":
        return '"auto" becomes false here, and then no model.safetensors is saved; write true'
    if path == f"{_ZERO}.stage":
        return '"auto" becomes 2, whatever the model needs; write the stage'
    return '"auto" is filled by nobody at this place; write a value or delete the key'


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _contradictions(config: Mapping[str, Any]) -> Iterator[Finding]:
    zero = config.get(_ZERO)
    if zero is None:
        yield Finding(
            kind="contradiction", path=_ZERO, message='is missing, and accelerate needs it; add {"stage": 0}'
        )
    on = [name for name in ("bf16", "fp16") if _get(config, name, "enabled") is True]
    if len(on) == 2:
        yield Finding(
            kind="contradiction",
            path="fp16.enabled",
            message='fp16 and bf16 are both on; write "auto" in both and choose with --bf16 or --fp16',
        )
    if not isinstance(zero, Mapping):
        return
    stage = zero.get("stage", 0)
    if isinstance(stage, int) and stage not in (0, 1, 2, 3):
        yield Finding(kind="contradiction", path=f"{_ZERO}.stage", message=f"is {stage}; expected 0 to 3")
    if stage == 3 and not any(zero.get(name) for name in _GATHER_NAMES):
        yield Finding(
            kind="no whole model",
            path=f"{_ZERO}.{_GATHER}",
            message="is not true, so no whole model (model.safetensors) is saved; write true",
        )
    if stage in (0, 1, 2):
        for key in zero:
            if (key.startswith("stage3_") or key in _STAGE_3_ONLY) and f"{_ZERO}.{key}" not in DEAD:
                yield Finding(
                    kind="no effect",
                    path=f"{_ZERO}.{key}",
                    message=f"does nothing in stage {stage}, only in stage 3; delete it",
                    error=False,
                )
    yield from _offload(zero, stage)


def _offload(zero: Mapping[str, Any], stage: Any) -> Iterator[Finding]:
    for part in ("offload_optimizer", "offload_param"):
        device = _get(zero, part, "device")
        path = f"{_ZERO}.{part}"
        if device is not None and device not in ("none", "cpu", "nvme", "auto"):
            yield Finding(
                kind="wrong type",
                path=f"{path}.device",
                message=f"is {device!r}; expected 'none', 'cpu' or 'nvme'",
            )
        if device == "nvme" and not _get(zero, part, "nvme_path"):
            yield Finding(
                kind="contradiction",
                path=path,
                message="offloads to nvme without an nvme_path; add one",
            )
        if device == "nvme" and part == "offload_optimizer" and stage in (1, 2):
            yield Finding(
                kind="contradiction",
                path=path,
                message=f"NVMe offload needs stage 3, and this is stage {stage}; write cpu or stage 3",
            )


def _get(config: Mapping[str, Any], section: str, key: str) -> Any:
    entry = config.get(section)
    return entry.get(key) if isinstance(entry, Mapping) else None


_STAGE_IN_NAME = re.compile(r"(?:zero[-_]?stage|zero|stage|(?<![a-z])z|(?<![a-z])s)[-_]?([0-3])(?![0-9])")
_NO_OFFLOAD_IN_NAME = re.compile(r"no[-_]?(?:cpu|offload)|without[-_]offload")
_OFFLOAD_IN_NAME = re.compile(r"offload|cpu|nvme|infinity")


def _broken_promises(config: Mapping[str, Any], stem: str) -> Iterator[Finding]:
    zero = config.get(_ZERO)
    if not isinstance(zero, Mapping):
        return
    name = stem.lower()
    stage = zero.get("stage", 0)
    promised = _STAGE_IN_NAME.search(name)
    if promised and isinstance(stage, int) and stage != int(promised[1]):
        yield Finding(
            kind="name",
            path=f"{_ZERO}.stage",
            message=f"is {stage}, but the file's name ({stem}) promises stage {promised[1]}; rename the file",
            error=False,
        )
    devices = {part: _get(zero, part, "device") for part in ("offload_optimizer", "offload_param")}
    offloads = [part for part, device in devices.items() if device in ("cpu", "nvme")]
    offloads += [part for part in ("cpu_offload", "cpu_offload_params") if zero.get(part) is True]
    says_no = bool(_NO_OFFLOAD_IN_NAME.search(name))
    says_yes = bool(_OFFLOAD_IN_NAME.search(name)) and not says_no
    if offloads and (says_no or (promised and not says_yes)):
        yield Finding(
            kind="name",
            path=f"{_ZERO}.{offloads[0]}",
            message=f"offloads, but the file's name ({stem}) doesn't say so; rename the file",
            error=False,
        )
    if says_yes and not offloads:
        yield Finding(
            kind="name",
            path=_ZERO,
            message=f"offloads nothing, but the file's name ({stem}) promises it; rename the file",
            error=False,
        )
