"""The mean loss of a micro-batch against textbook formulas (`toy.item_losses`), and what the probe finds."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch

from hf_dist.errors import ConfigError
from hf_dist.tasks.items import ExampleItems, SpanItems, TokenItems
from hf_dist.training.steps.loss import (
    LossMode,
    Probe,
    Reshaping,
    StepLoss,
    count_items,
    count_or_zero,
    items_per_row,
    sum_over_items,
    without_padding,
)
from tests.training import toy

ENCODER_DECODER = {"seq2seq"}


def batch_of(kind: str, count: int = 6, seed: int = 1) -> dict[str, torch.Tensor]:
    return toy.ToyTask(kind).collate(toy.examples(kind, count, seed=seed))


def probed(
    kind: str, net: torch.nn.Module, reshaping: Reshaping | None = None, *, takes_count: bool = True
) -> StepLoss:
    step_loss = StepLoss(toy.ITEMS[kind], reshaping or Reshaping())
    collate = toy.ToyTask(kind).collate
    row = next(
        without_padding(batch)
        for batch in (collate([example]) for example in toy.examples(kind, 9, seed=5))
        if count_items(toy.ITEMS[kind], batch)
    )
    step_loss.found = step_loss.probe(net, row, takes_count=takes_count)
    return step_loss


@pytest.mark.parametrize("kind", toy.KINDS)
def test_items_are_those_of_the_formula(kind: str) -> None:
    batch = batch_of(kind)
    outputs = toy.model(kind)(**batch)
    assert count_items(toy.ITEMS[kind], batch) == len(toy.item_losses(kind, outputs, batch))


@pytest.mark.parametrize("kind", toy.KINDS)
def test_the_sum_is_that_of_the_formula(kind: str) -> None:
    batch = batch_of(kind)
    outputs = toy.model(kind)(**batch)
    expected = toy.item_losses(kind, outputs, batch).sum()
    assert sum_over_items(toy.ITEMS[kind], outputs, batch).item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("kind", toy.KINDS)
@pytest.mark.parametrize("with_probe", [False, True])
def test_loss_and_gradient_are_those_of_the_formula(kind: str, with_probe: bool) -> None:
    net = toy.model(kind)
    step_loss = probed(kind, net) if with_probe else StepLoss(toy.ITEMS[kind])
    rows = toy.examples(kind, 6, seed=1)
    expected, gradient = toy.reference(kind, net, rows)
    batch = batch_of(kind)
    items = count_items(toy.ITEMS[kind], batch)
    loss, _ = step_loss.mean(net, batch, items, keep_labels=kind in ENCODER_DECODER)
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert toy.relative_error(toy.flat_gradient(net), gradient) < 1e-5


def test_a_span_head_that_counts_otherwise_obeys_the_rule() -> None:
    net = toy.model("qa", architecture="llama")
    expected, gradient = toy.reference("qa", net, toy.examples("qa", 6, seed=1))
    loss, _ = probed("qa", net).mean(net, batch_of("qa"), 12, keep_labels=False)
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert toy.relative_error(toy.flat_gradient(net), gradient) < 1e-5


@pytest.mark.parametrize("kind", ["single", "tagging", "mlm", "clm", "seq2seq"])
@pytest.mark.parametrize("with_probe", [False, True])
def test_label_smoothing_and_class_weights(kind: str, with_probe: bool) -> None:
    net = toy.model(kind)
    classes = toy.CLASSES if kind in ("single", "tagging") else toy.VOCABULARY
    weights = tuple(float(w) for w in torch.linspace(0.2, 2.0, classes))
    rows, batch = toy.examples(kind, 6, seed=1), batch_of(kind)
    items = count_items(toy.ITEMS[kind], batch)
    for reshaping, shape in (
        (Reshaping(label_smoothing=0.1), {"smoothing": 0.1}),
        (Reshaping(class_weights=weights), {"weights": None}),
    ):
        net.zero_grad()
        step_loss = probed(kind, net, reshaping) if with_probe else StepLoss(toy.ITEMS[kind], reshaping)
        loss, _ = step_loss.mean(net, batch, items, keep_labels=kind in ENCODER_DECODER)
        loss.backward()
        if "weights" in shape:
            outputs = net(**batch)
            labels = batch["labels"][:, 1:] if kind == "clm" else batch["labels"]
            counted = labels[labels != -100]
            factors = torch.tensor(weights)[counted]
            expected = (toy.item_losses(kind, outputs, batch) * factors).sum().item() / items
            assert loss.item() == pytest.approx(expected, rel=1e-5)
        else:
            expected, gradient = toy.reference(kind, net, rows, **shape)
            # The formula's reference logs the mean over items; smoothing is part of each item's loss.
            assert loss.item() == pytest.approx(expected, rel=1e-5)
            assert toy.relative_error(toy.flat_gradient(net), gradient) < 1e-5


@pytest.mark.parametrize("kind", toy.KINDS)
def test_no_items_give_zero_loss_and_zero_gradient_on_every_parameter(kind: str) -> None:
    net = toy.model(kind)
    modes = [probed(kind, net).found, Probe(LossMode.OURS, extras=False)]
    if kind not in ("clm",):
        modes.append(Probe(LossMode.OWN_MEAN, extras=True))
    batch = batch_of(kind)
    for name in ("start_positions", "end_positions"):
        if name in batch:
            batch[name][:] = -100
    if kind not in ("multi", "regression", "qa"):
        batch["labels"][:] = -100
    for found in modes:
        net.zero_grad()
        step_loss = StepLoss(toy.ITEMS[kind])
        step_loss.found = found
        if kind not in ("multi", "regression"):
            assert count_items(toy.ITEMS[kind], batch) == 0
        loss, _ = step_loss.mean(net, batch, 0, keep_labels=kind in ENCODER_DECODER)
        (loss * 0).backward()
        assert torch.isfinite(loss)
        gradient = toy.flat_gradient(net)
        assert torch.equal(gradient, torch.zeros_like(gradient))
        if kind not in ("multi", "regression"):
            assert loss.item() == 0


def test_padding_takes_no_part_in_the_loss_of_spans() -> None:
    net = toy.model("qa")
    rows = toy.examples("qa", 4, seed=2)
    collate = toy.ToyTask("qa").collate
    step_loss = StepLoss(SpanItems())
    together, _ = step_loss.mean(net, collate(rows), 8, keep_labels=False)
    alone = [step_loss.mean(net, collate([row]), 2, keep_labels=False)[0].item() for row in rows]
    assert together.item() == pytest.approx(sum(alone) / 4, rel=1e-5)


def test_spans_outside_the_row_count_nowhere() -> None:
    batch = batch_of("qa", 3)
    batch["start_positions"][0] = -1
    batch["end_positions"][1] = batch["input_ids"].shape[1]
    assert count_items(SpanItems(), batch) == 4


def test_labels_absent_count_zero() -> None:
    batch = batch_of("single")
    del batch["labels"]
    assert count_or_zero(ExampleItems(), batch) == 0


def test_items_per_row() -> None:
    assert items_per_row(ExampleItems("multi_label")) == 1
    assert items_per_row(SpanItems()) == 2
    assert items_per_row(TokenItems()) is None


EXPECTED_MODES = [
    ("single", None, LossMode.OURS, False),
    ("multi", None, LossMode.OURS, False),
    ("regression", None, LossMode.OURS, False),
    ("tagging", None, LossMode.OURS, False),
    ("mlm", None, LossMode.OURS, False),
    ("qa", None, LossMode.OURS, False),
    # Its loss halves with the count, but counts rows where we count ends of spans.
    ("qa", "llama", LossMode.OURS, False),
    ("seq2seq", None, LossMode.OURS, False),
    ("seq2seq", "t5", LossMode.OURS, False),
    ("clm", None, LossMode.COUNTED, False),
    ("clm", "mixtral", LossMode.COUNTED, True),
]


@pytest.mark.parametrize("kind, architecture, mode, extras", EXPECTED_MODES)
def test_the_probe_finds_whose_loss_it_is(
    kind: str, architecture: str | None, mode: LossMode, extras: bool
) -> None:
    """Transformers 5.24: a head that moves from OURS to COUNTED was mended upstream (issue 47688)."""
    assert probed(kind, toy.model(kind, architecture=architecture)).found == Probe(mode, extras)


def test_a_model_that_takes_no_count_keeps_its_own_mean_where_it_has_extra_terms() -> None:
    step_loss = probed("clm", toy.model("clm", architecture="mixtral"), takes_count=False)
    assert step_loss.found == Probe(LossMode.OWN_MEAN, extras=True)


def test_the_probe_leaves_the_model_and_the_random_state_as_they_were() -> None:
    net = toy.model("single").train()
    before = torch.random.get_rng_state()
    probed("single", net)
    assert net.training
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("takes_count", [True, False])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_extra_terms_count_once_a_step(takes_count: bool, smoothing: float) -> None:
    """Two equal micro-batches are the step of one of them: same items' mean, same router loss."""
    net = toy.model("clm", architecture="mixtral")
    batch = batch_of("clm")
    items = count_items(TokenItems(shift=True), batch)
    outputs = net(**batch)
    losses = toy.item_losses("clm", outputs, batch, smoothing=smoothing)
    expected = losses.mean() + 0.2 * outputs.aux_loss
    step_loss = probed("clm", net, Reshaping(label_smoothing=smoothing), takes_count=takes_count)
    step = sum(
        step_loss.mean(net, batch, items, keep_labels=False)[0] * (items / (2 * items)) for _ in range(2)
    )
    assert step.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("kind", ["single", "clm"])
