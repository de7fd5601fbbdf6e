"""The folder of a finished run, given to a training again.

The same command has nothing to do; with more steps or epochs it goes on from its end; with other settings it
is an error that names them. All of that is told from the files of the folder alone, before any data is read.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from hf_dist.config import BLOCKS, RunConfig
from hf_dist.errors import CheckpointError, ConfigError
from hf_dist.training.checkpoints.files import checkpoints
from hf_dist.training.run.output import FINISHED_FILE, RUN_FILE, check_output_dir

logger = logging.getLogger("hf_dist")

# What may differ between two commands that mean the same training: where it runs, how it is watched, loaded
# and logged. A setting that would leave other files or other weights is never in here.
_FREE = frozenset(
    {
        "output_dir", "overwrite_output_dir", "dry_run", "preset", "micro_batches_per_rank",
        "overwrite_cache", "preprocessing_num_workers", "rank_timeout_seconds", "hang_timeout_seconds",
        "use_cpu", "disable_tqdm", "run_name", "project", "report_to", "dataloader_num_workers",
        "dataloader_pin_memory",
        "dataloader_persistent_workers", "dataloader_prefetch_factor", "ddp_backend", "ddp_timeout",
        "ddp_bucket_cap_mb", "ddp_find_unused_parameters", "ddp_broadcast_buffers", "ddp_static_graph",
    }
)  # fmt: skip
_FREE_PREFIXES = ("logging_", "log_", "trackio_")
_LENGTHS = ("max_steps", "num_train_epochs")


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """A run that was finished before, with the same settings: `run` has nothing left to do.

    Attributes:
        output_dir: its folder.
        results: what its all_results.json holds.
        step: optimizer steps that it trained.
    """

    output_dir: Path
    results: dict[str, Any]
    step: int

    def run(self) -> dict[str, Any]:
        """Says so in the log, and returns what all_results.json holds."""
        logger.info("%s: finished at step %d; nothing to do", self.output_dir, self.step)
        return self.results


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """A run that was finished at a step and is to go on to a later one."""

    output_dir: Path
    step: int

    def check_total(self, total: int) -> None:
        """Checks that there is something left to train.

        Raises:
            CheckpointError: The new settings ask for no more steps than were trained.
        """
        if total <= self.step:
            raise CheckpointError(
                f"--output_dir {self.output_dir} holds a finished run of {self.step} steps and these "
                f"settings ask for {total}; give more --max_steps or --num_train_epochs, or another folder"
            )


def starts_afresh(config: RunConfig) -> bool:
    """Whether what an earlier run left in the folder is to make room for this one.

    Processes that torchrun has started again after a fault go on with what they have trained so far.
    """
    if not config.training.overwrite_output_dir:
        return False
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


def _refuse_own_inputs(config: RunConfig, folder: Path) -> None:
    read = {
        **{
            name: getattr(config.model, name)
            for name in ("model_name_or_path", "config_name", "tokenizer_name")
        },
        **{name: getattr(config.data, name) for name in ("train_file", "validation_file", "test_file")},
        "adapter_name_or_path": config.peft.adapter_name_or_path,
        "resume": config.training.resume,
    }
    for name, value in read.items():
        if value and Path(value).exists() and Path(value).resolve().is_relative_to(folder.resolve()):
            raise ConfigError(
                f"--overwrite_output_dir would remove what --{name} {value} names; move it, or name another "
                "--output_dir"
            )


def look_at_folder(recipe: str, config: RunConfig, world_size: int) -> FinishedRun | Continuation | None:
    """What a run of this config finds in the folder that it names; None where no training was finished.

    Args:
        recipe: name of the recipe.
        config: the resolved config.
        world_size: processes, which decide what a step holds under `--batching examples`.

    Raises:
        CheckpointError: The folder can't be used; or a run of other settings was finished there, or one that
            left nothing to go on from.
        ConfigError: The run would remove what it reads.
    """
    named = config.training_arguments.get("output_dir")
    if named is None:
        return None
    check_output_dir(named)
    if not config.training_arguments.get("do_train"):
        return None
    if starts_afresh(config):
        _refuse_own_inputs(config, Path(named))
        return None
    return _compare(Path(named), recipe, config, world_size)


def _compare(
    folder: Path, recipe: str, config: RunConfig, world_size: int
) -> FinishedRun | Continuation | None:
    if not (folder / FINISHED_FILE).exists():
        return None
    try:
        results = dict(json.loads((folder / FINISHED_FILE).read_text(encoding="utf-8")))
        saved = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
        state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
        step, old_recipe = int(state["global_step"]), str(saved["recipe"])
        old = _settings(saved["config"], config, saved.get("world_size", 1))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(
            f"--output_dir {folder} holds a finished run ({FINISHED_FILE}) and no readable {RUN_FILE} and "
            f"trainer_state.json that say of which settings; {_MEND}"
        ) from None
    if old_recipe != recipe:
        raise CheckpointError(f"--output_dir {folder} holds a finished run of {old_recipe}; {_MEND}")
    new = _settings(json.loads(json.dumps(config.as_dict(), default=str)), config, world_size)
    if new["resume"] == "auto":
        old["resume"] = "auto"
    differing = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    if not differing:
        return FinishedRun(output_dir=folder, results=results, step=step)
    if new["resume"] == "auto" and set(differing) <= set(_LENGTHS) and _is_longer(old, new, step):
        if not checkpoints(folder) and config.training.checkpoint_copy is None:
            raise CheckpointError(
                f"--output_dir {folder} holds a run that finished at step {step} and left no checkpoint to "
                f"go on from (its --save_strategy is {new['save_strategy']}); {_MEND}"
            )
        return Continuation(output_dir=folder, step=step)
    shown = "; ".join(f"--{name} was {old.get(name)} and is {new.get(name)}" for name in differing)
    raise CheckpointError(
        f"--output_dir {folder} holds a finished run of other settings ({shown}); give the same ones (or "
        f"only more --max_steps or --num_train_epochs, to go on); else {_MEND}"
    )


_MEND = "name another folder, or say --overwrite_output_dir to train afresh in this one"


def _settings(blocks: Mapping[str, Any], config: RunConfig, world_size: int) -> dict[str, Any]:
    """The settings that decide what is trained and left behind, by flat name; defaults filled in."""
    owners = [*BLOCKS.values(), TrainingArguments, *([] if config.task is None else [type(config.task)])]
    found = {}
    for owner in owners:
        for field in dataclasses.fields(owner):
            made = None if field.default_factory is dataclasses.MISSING else field.default_factory()
            found[field.name] = made if field.default is dataclasses.MISSING else field.default
    # Settings that this version doesn't know any more decide nothing.
    given = {
        name: value for block in blocks.values() for name, value in (block or {}).items() if name in found
    }
    found = json.loads(json.dumps({**found, **given}, default=str))
    if found["batching"] == "examples":
        sizes = found["per_device_train_batch_size"], found["gradient_accumulation_steps"]
        found["examples_per_step"] = sizes[0] * sizes[1] * world_size
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        del found[name]
    if found["max_steps"] > 0:
        del found["num_train_epochs"]
    # A JSON that brings the optimizer is more than an engine.
    free = _FREE - {"preset"} if found["optim_from_json"] else _FREE
    return {
        name: value
        for name, value in found.items()
        if name not in free and not name.startswith(_FREE_PREFIXES)
    }


def _is_longer(old: Mapping[str, Any], new: Mapping[str, Any], step: int) -> bool:
    if new["max_steps"] > 0:
        return bool(new["max_steps"] > (old["max_steps"] if old["max_steps"] > 0 else step))
    # Steps before and epochs now: the plan will tell.
    return old["max_steps"] > 0 or new["num_train_epochs"] > old["num_train_epochs"]
