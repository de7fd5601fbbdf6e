"""torch.compile with batches of many shapes: one graph for all of them, and a count that shows it."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from torch._dynamo.utils import counters
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

logger = logging.getLogger("hf_dist")


def compiles(arguments: Mapping[str, Any]) -> bool:
    """Whether these TrainingArguments compile the model."""
    names = ("torch_compile", "torch_compile_backend", "torch_compile_mode")
    return any(arguments.get(name) for name in names)


def prepare_compilation() -> None:
    """Lets sizes be symbols from the first batch on, unless the user's environment says otherwise.

    Bucketed batches have other rows and lengths each time; with fixed sizes each of them compiles anew until
    torch gives up (its recompile limit is 8). accelerate reads the variable (1.15, TorchDynamoPlugin);
    TrainingArguments have no field for it.
    """
    os.environ.setdefault("ACCELERATE_DYNAMO_USE_DYNAMIC", "true")


def compiled_graphs() -> int:
    """Graphs that torch compiled in this process so far."""
    return int(counters["stats"].get("unique_graphs", 0))


class CountGraphs(TrainerCallback):
    """Says each time the number of compiled graphs has grown."""

    def __init__(self) -> None:
        self._known = 0

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Looks after every step."""
        graphs = compiled_graphs()
        if graphs > self._known:
            logger.info("step %d: %d graphs compiled so far", state.global_step, graphs)
            self._known = graphs
