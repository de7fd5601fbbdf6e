"""What a step holds: a number of tokens, or a number of examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hf_dist.errors import ConfigError

TooLong = Literal["error", "alone", "drop"]


def _check(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name} is {value}; it must be at least 1")
    policy = getattr(owner, "too_long", "error")
    if policy not in ("error", "alone", "drop"):
        raise ConfigError(f"--too_long is {policy!r}; expected error, alone or drop")


@dataclass(frozen=True, kw_only=True)
class TokenBatching:
    """A step holds about `tokens_per_step` computed tokens, in a fixed number of micro-batches.

    Attributes:
        max_tokens_per_device: hard cap on the computed tokens of a micro-batch (rows x longest row).
        tokens_per_step: computed tokens of an optimizer step over all devices. The step has
            `micro_batches_per_step = max(1, round(tokens_per_step / max_tokens_per_device))` micro-batches,
            and these are filled less than the cap allows where the step would hold more than asked.
        pad_to_multiple_of: rows are padded to a multiple of this many tokens.
        window: rows that are sorted by length together; None chooses from the lengths and the budget.
        too_long: what happens to a row that exceeds the cap alone.
    """

    max_tokens_per_device: int
    tokens_per_step: int
    pad_to_multiple_of: int = 1
    window: int | None = None
    too_long: TooLong = "error"

    def __post_init__(self) -> None:
        _check(self, "max_tokens_per_device", "tokens_per_step", "pad_to_multiple_of", "window")

    @property
    def micro_batches_per_step(self) -> int:
        """Micro-batches of every step but perhaps the last."""
        return max(1, round(self.tokens_per_step / self.max_tokens_per_device))

    @property
    def tokens_per_micro_batch(self) -> int:
        """Computed tokens that a micro-batch is filled up to: the cap, or the step's share if less."""
        return min(self.max_tokens_per_device, max(1, self.tokens_per_step // self.micro_batches_per_step))


@dataclass(frozen=True, kw_only=True)
class ExampleBatching:
    """A step holds exactly `examples_per_step` rows; the last step of an epoch may hold fewer.

    Attributes:
        examples_per_step: rows of an optimizer step over all devices.
        max_tokens_per_device: hard cap on the computed tokens of a micro-batch; None for none.
        pad_to_multiple_of: rows are padded to a multiple of this many tokens.
        window: rows that the steps of a stretch of the epoch share out evenly by length (a multiple of
            `examples_per_step` is used); None takes the whole epoch.
        too_long: what happens to a row that exceeds the cap alone.
    """

    examples_per_step: int
    max_tokens_per_device: int | None
    pad_to_multiple_of: int = 1
    window: int | None = None
    too_long: TooLong = "error"

    def __post_init__(self) -> None:
        _check(self, "examples_per_step", "max_tokens_per_device", "pad_to_multiple_of", "window")


Batching = TokenBatching | ExampleBatching
