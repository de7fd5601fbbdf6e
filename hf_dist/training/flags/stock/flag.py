"""One flag of transformers' example scripts, and what it means here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Stock:
    """One flag of theirs. What of it applies first is what happens.

    Attributes:
        name: Theirs.
        kind: Type of its value.
        harmless: Values that change nothing here; `note` says why. None: every value, if `note` is all
            there is.
        note: What is said of a harmless value.
        ours: Our flag of the same meaning: the first of these that the recipe has.
        value: Its value, from theirs.
        sets: Several settings of ours, from their value.
        environment: Variable of the environment that takes it; for secrets, which no file may show.
        refused: Why it can't be followed, and what to do instead.
        needs: A flag that the recipe must have; others don't know this one.
    """

    name: str
    kind: type = str
    harmless: tuple[Any, ...] | None = None
    note: str = ""
    ours: tuple[str, ...] = ()
    value: Callable[[Any], Any] = lambda value: value
    sets: Callable[[Any], dict[str, Any]] | None = None
    environment: str | None = None
    refused: str = ""
    needs: str | None = None


ORDER = "rows of like length stand together in every batch as it is, in an order that --seed draws"
"""Said of flags that sort or shuffle."""
