"""The engine that runs, read from the live objects, and the one that was asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hf_dist.errors import EngineError
from hf_dist.presets.reading import hpz_size, lookup, offload_device, zero_stage
from hf_dist.training.engines.launch import asked_config, effective_preset, launch_line, world_size

if TYPE_CHECKING:
    from transformers import Trainer

Kind = Literal["single", "ddp", "deepspeed"]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An engine, as asked for or as read from a running one.

    Attributes:
        kind: one process, DDP, or DeepSpeed.
        zero_stage: 0 to 3; 0 for the other kinds.
        offload_optimizer: "none", "cpu" or "nvme".
        offload_param: "none", "cpu" or "nvme".
        world_size: processes in all.
        data_parallel_size: processes that see different data.
        precision: "fp32", "bf16" or "fp16".
        hpz_size: processes that share a second copy of the parameters (ZeRO++); 1 without one.
    """

    kind: Kind
    zero_stage: int = 0
    offload_optimizer: str = "none"
    offload_param: str = "none"
    world_size: int = 1
    data_parallel_size: int = 1
    precision: str = "fp32"
    hpz_size: int = 1

    @property
    def name(self) -> str:
        """`single`, `ddp`, `deepspeed-zero2`, `deepspeed-zero2-offload`, `deepspeed-zero3-nvme` ..."""
        if self.kind != "deepspeed":
            return self.kind
        devices = (self.offload_optimizer, self.offload_param)
        suffix = "-nvme" if "nvme" in devices else "-offload" if "cpu" in devices else ""
        suffix += "-hpz" if self.hpz_size > 1 else ""
        return f"deepspeed-zero{self.zero_stage}{suffix}"


def read_engine(trainer: Trainer) -> Engine:
    """Reads the engine that really runs, once the trainer has prepared its model."""
    from torch import distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    deepspeed_engine = getattr(trainer, "deepspeed", None)
    if deepspeed_engine is not None:
        return _read_deepspeed(deepspeed_engine, world)
    wrapped = isinstance(trainer.model_wrapped, DistributedDataParallel)
    # While it trains, several processes without the wrapper would each train a copy of their own.
    split = wrapped or (trainer.accelerator.num_processes > 1 and not trainer.is_in_train)
    precision = trainer.accelerator.mixed_precision
    return Engine(
        kind="ddp" if split else "single",
        world_size=world,
        data_parallel_size=trainer.accelerator.num_processes,
        precision="fp32" if precision == "no" else precision,
    )


def _read_deepspeed(engine: Any, world: int) -> Engine:
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    # The optimizer does the sharding and the offloading; the engine's accessors only repeat its config.
    optimizer = engine.optimizer
    offload_optimizer = offload_param = "none"
    hpz = 1
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        stage = 3
        hpz = _hpz_size(engine)
        if optimizer.offload_optimizer:
            offload_optimizer = "nvme" if optimizer.swap_optimizer else "cpu"
        if optimizer.offload_param:
            offload_param = "nvme" if optimizer.params_in_nvme_and_cpu else "cpu"
    elif isinstance(optimizer, DeepSpeedZeroOptimizer):
        stage = 2 if optimizer.partition_gradients else 1
        offload_optimizer = "cpu" if optimizer.cpu_offload else "none"
    else:
        stage = engine.zero_optimization_stage()
    return Engine(
        kind="deepspeed",
        zero_stage=stage,
        offload_optimizer=offload_optimizer,
        offload_param=offload_param,
        world_size=world,
        data_parallel_size=int(engine.dp_world_size),
        precision="bf16" if engine.bfloat16_enabled() else "fp16" if engine.fp16_enabled() else "fp32",
        hpz_size=hpz,
    )


def _hpz_size(engine: Any) -> int:
    """The size of the group that a parameter's second copy is split over, from the parameters."""
    from torch import distributed as dist

    groups = {getattr(weight, "ds_zero_param_process_group", None) for weight in engine.module.parameters()}
    sizes = {dist.get_world_size(group) for group in groups if group is not None}
    return max(sizes, default=1)


def expected_engine(
    preset: str,
    environ: Mapping[str, str] | None = None,
    training_arguments: Mapping[str, Any] | None = None,
) -> Engine:
    """The engine that was asked for, on the processes that the launcher started.

    Args:
        preset: a preset's name or a JSON file.
        environ: the environment; default: that of this process.
        training_arguments: the fields that were set; `bf16` and `fp16` name the precision.
    """
    environ = os.environ if environ is None else environ
    config = asked_config(preset, environ)
    processes = world_size(environ)
    precision = "fp32"
    for name in ("bf16", "fp16"):
        in_json = lookup(config or {}, f"{name}.enabled")
        if in_json is True or (in_json is not False and (training_arguments or {}).get(name)):
            precision = name
    if config is None:
        kind: Kind = "ddp" if processes > 1 else "single"
        return Engine(kind=kind, world_size=processes, data_parallel_size=processes, precision=precision)
    tensor_parallel = lookup(config, "tensor_parallel.autotp_size")
    return Engine(
        kind="deepspeed",
        zero_stage=zero_stage(config),
        offload_optimizer=offload_device(config, "optimizer"),
        offload_param=offload_device(config, "param"),
        world_size=processes,
        data_parallel_size=processes // max(tensor_parallel if isinstance(tensor_parallel, int) else 1, 1),
        precision=precision,
        # DeepSpeed takes all processes where there are fewer than a group's.
        hpz_size=min(hpz_size(config), processes),
    )


_COMPARED = (
    "kind",
    "zero_stage",
    "offload_optimizer",
    "offload_param",
    "world_size",
    "data_parallel_size",
    "precision",
    "hpz_size",
)


def check_engine(
    preset: str,
    engine: Engine,
    environ: Mapping[str, str] | None = None,
    training_arguments: Mapping[str, Any] | None = None,
) -> None:
    """Compares the running engine with what was asked for.

    Args:
        preset: a preset's name or a JSON file.
        engine: what `read_engine` found.
        environ: the environment; default: that of this process.
        training_arguments: the fields that were set; without them the precision is not compared.

    Raises:
        EngineError: they differ; the message has every difference and the launch line that works.
    """
    environ = os.environ if environ is None else environ
    wanted = expected_engine(preset, environ, training_arguments)
    different = [
        f"{name} is {getattr(engine, name)} instead of {getattr(wanted, name)}"
        for name in _COMPARED
        if getattr(engine, name) != getattr(wanted, name)
        and not (name == "precision" and training_arguments is None)
    ]
    if different:
        asked = effective_preset(preset, environ)
        raise EngineError(
            f"the engine that runs ({engine.name}) is not the one that preset {asked!r} asks for: "
            f"{', '.join(different)}. What works: {launch_line(asked, wanted.world_size)}"
        )
