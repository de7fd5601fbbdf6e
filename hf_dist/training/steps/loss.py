"""The loss of an optimizer step: (sum over items) / (items), however the step is split.

A micro-batch gives the mean over its own items; the Trainer weighs that mean with its share of the step's
items. Written so, the rule holds for every kind of loss: for our own sum over the logits, for a model
whose loss divides by the count it is given (it gets the micro-batch's own count), and for a model that
adds terms of its own, such as a router loss, which then count once a step and not once a micro-batch.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_dist.data.collate import IGNORED
from hf_dist.data.device import to_device
from hf_dist.errors import ConfigError
from hf_dist.tasks.items import ExampleItems, Items, SpanItems, TokenItems

Batch = Mapping[str, Any]


def label_names(items: Items) -> tuple[str, ...]:
    """The batch's keys that hold labels."""
    return ("start_positions", "end_positions") if isinstance(items, SpanItems) else ("labels",)


def has_labels(items: Items, batch: Batch) -> bool:
    """Whether the batch holds everything the loss needs."""
    return all(batch.get(name) is not None for name in label_names(items))


def count_or_zero(items: Items, batch: Batch) -> int:
    """`count_items`, or 0 where the batch has no labels."""
    return count_items(items, batch) if has_labels(items, batch) else 0


def items_per_row(items: Items) -> int | None:
    """Items that each row of a data set holds, or None where rows hold different numbers."""
    if isinstance(items, ExampleItems):
        return 1
    return 2 if isinstance(items, SpanItems) else None


def _span_labels(batch: Batch) -> Tensor:
    """Start and end positions, shape (2, rows); outside the padded row they become IGNORED."""
    length = batch["input_ids"].shape[1]
    ends = torch.stack([batch[name].reshape(-1) for name in label_names(SpanItems())])
    return ends.masked_fill((ends < 0) | (ends >= length), IGNORED)


def count_items(items: Items, batch: Batch) -> int:
    """Number of items in a collated batch.

    Args:
        items: The kind of items.
        batch: With `labels` of shape (rows,), (rows, classes) or (rows, tokens), or with
            `start_positions` and `end_positions` of shape (rows,) and `input_ids`.
    """
    if isinstance(items, SpanItems):
        return int((_span_labels(batch) != IGNORED).sum())
    labels = batch["labels"]
    if isinstance(items, TokenItems):
        if items.shift:
            labels = labels[:, 1:]
        return int((labels != IGNORED).sum())
    if items.problem == "single_label":
        return int((labels != IGNORED).sum())
    return labels.shape[0]


@dataclass(frozen=True, kw_only=True)
class Reshaping:
    """What a user may change about the loss of one item.

    Attributes:
        label_smoothing: Probability mass spread evenly over all classes, as in Szegedy et al. 2016
            (arXiv 1512.00567), equation in section 7.
        class_weights: Factor of an item by its class. The step's sum is divided by the number of
            items, not by the sum of their weights.
    """

    label_smoothing: float = 0.0
    class_weights: tuple[float, ...] | None = None

    def __bool__(self) -> bool:
        return self.label_smoothing != 0 or self.class_weights is not None

    def check(self, items: Items) -> None:
        """Refuses what has no meaning for these items.

        Raises:
            ConfigError: For smoothing or weights where the loss is no cross entropy over classes.
        """
        named = [
            name
            for name, value in (
                ("label_smoothing_factor", self.label_smoothing),
                ("class weights", self.class_weights),
            )
            if value
        ]
        classes = isinstance(items, TokenItems) or (
            isinstance(items, ExampleItems) and items.problem == "single_label"
        )
        if named and not classes:
            # Over span positions it would spread mass over a number of classes that padding decides.
            raise ConfigError(
                f"{' and '.join(named)} given for a loss that is no cross entropy over classes "
                f"({items}); drop it"
            )


_PLAIN = Reshaping()