def test_peft_wrapped_models_obey_the_same_rule(kind: str) -> None:
    task_type = peft.TaskType.SEQ_CLS if kind == "single" else peft.TaskType.CAUSAL_LM
    config = peft.LoraConfig(task_type=task_type, r=2, lora_dropout=0.0, init_lora_weights=False)
    net = peft.get_peft_model(toy.model(kind), config)
    step_loss = probed(kind, net)
    assert step_loss.found is not None
    assert step_loss.found.mode is (LossMode.OURS if kind == "single" else LossMode.COUNTED)
    rows, batch = toy.examples(kind, 6, seed=1), batch_of(kind)
    expected, gradient = toy.reference(kind, net, rows)
    loss, _ = step_loss.mean(net, batch, count_items(toy.ITEMS[kind], batch), keep_labels=False)
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert toy.relative_error(toy.flat_gradient(net), gradient) < 1e-5


@pytest.mark.parametrize("kind", ["multi", "regression", "qa"])
@pytest.mark.parametrize("reshaping", [Reshaping(label_smoothing=0.1), Reshaping(class_weights=(1.0, 2.0))])
def test_smoothing_and_weights_need_classes(kind: str, reshaping: Reshaping) -> None:
    with pytest.raises(ConfigError, match="no cross entropy over classes"):
        StepLoss(toy.ITEMS[kind], reshaping)


def test_class_weights_need_one_a_class() -> None:
    step_loss = StepLoss(ExampleItems(), Reshaping(class_weights=(1.0, 2.0)))
    with pytest.raises(ConfigError, match="2 class weights for 5 classes"):
        step_loss.mean(toy.model("single"), batch_of("single"), 6, keep_labels=False)


def test_padding_is_cut_from_the_probed_row_on_either_side() -> None:
    ids = torch.tensor([[0, 0, 7, 8]])
    row: dict[str, Any] = {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.tensor([1])}
    assert without_padding(row)["input_ids"].tolist() == [[7, 8]]
    assert without_padding(row)["labels"].tolist() == [1]
