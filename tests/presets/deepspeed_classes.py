"""Derives the table of DeepSpeed's configuration keys from the installed DeepSpeed.

`python -m tests.presets.deepspeed_classes` writes hf_dist/presets/deepspeed_keys.py;
tests/presets/test_lint.py fails when the two differ. Two sources: the fields of DeepSpeed's pydantic classes,
and, for the sections it reads by hand, the keys that its config class really looks up in a recording dict.
"""

import enum
import inspect
import os
import subprocess
import sys
import types
import typing
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parents[2] / "hf_dist" / "presets" / "deepspeed_keys.py"

# What DeepSpeed reads by hand has no declared type: said here, from its defaults in constants.py.
KINDS = {
    "train_batch_size": "int",
    "train_micro_batch_size_per_gpu": "int",
    "gradient_accumulation_steps": "int",
    "gradient_clipping": "float",
    "gradient_predivide_factor": "float",
    "vocabulary_size": "int",
    "communication_data_type": "str",
    "seq_parallel_communication_data_type": "str",
    "gradient_allreduce_op": "str",
    "log_level": "str",
    "managed_gradient_accumulation": "bool",
    "prescale_gradients": "bool",
    "disable_allgather": "bool",
    "disable_python_gc": "bool",
    "dump_state": "bool",
    "dataloader_drop_last": "bool",
    "memory_breakdown": "bool",
    "wall_clock_breakdown": "bool",
    "use_data_before_expert_parallelism": "bool",
    "zero_allow_untested_optimizer": "bool",
    "zero_force_ds_cpu_optimizer": "bool",
    "optimizer.type": "str",
    "optimizer.legacy_fusion": "bool",
    "scheduler.type": "str",
    "activation_checkpointing.partition_activations": "bool",
    "activation_checkpointing.number_checkpoints": "int",
    "activation_checkpointing.contiguous_memory_optimization": "bool",
    "activation_checkpointing.cpu_checkpointing": "bool",
    "activation_checkpointing.profile": "bool",
    "activation_checkpointing.synchronize_checkpoint_boundary": "bool",
    "aio.block_size": "int",
    "aio.queue_depth": "int",
    "aio.intra_op_parallelism": "int",
    "aio.single_submit": "bool",
    "aio.overlap_events": "bool",
    "aio.use_gds": "bool",
    "flops_profiler.enabled": "bool",
    "flops_profiler.profile_step": "int",
    "flops_profiler.module_depth": "int",
    "flops_profiler.top_modules": "int",
    "flops_profiler.detailed": "bool",
    "checkpoint.tag_validation": "str",
    "checkpoint.load_universal": "bool",
    "checkpoint.use_node_local_storage": "bool",
    "torch_autocast.enabled": "bool",
    "torch_autocast.dtype": "str",
    "autotuning.enabled": "bool",
    "data_efficiency.enabled": "bool",
    "data_types.grad_accum_dtype": "str",
    "data_types.param_dtype": "str",
    "data_types.buffer_dtype": "str",
}
SECTIONS_READ_BY_HAND = (
    "optimizer",
    "scheduler",
    "activation_checkpointing",
    "aio",
    "flops_profiler",
    "autotuning",
    "checkpoint",
    "data_types",
    "torch_autocast",
    "data_efficiency",
    "expert_parallel",
)
# Read by transformers and accelerate, which DeepSpeed ignores.
OTHERS = {"sequence_parallel_size": "int"}


