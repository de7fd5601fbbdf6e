"""One word picks the engine: a preset's name becomes a DeepSpeed configuration.

Pure: neither torch nor DeepSpeed is imported. A preset says only how it differs from the common base, and
every value that TrainingArguments knows stays "auto", so that the Trainer fills it. The files in
`ds_configs/` are generated from here by `hf-dist presets write`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_dist.errors import ConfigError, nearest
from hf_dist.presets.reading import Device, Json, hpz_size, offload_device, offload_parts, zero_stage

NVME_PATH_VARIABLE = "HF_DIST_NVME_PATH"
NVME_PATH = "/local_nvme"
"""Where NVMe offload swaps to unless the environment variable above says otherwise."""

_BASE: Json = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 0,
        # Off: it takes 4.5 times the bucket in memory, and has made ZeRO-2 runs differ from each other
        # (DeepSpeed issue 5523). Exact comes before fast here.
        "overlap_comm": False,
        "contiguous_gradients": True,
    },
}

# 50 million elements: large enough to fill a network link, while the buffer (allocated in full, twice)
# stays small next to a model. "auto" would be hidden size squared, less than a megabyte for a small model.
_BUCKETS: Json = {"reduce_bucket_size": 50_000_000, "allgather_bucket_size": 50_000_000}

_GATHER: Json = {
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    # Said here and not "auto": accelerate fills that with False, and then no model.safetensors is saved.
    "stage3_gather_16bit_weights_on_model_save": True,
}


def _offload(device: Device) -> Json:
    if device == "nvme":
        return {"device": "nvme", "nvme_path": NVME_PATH, "pin_memory": True}
    return {"device": device, "pin_memory": True}


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A named engine.

    Attributes:
        name: what `--preset` takes.
        zero: its part of `zero_optimization`, beside the common base; None for plain PyTorch.
        extra: further top-level keys.
        choose: when to pick it.
        costs: what it costs.
        needs: what the machine must have beside DeepSpeed.
    """

    name: str
    zero: Json | None
    extra: Json = field(default_factory=dict)
    choose: str
    costs: str
    needs: str

    @property
    def zero_stage(self) -> int | None:
        """The ZeRO stage, or None without DeepSpeed."""
        return None if self.zero is None else int(self.zero["stage"])

    @property
    def offload_optimizer(self) -> Device:
        """Where the optimizer states live: on the device ("none"), in CPU memory or on NVMe."""
        return offload_device(self.config() or {}, "optimizer")

    @property
    def offload_param(self) -> Device:
        """Where the parameters live when they are not in use."""
        return offload_device(self.config() or {}, "param")

    def config(self) -> Json | None:
        """A fresh DeepSpeed configuration, or None without DeepSpeed."""
        if self.zero is None:
            return None
        return _merged(_merged(_BASE, {"zero_optimization": self.zero}), self.extra)


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> Json:
    """`base` with `changes` laid over it, nested mappings key by key; both are left as they are."""
    merged = deepcopy(dict(base))
    for key, value in changes.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), dict):
            merged[key] = _merged(merged[key], value)
        else:
            merged[key] = deepcopy(value)
    return merged


