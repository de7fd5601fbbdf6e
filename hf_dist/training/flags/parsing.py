"""Flags and YAML -> RunConfig.

One parser serves both: a YAML block becomes the argument list that says the same, so a value is checked
and converted by the same rules wherever it was written. Precedence: recipe defaults < YAML < flags. Flags of
transformers' example scripts are put into our words first (`stock`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from transformers import HfArgumentParser, TrainingArguments
from transformers.hf_argparser import string_to_bool

from hf_dist.config import BLOCKS, RunConfig
from hf_dist.data.readers.files import formats
from hf_dist.errors import ConfigError, nearest
from hf_dist.training.flags.rules import conflicts, settle
from hf_dist.training.flags.stock.translate import stock_flags, translate

_ARGUMENTS = {field.name for field in dataclasses.fields(TrainingArguments) if field.init}
_CHECKPOINT_PREFIXES = ("save_", "hub_", "push_to_hub", "load_best_", "metric_for_best", "greater_is_better")
_TRACKING_PREFIXES = ("log_", "logging_", "report_to", "run_name", "project", "trackio_", "disable_tqdm")

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
        self.stock = stock_flags(self.all)
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
        usage="%(prog)s [--config run.yaml] [flags], or %(prog)s flags.json",
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        epilog="Fields of transformers' TrainingArguments keep their names. "
        f"--config reads a YAML file with the blocks {', '.join(names.yaml_blocks)}; flags override it. "
        "The flags of transformers' example scripts are understood too (docs/stock_flags.md).",
    )
    parser.add_argument("--config", help="YAML file with the run's settings in blocks.")
    _add_stock_flags(parser, names)
    for action in parser._actions:
        if action.dest in defaults:
            action.default = defaults[action.dest]
        elif action.dest == "logging_steps":
            action.default = "so that a run logs 20 to 50 times"
        if action.dest == "file_format":
            # Not a Literal of the field: a recipe from outside may bring more (`file_formats`).
            action.choices = tuple(formats())
        if action.dest in names.stock:
            action.help = argparse.SUPPRESS
        # Hyphens work as underscores do; help and errors name each flag once.
        action.option_strings = [word for word in action.option_strings if "-" not in word[2:]]
        if action.dest in _LIST_OR_WORD:
            action.nargs = "+"
    return parser


def _add_stock_flags(parser: _Parser, names: _Names) -> None:
    for one in names.stock.values():
        if one.name in names.all:
            continue
        words = [f"--{one.name}", f"--{one.name.replace('_', '-')}"]
        if one.kind is bool:
            # As HfArgumentParser takes them: alone, with a value, and with no_ in front.
            parser.add_argument(*dict.fromkeys(words), type=string_to_bool, nargs="?", const=True)
            negated = dict.fromkeys((f"--no_{one.name}", f"--no-{words[1][2:]}"))
            parser.add_argument(*negated, dest=one.name, action="store_false", help=argparse.SUPPRESS)
        else:
            parser.add_argument(*dict.fromkeys(words), type=one.kind)


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
        known = [*names.all, *names.stock, "config"]
        unknown = [word for word in rest if word.startswith("-")] or rest
        name = unknown[0].split("=")[0]
        hint = nearest(name.lstrip("-").replace("-", "_"), known).replace("mean ", "mean --")
        raise ConfigError(f"unknown flag {name}{hint}; `--help` lists all flags")
    values = vars(namespace)
    for name in _LIST_OR_WORD:
        if len(values.get(name, ())) == 1:
            values[name] = values[name][0]
    return values


def _in_our_words(given: Mapping[str, Any], names: _Names) -> tuple[dict[str, Any], list[str]]:
    """What a source names, with our settings in the place of stock flags, and a line for each of those.

    Raises:
        ConfigError: For stock flags that can't be followed, all of them.
    """
    found = translate({name: value for name, value in given.items() if value is not None}, names.all)
    if found.problems:
        raise ConfigError("; ".join(found.problems))
    os.environ.update(found.environment)
    return found.values, found.notes


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
    if owner == block or name in names.stock:
        return None
    if owner is not None:
        return f"the key {name} stands in the block {block}; it belongs to {owner}"
    of_block = [key for key in names.all if names.block_of(key) == block]
    hint = nearest(name, of_block) or nearest(name, [*names.all, *names.stock])
    return f"unknown key {name} in the block {block}{hint}"


def _read_yaml(path: Path, parser: _Parser, names: _Names) -> tuple[dict[str, Any], list[str]]:
    try:
        blocks = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}; expected a readable YAML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {path}: not UTF-8 at byte {error.start}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}: not valid YAML: {error}") from None
    if blocks is None:
        return {}, []
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
        return _in_our_words(_parse_flat(parser, names, arguments), names)
    except ConfigError as error:
        raise ConfigError(f"--config {path}: {error}") from None


def _read_json(path: Path) -> list[str]:
    """The arguments of a JSON file of flat names, which the example scripts take instead of flags."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; expected a JSON file of flags and values") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected one object with flags as its keys")
    return [word for name, value in values.items() for word in _as_arguments(name, value)]


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
    if len(argv) == 1 and argv[0].endswith(".json"):
        argv = _read_json(Path(argv[0]))
    flags = _parse_flat(parser, names, argv)
    config_file = flags.pop("config", None)
    named, notes = _read_yaml(Path(config_file), parser, names) if config_file else ({}, [])
    flags, more = _in_our_words(flags, names)
    return _settled({**named, **flags}, defaults, names, [*notes, *more])


def _settled(
    named: Mapping[str, Any], defaults: Mapping[str, Any], names: _Names, notes: list[str]
) -> RunConfig:
    """The config of what the user named, in our words, over the recipe's defaults.

    Raises:
        ConfigError: For settings that exclude each other, or that are wrong by themselves.
    """
    if problems := conflicts(named):
        raise ConfigError("; ".join(problems))
    values, more = settle(named, defaults, from_stock=bool(notes))
    config = _config_from_values(names, values)
    return dataclasses.replace(config, notes=(*notes, *more))


def make_config(task: Any, defaults: Mapping[str, Any], **settings: Any) -> RunConfig:
    """A RunConfig from Python: `make_config(TextClassification, DEFAULTS, max_steps=50, preset="zero2")`.

    Args:
        task: The task; its `settings_class` has the flags of its own (None: only the common ones).
        defaults: The recipe's own defaults, by flat name.
        **settings: What the user set, by flat name.

    Raises:
        ConfigError: As `parse` does.
    """
    names = _Names(None if task is None else task.settings_class)
    named, notes = _in_our_words(settings, names)
    return _settled(named, defaults, names, notes)
