"""Flags and YAML -> RunConfig.

One parser serves both: a YAML block becomes the argument list that says the same, so a value is checked
and converted by the same rules wherever it was written. Precedence: recipe defaults < YAML < flags.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from transformers import HfArgumentParser, TrainingArguments

from hf_dist.config import BLOCKS, RunConfig
from hf_dist.errors import ConfigError, nearest

_ARGUMENTS = {field.name for field in dataclasses.fields(TrainingArguments) if field.init}
_CHECKPOINT_PREFIXES = ("save_", "hub_", "push_to_hub", "load_best_", "metric_for_best", "greater_is_better")
_TRACKING_PREFIXES = ("log_", "logging_", "report_to", "run_name", "project", "trackio_", "disable_tqdm")

# Fields of TrainingArguments that would have no effect here, or would undo what the plan promises.
_REFUSED = {
    "deepspeed": "name the JSON file with --preset instead",
    "fsdp": "FSDP is not supported yet; --preset zero3 shards parameters, gradients and optimizer state",
    "fsdp_config": "FSDP is not supported yet; use --preset zero3",
    "auto_find_batch_size": "it would change the plan of the batches; lower --max_tokens_per_device instead",
    "resume_from_checkpoint": "say --resume auto, never or the path of a checkpoint",
    "train_sampling_strategy": "batches come from the plan (--batching, --window)",
    "length_column_name": "lengths are read from the tokenised data",
    "dataloader_drop_last": "the plan never drops an example",
    "use_cache": "a cache is of use only in generation, and packed documents are not kept apart with one",
    "local_rank": "the launcher sets it in the environment",
    "ignore_data_skip": "resuming skips by step index and loads no data for it",
    "average_tokens_across_devices": "the loss is always divided by the items of the whole step",
    "per_device_eval_batch_size": "evaluation is batched by --max_tokens_per_device",
    "batch_eval_metrics": "predictions are always reduced batch by batch",
    "eval_do_concat_batches": "predictions are always reduced batch by batch",
    "eval_accumulation_steps": "predictions are always reduced batch by batch",
    "prediction_loss_only": "evaluation always scores; leave out --do_eval to skip it",
    "include_for_metrics": "scores are made from the predictions and the data set",
    "eval_use_gather_object": "predictions are always gathered by row number",
    "logging_nan_inf_filter": "a NaN loss is never hidden from the log",
}

# HfArgumentParser (transformers 5.24) makes a plain string of a field that may be a list as well.
_LIST_OR_WORD = ("report_to", "optim_target_modules")


class _Names:
    """The flags of one recipe and the YAML blocks they belong to; those of its task form the block `task`."""

    def __init__(self, settings_class: type | None) -> None:
        self.owners: dict[str, type] = dict(BLOCKS)
        if settings_class is not None:
            self.owners["task"] = settings_class
        self.own = {
            field.name: block for block, owner in self.owners.items() for field in dataclasses.fields(owner)
        }
        self.all = [*self.own, *_ARGUMENTS]
        self.yaml_blocks = (*self.owners, "checkpoint", "tracking")

    def block_of(self, name: str) -> str | None:
        """The YAML block a flag belongs to, or None for an unknown flag."""
        if name in self.own:
            return self.own[name]
        if name not in _ARGUMENTS:
            return None
        if name.startswith(_CHECKPOINT_PREFIXES) or name == "resume_from_checkpoint":
            return "checkpoint"
        return "tracking" if name.startswith(_TRACKING_PREFIXES) else "training"


class _Parser(HfArgumentParser):
    """argparse that raises instead of printing its usage on every rank."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; `--help` lists all flags")