def derive() -> dict[str, Any]:
    """Key -> kind ("int", "float", "bool", "str", "any") or a nested table."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.inference.config import WeightQuantConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime import config
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    classes = {
        "zero_optimization": DeepSpeedZeroConfig,
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "hybrid_engine": config.HybridEngineConfig,
        "compile": CompileConfig,
        "comms_logger": CommsLoggerConfig,
        "tensorboard": TensorBoardConfig,
        "wandb": WandbConfig,
        "comet": CometConfig,
        "csv_monitor": CSVConfig,
        "weight_quantization": WeightQuantConfig,
        "tensor_parallel": TPTrainingConfig,
    }
    removed = set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    read = _keys_read()
    table: dict[str, Any] = {
        key: KINDS.get(key, "any") for key in read[""] if key not in removed and key != "bfloat16"
    }
    table.update(OTHERS)
    for section in SECTIONS_READ_BY_HAND:
        if read.get(section):
            table[section] = {key: KINDS.get(f"{section}.{key}", "any") for key in read[section]}
    for section, cls in classes.items():
        table[section] = fields(cls)
    table["timers"] = {"throughput": fields(DeepSpeedThroughputTimerConfig)}
    return _sorted(table)


def fields(cls: Any) -> dict[str, Any]:
    """The keys of a pydantic class, under their names and aliases, without the deprecated ones."""
    found: dict[str, Any] = {}
    for name, field in cls.model_fields.items():
        if (field.json_schema_extra or {}).get("deprecated"):
            continue
        found[name] = kind_of(field.annotation)
        if field.alias:
            found[field.alias] = found[name]
    return found


def deprecated(cls: Any) -> dict[str, str]:
    """Deprecated key -> its replacement."""
    extras = {name: field.json_schema_extra or {} for name, field in cls.model_fields.items()}
    return {name: extra["new_param"] for name, extra in extras.items() if extra.get("deprecated")}


def kind_of(annotation: Any) -> Any:
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        members = [a for a in typing.get_args(annotation) if a is not type(None)]
        return kind_of(members[0]) if len(members) == 1 else "any"
    if origin is typing.Literal:
        return "str"
    if not inspect.isclass(annotation):
        return "any"
    if hasattr(annotation, "model_fields"):
        return fields(annotation)
    if issubclass(annotation, enum.Enum):
        return "int" if issubclass(annotation, int) else "str"
    for kind in (bool, int, float, str):
        if issubclass(annotation, kind):
            return kind.__name__
    return "str" if issubclass(annotation, Path) else "any"


class _Recorder(dict):
    """A dict that notes the keys that are looked up in it."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.looked_up: set[str] = set()

    def get(self, key: Any, default: Any = None) -> Any:
        self.looked_up.add(key)
        return super().get(key, default)

    def __getitem__(self, key: Any) -> Any:
        self.looked_up.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: Any) -> bool:
        self.looked_up.add(key)
        return super().__contains__(key)

    def keys(self) -> Any:
        return self

    def __copy__(self) -> "_Recorder":
        return self


def _keys_read() -> dict[str, set[str]]:
    from deepspeed.runtime.config import DeepSpeedConfig

    recorders = {section: _Recorder({}) for section in SECTIONS_READ_BY_HAND}
    recorders["optimizer"] = _Recorder({"type": "Adam", "params": {}})
    recorders["scheduler"] = _Recorder({"type": "WarmupLR", "params": {}})
    recorders["torch_autocast"] = _Recorder({"dtype": "bfloat16", "lower_precision_safe_modules": []})
    # An empty one is taken for an absent one.
    recorders["expert_parallel"] = _Recorder({"enabled": False})
    top = _Recorder(
        {
            "train_batch_size": 1,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            **recorders,
        }
    )
    DeepSpeedConfig(top)
    return {"": top.looked_up, **{name: recorder.looked_up for name, recorder in recorders.items()}}


def _sorted(table: dict[str, Any]) -> dict[str, Any]:
    return {key: _sorted(table[key]) if isinstance(table[key], dict) else table[key] for key in sorted(table)}


def main() -> None:
    import deepspeed

    text = (
        '"""The keys that a DeepSpeed configuration may hold.\n\n'
        'GENERATED by python -m tests.presets.deepspeed_classes.\n"""\n\n'
        "from __future__ import annotations\n\nfrom typing import Any\n\n"
        f'VERSION = "{deepspeed.__version__}"\n\nKEYS: dict[str, Any] = {derive()!r}\n'
    )
    TABLE.write_text(text)
    subprocess.run([sys.executable, "-m", "ruff", "format", "-q", str(TABLE)], check=True)


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main()
