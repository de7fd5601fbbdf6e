"""Scores: `evaluate.Metric` modules that load by path, without a network or remote code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import evaluate


def load_metric(name: str) -> evaluate.EvaluationModule:
    """Loads `hf_dist/metrics/<name>.py` as an `evaluate` module, from its file."""
    # Here, and not when a recipe starts: it brings scipy.stats, requests and transformers' pipelines along.
    import evaluate

    # In memory: the default writes predictions to a shared cache file, which ranks would fight over.
    return evaluate.load(str(Path(__file__).with_name(f"{name}.py")), keep_in_memory=True)