_ALL = (
    Preset(
        name="none",
        zero=None,
        choose="The model, its gradients and its optimizer fit on each device.",
        costs="Nothing beside the usual all-reduce; 16 bytes per parameter on every device (fp32 AdamW).",
        needs="Nothing; DDP with several processes.",
    ),
    Preset(
        name="zero1",
        zero={"stage": 1, **_BUCKETS},
        choose="The optimizer states are too much for one device.",
        costs="As fast as DDP; states (8 of 16 bytes per parameter) are split over the devices.",
        needs="DeepSpeed.",
    ),
    Preset(
        name="zero2",
        zero={"stage": 2, **_BUCKETS},
        choose="The usual choice on several devices: the model fits, optimizer and gradients don't.",
        costs="Near DDP in speed; states and gradients are split over the devices.",
        needs="DeepSpeed.",
    ),
    Preset(
        name="zero2_offload",
        zero={"stage": 2, **_BUCKETS, "offload_optimizer": _offload("cpu")},
        choose="Few devices, much CPU memory, and a model that fits but whose optimizer doesn't.",
        costs="The optimizer step runs on the CPU: slower with small batches.",
        needs="A C++ compiler (CPUAdam is compiled once, about a minute); CPU memory for the states.",
    ),
    Preset(
        name="zero3",
        zero={"stage": 3, **_GATHER},
        choose="The model itself doesn't fit on a device.",
        costs="Parameters are gathered for each use: half again as much traffic as DDP.",
        needs="DeepSpeed; a fast link between devices.",
    ),
    Preset(
        name="zero3_offload",
        zero={
            "stage": 3,
            **_GATHER,
            "offload_optimizer": _offload("cpu"),
            "offload_param": _offload("cpu"),
        },
        choose="The model doesn't fit on all devices together, but does in CPU memory.",
        costs="Parameters travel to the device for each use; the optimizer step runs on the CPU.",
        needs="A C++ compiler; CPU memory of 16 to 18 bytes per parameter over all nodes.",
    ),
    Preset(
        name="zero3_nvme",
        zero={
            "stage": 3,
            **_GATHER,
            "offload_optimizer": _offload("nvme"),
            "offload_param": _offload("nvme"),
        },
        choose="The model doesn't fit in CPU memory either.",
        costs="The disk sets the speed: every step reads and writes all the states.",
        needs=f"libaio, a C++ compiler, and a local NVMe disk, named in {NVME_PATH_VARIABLE}.",
    ),
    Preset(
        name="zero3_hpz",
        zero={"stage": 3, **_GATHER, "zero_hpz_partition_size": 8},
        choose="zero3 on several nodes whose network is slower than the links inside a node (ZeRO++).",
        costs="A second copy of the parameters per node; the backward pass gathers inside the node.",
        needs="DeepSpeed; as many processes on every node (their number replaces the 8 in the file).",
    ),
)

PRESETS: dict[str, Preset] = {preset.name: preset for preset in _ALL}


def ds_config(
    name: str, *, nvme_path: str | None = None, processes_per_node: int | None = None
) -> Json | None:
    """The DeepSpeed configuration of a preset.

    Args:
        name: a key of `PRESETS`.
        nvme_path: folder that NVMe offload swaps to, in the place of the preset's own.
        processes_per_node: group size of hierarchical partitioning, in the place of the preset's own.

    Returns:
        A fresh dict that the caller may change, or None for "none".

    Raises:
        ConfigError: there is no such preset.
    """
    if name not in PRESETS:
        raise ConfigError(_unknown(name))
    config = PRESETS[name].config()
    if config is not None and nvme_path:
        for part in offload_parts(config):
            if part.get("device") == "nvme":
                part["nvme_path"] = nvme_path
    if config is not None and processes_per_node and hpz_size(config) > 1:
        config["zero_optimization"]["zero_hpz_partition_size"] = processes_per_node
    return config


def resolve(
    name_or_path: str, *, nvme_path: str | None = None, processes_per_node: int | None = None
) -> Json | None:
    """The DeepSpeed configuration of a preset or of a user's own JSON file.

    Args:
        name_or_path: a preset, or the path of a file that ends in `.json`.
        nvme_path: see `ds_config`; a file of the user's own is left as it is.
        processes_per_node: see `ds_config`.

    Raises:
        ConfigError: neither a preset nor a readable JSON object.
    """
    if name_or_path in PRESETS:
        return ds_config(name_or_path, nvme_path=nvme_path, processes_per_node=processes_per_node)
    if not is_path(name_or_path):
        raise ConfigError(_unknown(name_or_path))
    return load_json(name_or_path)


