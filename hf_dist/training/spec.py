"""What the Trainer needs to know about a task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from hf_dist.tasks.items import Items


class TaskSpec(Protocol):
    """A task, as far as training and evaluation are concerned."""

    @property
    def items(self) -> Items:
        """The things that the loss sums over."""
        ...

    @property
    def best_metric(self) -> str:
        """Name of the score that says which checkpoint is best (without `eval_`)."""
        ...

    def collate(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """Pads examples into a batch that the model takes, labels included where the examples have them."""
        ...

    def predict(self, outputs: Any, batch: Mapping[str, Any]) -> list[Any]:
        """One small picklable object for each row of the batch (a class number, a list of tags)."""
        ...

    def score(self, predictions: list[Any], dataset: Any) -> dict[str, float]:
        """Scores of the predictions, which stand in the order of the data set's rows."""
        ...
