"""What a DeepSpeed configuration says, whoever wrote it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

Device = Literal["none", "cpu", "nvme"]
Json = dict[str, Any]


def lookup(config: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, None where a part is missing."""
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def zero_stage(config: Mapping[str, Any]) -> int:
    """The ZeRO stage that a DeepSpeed configuration asks for (0 where it says nothing)."""
    zero = config.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    return stage if isinstance(stage, int) else 0


def offload_device(config: Mapping[str, Any], part: Literal["optimizer", "param"]) -> Device:
    """The device that a DeepSpeed configuration offloads `part` to."""
    zero = config.get("zero_optimization")
    entry = zero.get(f"offload_{part}") if isinstance(zero, Mapping) else None
    device = entry.get("device") if isinstance(entry, Mapping) else None
    if device == "cpu":
        return "cpu"
    return "nvme" if device == "nvme" else "none"


def hpz_size(config: Mapping[str, Any]) -> int:
    """The group size of ZeRO++'s hierarchical partitioning; 1 without it."""
    zero = config.get("zero_optimization")
    size = zero.get("zero_hpz_partition_size", 1) if isinstance(zero, Mapping) else 1
    return size if isinstance(size, int) and size > 1 else 1


def nvme_paths(config: Mapping[str, Any]) -> list[str]:
    """The folders that a DeepSpeed configuration swaps to, without repeats."""
    paths = [str(part.get("nvme_path")) for part in offload_parts(config) if part.get("device") == "nvme"]
    return list(dict.fromkeys(paths))


def offload_parts(config: Mapping[str, Any]) -> Iterator[Json]:
    """The blocks that offload optimizer states and parameters, where there are any."""
    zero = config.get("zero_optimization")
    if isinstance(zero, Mapping):
        for part in ("offload_optimizer", "offload_param"):
            if isinstance(zero.get(part), dict):
                yield zero[part]
