"""What a task's loss sums over: the one thing about a task that exact normalisation must know.

The items of an optimizer step (examples, target tokens or spans) are the denominator of its loss. They
live below both tasks and training so that a task can say what it counts without importing a Trainer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Problem: TypeAlias = Literal["single_label", "multi_label", "regression"]


@dataclass(frozen=True)
class ExampleItems:
    """One item an example: the model gives one row of logits for each row of the batch.

    Attributes:
        problem: which loss compares logits (rows, classes) and labels: cross entropy with labels (rows,),
            binary cross entropy with labels (rows, classes), or squared error with labels (rows,) or
            (rows, targets).
    """

    problem: Problem = "single_label"


@dataclass(frozen=True)
class TokenItems:
    """One item for every target token, that is every label that is not -100.

    Attributes:
        shift: the logits at position t predict the label at t + 1 (causal language models); without it
            logits and labels stand at the same position (tagging, masked LM, encoder-decoder).
    """

    shift: bool = False


@dataclass(frozen=True)
class SpanItems:
    """Two items an example: the start and the end of a span (extractive question answering)."""


Items: TypeAlias = ExampleItems | TokenItems | SpanItems