def _cross_entropy_sum(logits: Tensor, labels: Tensor, reshaping: Reshaping) -> Tensor:
    logits = logits.float()
    weights = reshaping.class_weights
    if weights is not None and len(weights) != logits.shape[-1]:
        raise ConfigError(
            f"{len(weights)} class weights for {logits.shape[-1]} classes; give one weight a class"
        )
    return functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        labels.reshape(-1),
        reduction="sum",
        ignore_index=IGNORED,
        label_smoothing=reshaping.label_smoothing,
        weight=None if weights is None else to_device(torch.tensor(weights), logits.device),
    )


def _span_sum(outputs: Any, batch: Batch) -> Tensor:
    # A softmax over positions depends on the padding unless padded positions are taken out of it.
    both = torch.stack([outputs["start_logits"].float(), outputs["end_logits"].float()])
    mask = batch.get("attention_mask")
    if mask is not None and mask.shape == both.shape[1:]:
        both = both.masked_fill(mask[None] == 0, torch.finfo(both.dtype).min)
    return _cross_entropy_sum(both, _span_labels(batch), _PLAIN)


def _example_sum(logits: Tensor, labels: Tensor, items: ExampleItems, reshaping: Reshaping) -> Tensor:
    if items.problem == "single_label":
        return _cross_entropy_sum(logits, labels, reshaping)
    logits = logits.float().reshape(labels.shape[0], -1)
    targets = labels.reshape(labels.shape[0], -1).to(logits.dtype)
    if items.problem == "regression":
        losses = functional.mse_loss(logits, targets, reduction="none")
    else:
        losses = functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return losses.mean(dim=1).sum()


def sum_over_items(items: Items, outputs: Any, batch: Batch, reshaping: Reshaping = _PLAIN) -> Tensor:
    """Sum of the losses of a batch's items, in float32.

    Args:
        items: The kind of items.
        outputs: The model's outputs, with `logits` (or `start_logits` and `end_logits`).
        batch: The batch that gave them, with labels.
        reshaping: Label smoothing and class weights.
    """
    if isinstance(items, SpanItems):
        return _span_sum(outputs, batch)
    logits, labels = outputs["logits"], batch["labels"]
    if isinstance(items, ExampleItems):
        return _example_sum(logits, labels, items, reshaping)
    if items.shift:
        # The last position predicts nothing. Shifting the labels copies less than slicing the logits.
        labels = functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
    return _cross_entropy_sum(logits, labels, reshaping)


class LossMode(enum.Enum):
    """Whose loss is used, as the probe found."""

    OURS = "the sum over the logits, divided by the items"
    COUNTED = "the model's own loss, which divides by the count it is given"
    OWN_MEAN = "the model's own mean, weighed by items"


@dataclass(frozen=True)
class Probe:
    """What `StepLoss.probe` found out about a model.

    Attributes:
        mode: Whose loss is used.
        extras: Whether the model's loss has terms that are no sum over items.
    """

    mode: LossMode
    extras: bool