def _make_parser(names: _Names, recipe: str, description: str, defaults: Mapping[str, Any]) -> _Parser:
    groups: list[Any] = [*names.owners.values(), TrainingArguments]
    parser = _Parser(
        groups,
        prog=recipe,
        usage="%(prog)s [--config run.yaml] [flags]",
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        epilog="Fields of transformers' TrainingArguments keep their names. "
        f"--config reads a YAML file with the blocks {', '.join(names.yaml_blocks)}; flags override it.",
    )
    parser.add_argument("--config", help="YAML file with the run's settings in blocks.")
    for action in parser._actions:
        if action.dest in defaults:
            action.default = defaults[action.dest]
        if action.dest in _REFUSED:
            action.help = argparse.SUPPRESS
        # Hyphens work as underscores do; help and errors name each flag once.
        action.option_strings = [word for word in action.option_strings if "-" not in word[2:]]
        if action.dest in _LIST_OR_WORD:
            action.nargs = "+"
    return parser


def _parse_flat(parser: _Parser, names: _Names, argv: Sequence[str]) -> dict[str, Any]:
    """Returns only what `argv` names, converted by the types of the fields."""
    if "-h" in argv or "--help" in argv:
        parser.print_help()
        parser.exit()
    # Defaults are taken away only now: `--help` shows them, the merge must not see them.
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    # The short name that people try first.
    words = ["--do_predict" if word == "--predict" else word for word in argv]
    namespace, rest = parser.parse_known_args(words)
    if rest:
        known = [*names.all, "config"]
        unknown = [word for word in rest if word.startswith("-")] or rest
        name = unknown[0].split("=")[0]
        hint = nearest(name.lstrip("-").replace("-", "_"), known).replace("mean ", "mean --")
        raise ConfigError(f"unknown flag {name}{hint}; `--help` lists all flags")
    values = vars(namespace)
    for name in _LIST_OR_WORD:
        if len(values.get(name, ())) == 1:
            values[name] = values[name][0]
    for name, why in _REFUSED.items():
        if name in values:
            raise ConfigError(f"--{name} can't be set: {why}")
    return values


def _as_arguments(name: str, value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{name}={str(value).lower()}"]
    if isinstance(value, dict):
        return [f"--{name}={json.dumps(value)}"]
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}={value}"]


def _block_problem(names: _Names, block: str, values: Any) -> str | None:
    if block not in names.yaml_blocks:
        owner = names.block_of(block)
        hint = f" (it is a key of the block {owner})" if owner else nearest(block, names.yaml_blocks)
        return f"unknown block {block}{hint}; expected one of {', '.join(names.yaml_blocks)}"
    if values is not None and not isinstance(values, dict):
        return f"the block {block} holds {values!r}; expected keys with values"
    return None


def _key_problem(names: _Names, block: str, name: str) -> str | None:
    owner = names.block_of(name)
    if owner == block:
        return None
    if owner is not None:
        return f"the key {name} stands in the block {block}; it belongs to {owner}"
    of_block = [key for key in names.all if names.block_of(key) == block]
    hint = nearest(name, of_block) or nearest(name, names.all)
    return f"unknown key {name} in the block {block}{hint}"


def _read_yaml(path: Path, parser: _Parser, names: _Names) -> dict[str, Any]:
    try:
        blocks = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}; expected a readable YAML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {path}: not UTF-8 at byte {error.start}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}: not valid YAML: {error}") from None
    if blocks is None:
        return {}
    if not isinstance(blocks, dict):
        raise ConfigError(
            f"--config {path}: expected blocks ({', '.join(names.yaml_blocks)}) with keys in them"
        )
    problems: list[str] = []
    arguments: list[str] = []
    for block, values in blocks.items():
        if problem := _block_problem(names, str(block), values):
            problems.append(problem)
            continue
        for name, value in (values or {}).items():
            if problem := _key_problem(names, str(block), str(name)):
                problems.append(problem)
            else:
                arguments += _as_arguments(name, value)
    if problems:
        raise ConfigError(f"--config {path}: " + "; ".join(problems))
    try:
        return _parse_flat(parser, names, arguments)
    except ConfigError as error:
        raise ConfigError(f"--config {path}: {error}") from None