def is_path(name_or_path: str) -> bool:
    """Whether `--preset` was given a file of the user's own rather than a name."""
    if name_or_path in PRESETS:
        return False
    return name_or_path.endswith(".json") or "/" in name_or_path or Path(name_or_path).is_file()


def load_json(path: str | Path) -> Json:
    """Reads a DeepSpeed JSON file.

    Raises:
        ConfigError: it is missing, unreadable, not JSON, not an object, or names a key twice.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"DeepSpeed config {path} can't be read ({error.strerror}); give a JSON file or one of the "
            f"presets: {', '.join(PRESETS)}"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"DeepSpeed config {path} is not UTF-8 text; save it as UTF-8") from error

    def unique(pairs: list[tuple[str, Any]]) -> Json:
        keys = [key for key, _ in pairs]
        for key in keys:
            if keys.count(key) > 1:
                raise ConfigError(f"DeepSpeed config {path} names the key {key!r} twice; keep one of them")
        return dict(pairs)

    try:
        config = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"DeepSpeed config {path} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(f"DeepSpeed config {path} holds a {type(config).__name__}; expected a JSON object")
    return config


def _unknown(name: str) -> str:
    return (
        f"unknown preset {name!r}{nearest(name, PRESETS)}; expected one of {', '.join(PRESETS)}, "
        "or the path of a DeepSpeed JSON file"
    )


def as_json(config: Json) -> str:
    """The text of a configuration as `ds_configs/` holds it: two spaces, own order, one last newline."""
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"


def accelerate_config(name: str, *, directory: str = "ds_configs") -> str:
    """The YAML that `accelerate launch --config_file` takes for a preset.

    One file serves 1 to n processes and nodes: `num_processes: -1` makes accelerate ask for
    `--num_processes` instead of guessing; several nodes add `--num_machines`, `--machine_rank` and
    `--main_process_ip`.

    Args:
        name: a key of `PRESETS`.
        directory: where the JSON files are, as seen from where accelerate is started.
    """
    config = ds_config(name)
    lines = ["compute_environment: LOCAL_MACHINE", "debug: false"]
    if config is None:
        # MULTI_GPU is accelerate's word for "one process per device through torchrun"; it starts the
        # processes on a machine without a GPU too, where MULTI_CPU starts only one.
        lines += ["distributed_type: MULTI_GPU", "downcast_bf16: 'no'", "gpu_ids: all"]
    else:
        lines += [
            "deepspeed_config:",
            f"  deepspeed_config_file: {directory}/{name}.json",
            # Without pdsh: start accelerate on each node, with its own --machine_rank.
            "  deepspeed_multinode_launcher: standard",
            f"  zero3_init_flag: {'true' if zero_stage(config) == 3 else 'false'}",
            "distributed_type: DEEPSPEED",
        ]
    lines += [
        "machine_rank: 0",
        "main_training_function: main",
        "num_machines: 1",
        "num_processes: -1",
        "rdzv_backend: static",
        "same_network: true",
        "use_cpu: false",
    ]
    return "\n".join(lines) + "\n"


def generated_files(directory: str = "ds_configs") -> dict[str, str]:
    """All files of `ds_configs/`: path inside it -> text. Byte-stable."""
    files: dict[str, str] = {}
    for name in PRESETS:
        config = ds_config(name)
        if config is not None:
            files[f"{name}.json"] = as_json(config)
        files[f"accelerate/{name}.yaml"] = accelerate_config(name, directory=directory)
    return files


def write_files(directory: str | Path) -> list[str]:
    """Writes the generated files below `directory` and returns those that changed."""
    changed = drift(directory)
    for relative, text in generated_files(Path(directory).as_posix()).items():
        path = Path(directory) / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return changed


def drift(directory: str | Path) -> list[str]:
    """The generated files that are missing below `directory` or differ in a byte, by relative path."""
    wrong = []
    for relative, text in generated_files(Path(directory).as_posix()).items():
        path = Path(directory) / relative
        if not path.is_file() or path.read_bytes() != text.encode():
            wrong.append(relative)
    return wrong