class StepLoss:
    """Computes the mean loss over a micro-batch's items.

    Args:
        items: The kind of items.
        reshaping: Label smoothing and class weights.

    Raises:
        ConfigError: If smoothing or weights have no meaning for these items.
    """

    def __init__(self, items: Items, reshaping: Reshaping = _PLAIN) -> None:
        reshaping.check(items)
        self.items = items
        self.reshaping = reshaping
        self.found: Probe | None = None

    def mean(self, model: nn.Module, batch: Batch, items: int, *, keep_labels: bool) -> tuple[Tensor, Any]:
        """Runs the model.

        Args:
            model: The model, wrapped or not.
            batch: What the model takes, labels included.
            items: What `count_items` says of the batch; 0 gives a loss of zero with a gradient of zeros.
            keep_labels: Give the model its labels although its loss isn't used: an encoder-decoder makes
                its decoder's input of them.

        Returns:
            The mean loss over the items (a scalar in float32), and the model's outputs.
        """
        found = self.found or Probe(LossMode.OURS, extras=False)
        if found.mode is LossMode.COUNTED:
            # A tensor, as the Trainer gives it: a compiled model would be built anew for every number.
            # Filled on the device: a copy from the host would wait for it.
            count = torch.full((), max(items, 1), device=batch[label_names(self.items)[0]].device)
            outputs = model(**batch, num_items_in_batch=count)
        elif found.mode is LossMode.OWN_MEAN or keep_labels:
            outputs = model(**batch)
        else:
            names = label_names(self.items)
            outputs = model(**{name: value for name, value in batch.items() if name not in names})

        if found.mode is LossMode.OURS:
            return sum_over_items(self.items, outputs, batch, self.reshaping) / max(items, 1), outputs
        if items == 0:
            # A mean over no items is NaN, and NaN x 0 still is; this keeps every parameter in the graph.
            return sum_over_items(self.items, outputs, batch) * 0.0, outputs
        loss = outputs["loss"].float()
        if self.reshaping:
            reshaped = sum_over_items(self.items, outputs, batch, self.reshaping)
            if found.extras:
                reshaped = reshaped + (loss * items - sum_over_items(self.items, outputs, batch))
            loss = reshaped / items
        return loss, outputs

    @torch.no_grad()
    def probe(self, model: nn.Module, row: Batch, *, takes_count: bool) -> Probe:
        """Finds out what the model's own loss is, by running it on a tiny batch.

        The model is given a row twice over, a count, and twice that count. Under ZeRO-3 all ranks must
        probe together, with the same row.

        Args:
            model: The model, once its engine is up.
            row: One collated row with at least one item and without padding.
            takes_count: Whether the model's forward accepts `num_items_in_batch`.
        """
        batch = {name: torch.cat([value, value]) for name, value in row.items()}
        count = count_items(self.items, batch)
        was_training = model.training
        model.eval()
        try:
            mean = model(**batch)
            counted = [
                model(**batch, num_items_in_batch=torch.tensor(factor * count))["loss"].float().item()
                for factor in ((1, 2) if takes_count else ())
            ]
        finally:
            model.train(was_training)
        own = mean["loss"].float().item()
        logits = mean["start_logits"] if isinstance(self.items, SpanItems) else mean.get("logits")
        exact = logits is None or all(p.dtype == torch.float32 for p in model.parameters())
        tolerance = (1e-5 if exact else 1e-2) * max(abs(own), 1e-3)
        # Terms that a model reports by name are believed: their coefficient may drown in bfloat16.
        named = mean.get("aux_loss") is not None
        # A loss divided by the count halves; a twentieth is far from that and from kernels' noise. It is
        # ours to keep only if it counts what we count: a span head may count rows where we count ends.
        halves = bool(counted) and abs(counted[0] - counted[1]) > 0.05 * abs(own)
        if halves and abs(counted[0] - own) <= max(tolerance, 1e-3 * abs(own)):
            extra = 2 * counted[1] - counted[0]
            return Probe(LossMode.COUNTED, extras=named or abs(extra) > tolerance)
        try:
            ours = (sum_over_items(self.items, mean, batch) / count).item()
        except (ValueError, RuntimeError, KeyError, IndexError, TypeError):
            # The logits don't fit the labels (virtual tokens of prompt tuning, a beam of spans).
            return Probe(LossMode.OWN_MEAN, extras=True)
        if named or abs(own - ours) > tolerance:
            return Probe(LossMode.OWN_MEAN, extras=True)
        return Probe(LossMode.OURS, extras=False)


def without_padding(row: Batch) -> dict[str, Tensor]:
    """A collated single row without its padded positions (padding may take part in a model's loss)."""
    mask = row.get("attention_mask")
    if mask is None or mask.dim() != 2:
        return dict(row)
    real = mask[0].bool()
    return {
        name: value[:, real] if value.dim() >= 2 and value.shape[1] == real.shape[0] else value
        for name, value in row.items()
    }


def class_weight_tuple(weights: Sequence[float] | None) -> tuple[float, ...] | None:
    """Class weights as `Reshaping` keeps them."""
    return None if weights is None else tuple(float(weight) for weight in weights)
