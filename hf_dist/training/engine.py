"""The engine: what was asked for, what runs, and that they are the same.

Order in a run: `prepare_environment` (before torch.distributed and DeepSpeed), TrainingArguments with
`training_argument_overrides`, `start_communication`, the model, the Trainer, `read_engine` and
`check_engine` once training has begun, and `shutdown` at the end of the script.
"""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hf_dist.errors import EngineError
from hf_dist.presets import NVME_PATH_VARIABLE, Json, offload_device, resolve, zero_stage
from hf_dist.training.launch import effective_preset, launch_line, launch_problems, world_size

if TYPE_CHECKING:
    from transformers import Trainer

__all__ = [
    "Engine",
    "check_engine",
    "expected_engine",
    "launch_line",
    "prepare_environment",
    "read_engine",
    "shutdown",
    "start_communication",
    "training_argument_overrides",
]

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
    """

    kind: Kind
    zero_stage: int = 0
    offload_optimizer: str = "none"
    offload_param: str = "none"
    world_size: int = 1
    data_parallel_size: int = 1
    precision: str = "fp32"

    @property
    def name(self) -> str:
        """`single`, `ddp`, `deepspeed-zero2`, `deepspeed-zero2-offload`, `deepspeed-zero3-nvme` ..."""
        if self.kind != "deepspeed":
            return self.kind
        devices = (self.offload_optimizer, self.offload_param)
        suffix = "-nvme" if "nvme" in devices else "-offload" if "cpu" in devices else ""
        return f"deepspeed-zero{self.zero_stage}{suffix}"


def has_accelerator() -> bool:
    """Whether this machine has a device that torch can train on beside the CPU."""
    import torch

    return torch.accelerator.is_available() and torch.accelerator.current_accelerator() is not None


def asked_config(preset: str, environ: Mapping[str, str] | None = None) -> Json | None:
    """The DeepSpeed configuration that `preset` stands for here, None for plain PyTorch."""
    environ = os.environ if environ is None else environ
    return resolve(effective_preset(preset, environ), nvme_path=environ.get(NVME_PATH_VARIABLE))


def prepare_environment(preset: str, environ: MutableMapping[str, str] | None = None) -> None:
    """Makes this process ready for the preset's engine; call it before torch.distributed and DeepSpeed.

    Sets DS_ACCELERATOR=cpu on a machine without an accelerator, and the rank variables of a single
    process where DeepSpeed needs them.

    Raises:
        ConfigError: the preset doesn't exist, or its JSON can't be read.
        EngineError: the launcher quietly dropped something, or DeepSpeed is missing.
    """
    environ = os.environ if environ is None else environ
    asked = effective_preset(preset, environ)
    config = asked_config(preset, environ)
    problems = launch_problems(asked, environ)
    if problems:
        raise EngineError(f"{'; '.join(problems)}. What works: {launch_line(asked)}")
    if not has_accelerator():
        # DeepSpeed decides once, when it is imported (accelerate does that too), and takes any CUDA build
        # of torch for a GPU.
        environ["DS_ACCELERATOR"] = "cpu"
    if config is None:
        return
    if importlib.util.find_spec("deepspeed") is None:
        raise EngineError(f"preset {asked!r} needs DeepSpeed; install it: pip install 'hf_dist[deepspeed]'")
    if world_size(environ) == 1 and "RANK" not in environ:
        # DeepSpeed has no mode without a process group: one process is a group of one.
        environ.update(
            RANK="0",
            LOCAL_RANK="0",
            WORLD_SIZE="1",
            LOCAL_WORLD_SIZE="1",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(_free_port()),
        )


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def training_argument_overrides(preset: str) -> dict[str, Any]:
    """What TrainingArguments must be given for this preset, beside what the user set."""
    overrides: dict[str, Any] = {}
    config = asked_config(preset)
    if config is not None:
        overrides["deepspeed"] = config
    if not has_accelerator():
        # Without it torch's CPU ranks each train a copy of their own (DDP), or DeepSpeed's config
        # fails on a world size of one.
        overrides["use_cpu"] = True
    return overrides


def start_communication(preset: str) -> None:
    """Starts DeepSpeed's process group; call it after TrainingArguments and before the model.

    Without it a ZeRO-3 `from_pretrained` on several CPU ranks asserts on train_batch_size (DeepSpeed
    0.19.8): zero.Init reads the world size from a group that nobody has started.
    """
    if asked_config(preset) is None:
        return
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    if not deepspeed.comm.is_initialized():
        backend = get_accelerator().communication_backend_name()
        deepspeed.init_distributed(backend if has_accelerator() else "gloo", auto_mpi_discovery=False)


def shutdown() -> None:
    """Ends the process group in step; call it last in a script.

    Some ZeRO-3 runs otherwise abort at exit, after all their work is done.
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def read_engine(trainer: Trainer) -> Engine:
    """Reads the engine that really runs, once the trainer has prepared its model."""
    from torch import distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    deepspeed_engine = getattr(trainer, "deepspeed", None)
    if deepspeed_engine is not None:
        return _read_deepspeed(deepspeed_engine, world)
    wrapped = isinstance(trainer.model_wrapped, DistributedDataParallel)
    split = wrapped or trainer.accelerator.num_processes > 1
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
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        stage = 3
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
    )


def expected_engine(preset: str, environ: Mapping[str, str] | None = None) -> Engine:
    """The engine that was asked for, on the processes that the launcher started."""
    environ = os.environ if environ is None else environ
    config = asked_config(preset, environ)
    processes = world_size(environ)
    if config is None:
        kind: Kind = "ddp" if processes > 1 else "single"
        return Engine(kind=kind, world_size=processes, data_parallel_size=processes)
    return Engine(
        kind="deepspeed",
        zero_stage=zero_stage(config),
        offload_optimizer=offload_device(config, "optimizer"),
        offload_param=offload_device(config, "param"),
        world_size=processes,
        data_parallel_size=processes,
    )


_COMPARED = ("kind", "zero_stage", "offload_optimizer", "offload_param", "world_size")


def check_engine(preset: str, engine: Engine, environ: Mapping[str, str] | None = None) -> None:
    """Compares the running engine with what was asked for.

    Raises:
        EngineError: they differ; the message has every difference and the launch line that works.
    """
    environ = os.environ if environ is None else environ
    wanted = expected_engine(preset, environ)
    different = [
        f"{name} is {getattr(engine, name)} instead of {getattr(wanted, name)}"
        for name in _COMPARED
        if getattr(engine, name) != getattr(wanted, name)
    ]
    if different:
        asked = effective_preset(preset, environ)
        raise EngineError(
            f"the engine that runs ({engine.name}) is not the one that preset {asked!r} asks for: "
            f"{', '.join(different)}. What works: {launch_line(asked, wanted.world_size)}"
        )
