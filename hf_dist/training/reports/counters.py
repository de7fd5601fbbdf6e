"""Token counts of a run: throughput, padding and how evenly the ranks were loaded."""

from __future__ import annotations

import torch
from torch import Tensor


class TokenCounters:
    """Counts tokens since training began.

    Attributes:
        rank_computed_tokens: Computed tokens of this rank.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Starts from zero; what holds this object (a progress bar) keeps it."""
        self.rank_computed_tokens = 0
        self._totals: Tensor | None = None
        self._read: tuple[int, int] | None = None

    def add(self, totals: Tensor, rank_computed_tokens: int) -> None:
        """Adds a step.

        Args:
            totals: Real and computed tokens of the step over all data-parallel ranks, int64 of shape
                (2,). It stays on its device, so that counting waits for nothing.
            rank_computed_tokens: Computed tokens of this rank.
        """
        self._totals = totals.clone() if self._totals is None else self._totals + totals
        self._read = None
        self.rank_computed_tokens += rank_computed_tokens

    def _on_host(self) -> tuple[int, int]:
        """Both totals, for which the host waits once however often they are asked for."""
        if self._totals is None:
            return 0, 0
        if self._read is None:
            real, computed = self._totals.tolist()
            self._read = real, computed
        return self._read

    @property
    def real_tokens(self) -> int:
        """Tokens trained so far on all ranks, without padding and empty micro-batches."""
        return self._on_host()[0]

    @property
    def computed_tokens(self) -> int:
        """Tokens computed so far on all ranks, with padding and empty micro-batches."""
        return self._on_host()[1]

    def metrics(self, computed_by_rank: Tensor, seconds: float) -> dict[str, float]:
        """The counts as metrics.

        Args:
            computed_by_rank: Computed tokens of every data-parallel rank, shape (ranks,).
            seconds: Wall time of the training.

        Returns:
            `train_tokens_per_second` (real tokens), `padding_efficiency` (real / computed) and
            `rank_imbalance` (the busiest rank's computed tokens / the mean).
        """
        if self.computed_tokens == 0:
            return {}
        by_rank = computed_by_rank.to(torch.float64)
        return {
            "train_tokens_per_second": self.real_tokens / max(seconds, 1e-9),
            "padding_efficiency": self.real_tokens / self.computed_tokens,
            "rank_imbalance": float(by_rank.max() / by_rank.mean()),
        }