def _config_from_values(names: _Names, values: Mapping[str, Any]) -> RunConfig:
    """Builds the RunConfig from flat names (own fields and those of TrainingArguments).

    Raises:
        ConfigError: For an unknown name, a value out of range, or settings that exclude each other
            (all of the latter at once).
    """
    blocks: dict[str, dict[str, Any]] = {block: {} for block in names.owners}
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        if name in names.own:
            blocks[names.own[name]][name] = value
        elif name in _ARGUMENTS:
            arguments[name] = value
        else:
            raise ConfigError(f"unknown setting {name}{nearest(name, names.all)}")
    made = {block: owner(**blocks[block]) for block, owner in names.owners.items()}
    return RunConfig(**made, training_arguments=arguments)


def _conflicts(values: Mapping[str, Any]) -> list[str]:
    """Settings named by the user that exclude each other."""
    found = []
    if values.get("batching", "tokens") == "tokens":
        for name in ("gradient_accumulation_steps", "per_device_train_batch_size"):
            if name in values:
                found.append(
                    f"--{name} conflicts with --batching tokens, which derives it from --tokens_per_step; "
                    "drop it, or say --batching examples"
                )
    elif "tokens_per_step" in values:
        found.append(
            "--tokens_per_step conflicts with --batching examples, where a step holds "
            "per_device_train_batch_size x gradient_accumulation_steps x ranks examples; drop it"
        )
    if values.get("loss_normalization") == "mean" and values.get("batching") == "examples":
        found.append(
            "--loss_normalization mean conflicts with --batching examples, whose steps hold the same "
            "number of examples; drop one of them"
        )
    if values.get("fp16") and values.get("bf16"):
        found.append("--fp16 and --bf16 exclude each other; drop one of them")
    return found


def parse(
    argv: Sequence[str],
    *,
    recipe: str,
    description: str = "",
    defaults: Mapping[str, Any] | None = None,
    settings_class: type | None = None,
) -> RunConfig:
    """Parses a recipe's command line.

    Args:
        argv: The words after the script's name.
        recipe: Name of the recipe, shown by `--help`.
        description: First paragraph of `--help`.
        defaults: The recipe's own defaults, by flat name.
        settings_class: The dataclass of the task's own flags.

    Raises:
        ConfigError: With what was found, what was expected and how to mend it.
    """
    defaults = dict(defaults or {})
    names = _Names(settings_class)
    parser = _make_parser(names, recipe, description, defaults)
    flags = _parse_flat(parser, names, argv)
    config_file = flags.pop("config", None)
    named = {**(_read_yaml(Path(config_file), parser, names) if config_file else {}), **flags}
    if problems := _conflicts(named):
        raise ConfigError("; ".join(problems))
    return _config_from_values(names, _with_defaults(named, defaults))


def _with_defaults(named: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe's defaults under what the user named; `max_steps` silences the default of epochs."""
    merged = {**defaults, **named}
    if "early_stopping_patience" in named:
        # Early stopping compares with the best evaluation so far, which must be kept to be returned to.
        merged.setdefault("load_best_model_at_end", True)
    return merged


def make_config(task: Any, defaults: Mapping[str, Any], **settings: Any) -> RunConfig:
    """A RunConfig from Python: `make_config(TextClassification, DEFAULTS, max_steps=50, preset="zero2")`.

    Args:
        task: The task; its `settings_class` has the flags of its own (None: only the common ones).
        defaults: The recipe's own defaults, by flat name.
        **settings: What the user set, by flat name.

    Raises:
        ConfigError: As `parse` does.
    """
    for name, why in _REFUSED.items():
        if name in settings:
            raise ConfigError(f"{name} can't be set: {why}")
    if problems := _conflicts(settings):
        raise ConfigError("; ".join(problems))
    names = _Names(None if task is None else task.settings_class)
    return _config_from_values(names, _with_defaults(settings, defaults))
