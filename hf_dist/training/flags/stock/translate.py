"""Flags of transformers' example scripts, as settings of ours; each use is named in a line of the log."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_dist.training.flags.stock.arguments import ARGUMENTS
from hf_dist.training.flags.stock.flag import Stock
from hf_dist.training.flags.stock.scripts import DATA, MODEL

STOCK: tuple[Stock, ...] = (*MODEL, *DATA, *ARGUMENTS)


@dataclass(kw_only=True)
class Translation:
    """What was said with stock flags, in our words.

    Attributes:
        values: Settings by our flat names.
        notes: One line for each stock flag.
        problems: One line for each that can't be followed.
        environment: Variables of the environment that are to be set; they are in none of the others.
    """

    values: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)


def stock_flags(known: Container[str]) -> dict[str, Stock]:
    """The stock flags of a recipe by their names; `known` are its own flags and TrainingArguments'."""
    return {one.name: one for one in STOCK if one.needs is None or one.needs in known}


def translate(given: Mapping[str, Any], known: Container[str]) -> Translation:
    """Puts our settings in the place of stock flags.

    Args:
        given: What one source (the command line, a YAML file, a call from Python) names, by flat names.
        known: The flags of the recipe and the fields of TrainingArguments.
    """
    stock = stock_flags(known)
    found = Translation(values={name: value for name, value in given.items() if name not in stock})
    said = {name: f"--{name} {value}" for name, value in found.values.items()}
    for name, value in given.items():
        if name not in stock or value is None:
            continue
        shown = _shown(name, value)
        one = stock[name]
        if _is_harmless(one, value):
            found.notes.append(f"{shown} has no effect here: {one.note}")
        elif one.environment is not None:
            found.environment[one.environment] = str(value)
            found.notes.append(f"{shown} is the environment's {one.environment} here; no file shows it")
        elif one.sets is None and not one.ours:
            found.problems.append(f"{shown} can't be set: {one.refused}")
        else:
            try:
                settings = _settings(one, value, known)
            except ValueError as error:
                found.problems.append(f"{shown}: {error}")
                continue
            ours = " ".join(_shown(*setting) for setting in settings.items())
            found.notes.append(f"{shown} is {ours} here")
            for setting, wanted in settings.items():
                if setting in found.values and found.values[setting] != wanted:
                    found.problems.append(
                        f"{shown} and {said[setting]} are the same setting (--{setting}) and differ; drop one"
                    )
                said.setdefault(setting, shown)
                found.values[setting] = wanted
    return found


def _is_harmless(one: Stock, value: Any) -> bool:
    if one.harmless is not None:
        return value in one.harmless
    return not (one.ours or one.sets or one.environment or one.refused)


def _settings(one: Stock, value: Any, known: Container[str]) -> dict[str, Any]:
    if one.sets is not None:
        return one.sets(value)
    ours = next(name for name in one.ours if name in known)
    return {ours: one.value(value)}


def _shown(name: str, value: Any) -> str:
    """A flag as it would be typed; what is secret is left out."""
    if value is True:
        return f"--{name}"
    if name.endswith("token") and isinstance(value, str) and "bos" not in name:
        return f"--{name} ..."
    words = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return f"--{name} {words}"
