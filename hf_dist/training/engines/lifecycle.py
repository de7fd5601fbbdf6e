"""The engine: what was asked for, what runs, and that they are the same.

Order in a run: `prepare_environment` (before torch.distributed and DeepSpeed), TrainingArguments with
`training_argument_overrides`, `start_communication`, the model, the Trainer, `read_engine` and
`check_engine` once training has begun, and `shutdown` at the end of the script.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hf_dist.errors import ConfigError, EngineError
from hf_dist.presets.catalogue import is_path
from hf_dist.presets.lint import lint
from hf_dist.presets.reading import Json, lookup
from hf_dist.training.engines.devices import has_accelerator
from hf_dist.training.engines.launch import (
    asked_config,
    effective_preset,
    launch_line,
    launch_problems,
    local_world_size,
    world_size,
)
from hf_dist.training.engines.needs import missing_needs, nvme_space_problem, show_own_ninja

if TYPE_CHECKING:
    from transformers import Trainer

logger = logging.getLogger("hf_dist")


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
    if is_path(asked):
        _lint(config, asked)
    show_own_ninja(environ)
    lacking = missing_needs(config, environ, on_cpu=not has_accelerator())
    if lacking:
        raise EngineError(f"preset {asked!r} can't run here: {'; '.join(lacking)}")
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


def _lint(config: Json, file: str) -> None:
    findings = lint(config, file=file)
    errors = [str(finding) for finding in findings if finding.error]
    if errors:
        raise ConfigError(f"{file}: {'; '.join(errors)}")
    for finding in findings:
        logger.warning("%s: %s", file, finding)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def training_argument_overrides(
    preset: str,
    training_arguments: Mapping[str, Any] | None = None,
    *,
    optim_from_json: bool = False,
) -> dict[str, Any]:
    """What TrainingArguments must be given for this preset, beside what the user set.

    Args:
        preset: a preset's name or a JSON file.
        training_arguments: the fields that the user set; these DDP settings are then left alone.
        optim_from_json: take learning rate, betas, epsilon, weight decay and warm-up from the JSON, as
            the Trainer insists that the two agree.
    """
    given = training_arguments or {}
    overrides: dict[str, Any] = {}
    config = asked_config(preset)
    if config is not None:
        overrides["deepspeed"] = config
        if optim_from_json:
            overrides.update(_optimizer_arguments(config))
    elif "ddp_find_unused_parameters" not in given:
        # The Trainer's own default searches the graph for unused parameters after every forward pass.
        overrides["ddp_find_unused_parameters"] = False
    if not has_accelerator():
        # Without it torch's CPU ranks each train a copy of their own (DDP), or DeepSpeed's config
        # fails on a world size of one.
        overrides["use_cpu"] = True
    return overrides


def _optimizer_arguments(config: Json) -> dict[str, Any]:
    fields = {
        "learning_rate": lookup(config, "optimizer.params.lr"),
        "adam_epsilon": lookup(config, "optimizer.params.eps"),
        "weight_decay": lookup(config, "optimizer.params.weight_decay"),
        "warmup_steps": lookup(config, "scheduler.params.warmup_num_steps"),
    }
    betas = lookup(config, "optimizer.params.betas")
    if isinstance(betas, list) and len(betas) == 2:
        fields.update(adam_beta1=betas[0], adam_beta2=betas[1])
    return {name: value for name, value in fields.items() if value not in (None, "auto")}


def tune_ddp(trainer: Trainer) -> None:
    """Lets DDP's gradients be views of its buckets, which saves one copy of all gradients.

    TrainingArguments have no field for it, so it is set on the Trainer's accelerator before the model is
    wrapped (accelerate 1.15, transformers 5.24).
    """
    handler = trainer.accelerator.ddp_handler
    if handler is not None:
        handler.gradient_as_bucket_view = True


@contextmanager
def outside_zero_init() -> Iterator[None]:
    """Builds models whole inside the block, also when TrainingArguments asked for ZeRO-3.

    For a model that one process builds alone: zero.Init partitions with collective calls, so a single
    rank would wait for the others without end (transformers 5.24 keeps the DeepSpeed config in a global).
    """
    from transformers.integrations import deepspeed as integration

    kept = integration._hf_deepspeed_config_weak_ref
    integration.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        integration._hf_deepspeed_config_weak_ref = kept


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


def check_space(preset: str, parameters: int, environ: Mapping[str, str] | None = None) -> None:
    """Checks that NVMe offload has room for a model; call it once its size is known.

    Args:
        preset: a preset's name or a JSON file.
        parameters: the whole model's parameters.
        environ: the environment; default: that of this process.

    Raises:
        EngineError: the disk is too full.
    """
    environ = os.environ if environ is None else environ
    config = asked_config(preset, environ)
    if config is None:
        return
    share = local_world_size(environ) / world_size(environ)
    problem = nvme_space_problem(config, int(parameters * share))
    if problem:
        raise EngineError(problem)
