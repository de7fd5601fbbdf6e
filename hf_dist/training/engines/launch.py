"""What the launcher asked for, read from the environment and from the launcher's own command line.

Nothing here imports torch. Launchers drop requests without a word (accelerate 1.15: `--cpu
--num_processes 2` starts one process and forgets DeepSpeed); this module finds those cases, so that
`hf_dist.training.engines.lifecycle` can refuse them before anything is loaded.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import yaml

from hf_dist.presets.catalogue import NVME_PATH_VARIABLE, PRESETS, is_path, load_json, resolve
from hf_dist.presets.reading import Json, offload_device, zero_stage

NPROC_VARIABLE = "HF_DIST_NPROC"
"""Processes on this machine that the launch line asked for; make and our own launch lines set it."""

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_ANCESTORS = 3


def launch_line(preset: str, nproc: int = 2, script: str | None = None) -> str:
    """A command that runs `script` with this preset on a CPU as well as on GPUs.

    Args:
        preset: a preset's name or the path of a DeepSpeed JSON.
        nproc: processes on this machine.
        script: the script; default: the one that runs.
    """
    script = script or sys.argv[0] or "SCRIPT"
    line = f"{NPROC_VARIABLE}={nproc} torchrun --standalone --nproc_per_node {nproc} {shlex.quote(script)}"
    return line if preset == "none" else f"{line} --preset {shlex.quote(preset)}"


def is_true(environ: Mapping[str, str], name: str) -> bool:
    """Whether an environment variable says yes, as accelerate reads it."""
    return environ.get(name, "").lower() in ("1", "true", "yes", "on", "y", "t")


def world_size(environ: Mapping[str, str]) -> int:
    """The number of processes that the launcher really started."""
    for name in ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"):
        if environ.get(name, "").isdigit():
            return int(environ[name])
    return 1


def local_world_size(environ: Mapping[str, str]) -> int:
    """The number of processes on this machine, as far as the launcher says; else all of them."""
    local = environ.get("LOCAL_WORLD_SIZE", "")
    return int(local) if local.isdigit() else world_size(environ)


def effective_preset(preset: str, environ: Mapping[str, str]) -> str:
    """The preset, or what `accelerate launch` asked for where the preset is "none".

    `accelerate launch --use_deepspeed` and an accelerate config name an engine by themselves; they count
    where no preset was given.

    Returns:
        A name in `PRESETS` or the path of a JSON file.
    """
    if preset != "none" or not is_true(environ, "ACCELERATE_USE_DEEPSPEED"):
        return preset
    file = environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if file not in ("", "none"):
        return next(
            (name for name in PRESETS if Path(file).stem == name and _same_json(file, name)),
            file if is_path(file) else f"./{file}",
        )
    stage, optimizer, param = accelerate_stage(environ)
    for name, known in PRESETS.items():
        if (known.zero_stage, known.offload_optimizer, known.offload_param) == (stage, optimizer, param):
            return name
    return preset


def asked_config(preset: str, environ: Mapping[str, str] | None = None) -> Json | None:
    """The DeepSpeed configuration that `preset` stands for here, None for plain PyTorch."""
    environ = os.environ if environ is None else environ
    return resolve(
        effective_preset(preset, environ),
        nvme_path=environ.get(NVME_PATH_VARIABLE),
        processes_per_node=local_world_size(environ),
    )


def accelerate_stage(environ: Mapping[str, str]) -> tuple[int, str, str]:
    """(ZeRO stage, optimizer offload, parameter offload) as accelerate will read them."""
    file = environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if file not in ("", "none"):
        config = load_json(file)
        return zero_stage(config), offload_device(config, "optimizer"), offload_device(config, "param")
    stage = environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    return (
        int(stage) if stage.isdigit() else 2,
        environ.get("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none"),
        environ.get("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "none"),
    )


def _same_json(file: str, name: str) -> bool:
    return Path(file).is_file() and load_json(file) == PRESETS[name].config()


def launch_problems(
    preset: str, environ: Mapping[str, str], ancestors: Sequence[Sequence[str]] | None = None
) -> list[str]:
    """What the launcher dropped or set by half.

    Args:
        preset: the preset that was asked for, after `effective_preset`.
        environ: the environment of this process.
        ancestors: command lines of the parent, its parent and so on; default: read with psutil.

    Returns:
        One line a problem, without the launch line that mends it.
    """
    ancestors = list(_ancestors()) if ancestors is None else ancestors
    problems = []
    if is_true(environ, "ACCELERATE_USE_FSDP"):
        problems.append(
            "accelerate was told to use FSDP, which hf_dist doesn't run yet (on a CPU it would quietly "
            "become DDP); use --preset zero3, which shards the same states"
        )
    cpu = is_true(environ, "ACCELERATE_USE_CPU")
    if cpu and (preset != "none" or is_true(environ, "ACCELERATE_USE_DEEPSPEED")):
        problems.append(
            f"preset {preset!r} needs DeepSpeed, but ACCELERATE_USE_CPU is "
            f"{environ['ACCELERATE_USE_CPU']!r} (`accelerate launch --cpu` and `use_cpu: true` set it), "
            "which makes accelerate drop DeepSpeed; DeepSpeed runs on a CPU without it"
        )
    problems += _restarts(environ)
    problems += _partial_ranks(environ)
    problems += _dropped_processes(environ, ancestors)
    return problems


def _restarts(environ: Mapping[str, str]) -> Iterator[str]:
    """Restarted processes of torch 2.13 find the addresses of the ended ones in the agent's store."""
    restarts = environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts != "0" and is_true(environ, "TORCHELASTIC_USE_AGENT_STORE") and world_size(environ) > 1:
        yield (
            f"torchrun may restart this {restarts} time(s), after which its processes would try to connect "
            "to those that ended (a fault of torch); set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun "
            "--max_restarts"
        )


def _partial_ranks(environ: Mapping[str, str]) -> Iterator[str]:
    given = [name for name in _RANK_VARIABLES[:3] if environ.get(name)]
    if not given:
        steps = environ.get("SLURM_STEP_NUM_TASKS", "1")
        if steps.isdigit() and int(steps) > 1:
            yield (
                f"srun started {steps} tasks, but RANK and WORLD_SIZE are not set, so each would train "
                "alone; start one torchrun per node from srun"
            )
        return
    missing = [name for name in _RANK_VARIABLES if not environ.get(name)]
    if missing:
        yield (
            f"{' and '.join(given)} {'is' if len(given) == 1 else 'are'} set, but "
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not; a launcher sets all of "
            f"{', '.join(_RANK_VARIABLES)}"
        )
        return
    numbers = {name: environ[name] for name in _RANK_VARIABLES if name != "MASTER_ADDR"}
    bad = [f"{name}={value}" for name, value in numbers.items() if not value.isdigit()]
    if bad:
        yield f"{', '.join(bad)}: expected a whole number"
    elif int(environ["RANK"]) >= int(environ["WORLD_SIZE"]):
        yield f"RANK is {environ['RANK']}, but WORLD_SIZE is {environ['WORLD_SIZE']}; ranks count from 0"


def _dropped_processes(environ: Mapping[str, str], ancestors: Sequence[Sequence[str]]) -> Iterator[str]:
    started = world_size(environ)
    asked = environ.get(NPROC_VARIABLE, "")
    if asked:
        here = local_world_size(environ)
        if not asked.isdigit() or int(asked) < 1:
            yield f"{NPROC_VARIABLE} is {asked!r}; expected the number of processes on this machine"
        elif int(asked) != here:
            yield f"{NPROC_VARIABLE} asks for {asked} processes, but the launcher started {here}"
        return
    for command in ancestors:
        wanted = _accelerate_processes(command)
        if wanted is not None:
            if wanted > 1 and wanted != started:
                yield (
                    f"`accelerate launch` was asked for {wanted} processes, but started {started} "
                    "(with --cpu, or without --multi_gpu or --use_deepspeed, it starts one)"
                )
            return


def _accelerate_processes(command: Sequence[str]) -> int | None:
    """The --num_processes of an `accelerate launch` command; 0 if unsaid, None for another program."""
    words = launcher_words(command)
    if words is None:
        return None
    count = flag(words, "num_processes")
    if count is None:
        file = flag(words, "config_file")
        count = _configured_processes(file) if file else None
    return int(count) if count and count.isdigit() else 0


def launcher_words(command: Sequence[str]) -> list[str] | None:
    """The launcher's own flags in an `accelerate launch` command line; None for another program."""
    words = [Path(word).name for word in command[:4]]
    if "launch" in words and "accelerate" in words:
        start = words.index("launch")
    elif "accelerate-launch" in words:
        start = words.index("accelerate-launch")
    elif "accelerate.commands.launch" in command[:4]:
        start = list(command).index("accelerate.commands.launch")
    else:
        return None
    rest = list(command[start + 1 :])
    # What follows the script are the script's flags.
    end = next((i for i, word in enumerate(rest) if word.endswith(".py")), len(rest))
    return rest[:end]


def parent_flag(name: str) -> str | None:
    """The value of a flag that was given to the `accelerate launch` above this process, if any."""
    for command in _ancestors():
        words = launcher_words(command)
        if words is not None:
            return flag(words, name)
    return None


def flag(command: Sequence[str], name: str) -> str | None:
    """The value of `--name value` or `--name=value` in a command line, `-` and `_` being the same."""
    for position, word in enumerate(command):
        key, _, value = word.partition("=")
        if key.startswith("--") and key[2:].replace("-", "_") == name:
            return value or (command[position + 1] if position + 1 < len(command) else None)
    return None


def _configured_processes(file: str) -> str | None:
    try:
        config = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None
    return str(config.get("num_processes")) if isinstance(config, dict) else None


def _ancestors() -> Iterator[list[str]]:
    """Command lines of the parent and those above it, as far as the system shows them."""
    try:
        for process in psutil.Process(os.getpid()).parents()[:_ANCESTORS]:
            yield process.cmdline()
    except psutil.Error:
        return
