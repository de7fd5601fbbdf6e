"""One process: gradients against plain torch, resume, the dump, the counters, the refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import Trainer

from hf_dist.batching.plan import Plan, TokenBatching
from hf_dist.errors import ConfigError, DataError, EngineError
from tests.training import runs, toy

# Rows of 16 as [step][accumulation index][rank]: uneven micro-batches.
SPLITS: dict[str, list[Any]] = {
    "1x1": [[[range(16)]]],
    "1x4": [[[range(3)], [range(3, 10)], [[10]], [range(11, 16)]]],
    "1x4 with an empty micro-batch": [[[range(3)], [range(3, 10)], [range(10, 16)], [[]]]],
}


def lengths_of(data: list[dict[str, Any]]) -> list[int]:
    return [len(row["input_ids"]) for row in data]


def real_plan(data: list[dict[str, Any]], *, tokens_per_step: int = 96, seed: int = 3) -> Plan:
    batching = TokenBatching(max_tokens_per_device=32, tokens_per_step=tokens_per_step)
    return Plan.build(lengths_of(data), batching, seed=seed)


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("kind", toy.KINDS)
@pytest.mark.parametrize("split", SPLITS)
def test_a_split_step_has_the_gradient_of_the_whole(kind: str, split: str, tmp_path: Path) -> None:
    data = toy.examples(kind, 16, seed=3)
    loss, gradient = toy.reference(kind, toy.model(kind), data)
    trainer = runs.trainer(kind, toy.ListedPlan(SPLITS[split], data), data, tmp_path)
    trainer.train()
    assert toy.relative_error(trainer.gradients[0], gradient) < 1e-5
    assert runs.logged(trainer, "loss") == [pytest.approx(loss, rel=1e-5)]
    assert runs.logged(trainer, "grad_norm") == [pytest.approx(float(gradient.norm()), rel=1e-5)]


def test_t5_gets_its_decoder_inputs_from_the_labels(tmp_path: Path) -> None:
    data = toy.examples("seq2seq", 16, seed=3)
    _, gradient = toy.reference("seq2seq", toy.model("seq2seq", architecture="t5"), data)
    plan = toy.ListedPlan(SPLITS["1x4"], data)
    trainer = runs.trainer("seq2seq", plan, data, tmp_path, architecture="t5")
    trainer.train()
    assert toy.relative_error(trainer.gradients[0], gradient) < 1e-5


@pytest.mark.parametrize("kind, shape", [("single", {"smoothing": 0.1}), ("clm", {"smoothing": 0.1})])
def test_label_smoothing_of_the_arguments(kind: str, shape: dict[str, float], tmp_path: Path) -> None:
    data = toy.examples(kind, 16, seed=3)
    loss, gradient = toy.reference(kind, toy.model(kind), data, **shape)
    plan = toy.ListedPlan(SPLITS["1x4"], data)
    trainer = runs.trainer(kind, plan, data, tmp_path, label_smoothing_factor=0.1)
    trainer.train()
    assert toy.relative_error(trainer.gradients[0], gradient) < 1e-5
    assert runs.logged(trainer, "loss") == [pytest.approx(loss, rel=1e-5)]


@pytest.mark.parametrize("kind, architecture", [("single", None), ("clm", None), ("clm", "mixtral")])
def test_bfloat16_finds_the_same_loss_and_nearly_the_same_gradient(
    kind: str, architecture: str | None, tmp_path: Path
) -> None:
    data = toy.examples(kind, 16, seed=3)
    gradients, found = [], []
    for bf16 in (False, True):
        plan = toy.ListedPlan(SPLITS["1x4"], data)
        trainer = runs.trainer(kind, plan, data, tmp_path, architecture=architecture, bf16=bf16)
        trainer.train()
        gradients.append(trainer.gradients[0])
        found.append(trainer.step_loss.found)
    assert found[0] == found[1]
    assert 0 < toy.relative_error(gradients[1], gradients[0]) < 0.05


def test_clipping_sees_the_true_norm(tmp_path: Path) -> None:
    data = toy.examples("qa", 16, seed=3)
    _, gradient = toy.reference("qa", toy.model("qa"), data)
    limit = float(gradient.norm()) / 3
    plan = toy.ListedPlan(SPLITS["1x4"], data)
    trainer = runs.trainer("qa", plan, data, tmp_path, max_grad_norm=limit)
    trainer.train()
    assert runs.logged(trainer, "grad_norm") == [pytest.approx(3 * limit, rel=1e-4)]
    assert float(trainer.gradients[0].norm()) == pytest.approx(limit, rel=1e-4)


def test_a_step_without_items_changes_nothing_and_makes_no_nan(tmp_path: Path) -> None:
    data = toy.examples("tagging", 4, seed=3)
    for row in data[:2]:
        row["labels"] = [-100] * len(row["input_ids"])
    plan = toy.ListedPlan([[[[0]], [[1]]], [[[2]], [[3]]]], data)
    trainer = runs.trainer("tagging", plan, data, tmp_path)
    trainer.train()
    assert float(trainer.gradients[0].norm()) == 0
    assert float(trainer.gradients[1].norm()) > 0
    losses = runs.logged(trainer, "loss")
    assert losses[0] == 0 and losses[1] > 0 and all(map(math.isfinite, losses))


def test_mean_normalization_gives_every_row_the_same_weight(tmp_path: Path) -> None:
    data = toy.examples("single", 16, seed=3)
    # Steps of 4 and 12 rows: both are divided by 8, and the log still shows each step's own mean.
    plan = toy.ListedPlan([[[range(4)], [[]]], [[range(4, 9)], [range(9, 16)]]], data)
    # A learning rate of 0 keeps the weights, so that both steps have a reference.
    own = {"loss_normalization": "mean"}
    trainer = runs.trainer("single", plan, data, tmp_path, own=own, learning_rate=0.0)
    trainer.train()
    for step, rows in enumerate((data[:4], data[4:])):
        loss, gradient = toy.reference("single", toy.model("single"), rows, divide_by=8)
        assert toy.relative_error(trainer.gradients[step], gradient) < 1e-5
        assert runs.logged(trainer, "loss")[step] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(
    "kind, normalization, expected",
    [("single", None, 1), ("single", "step", None), ("qa", None, 2), ("mlm", None, None)],
)
def test_token_budgets_divide_by_the_mean_where_rows_hold_equal_items(
    kind: str, normalization: Any, expected: int | None, tmp_path: Path
) -> None:
    data = toy.examples(kind, 30, seed=3)
    plan = real_plan(data)
    trainer = runs.trainer(kind, plan, data, tmp_path, own={"loss_normalization": normalization})
    mean = None if expected is None else expected * plan.mean_rows_per_step
    assert trainer._mean_items == mean


def test_mean_is_refused_where_rows_hold_different_numbers_of_items(tmp_path: Path) -> None:
    data = toy.examples("mlm", 30, seed=3)
    with pytest.raises(ConfigError, match="use step"):
        runs.trainer("mlm", real_plan(data), data, tmp_path, own={"loss_normalization": "mean"})


@pytest.mark.parametrize("workers", [0, 2])
def test_the_dump_holds_each_row_once_an_epoch_and_what_reached_the_model(
    workers: int, tmp_path: Path
) -> None:
    data = toy.examples("single", 41, seed=3)
    plan, dump = real_plan(data), tmp_path / "dumps" / "batches.jsonl"
    trainer = runs.trainer(
        "single", plan, data, tmp_path, own={"dump_batches": str(dump)}, num_train_epochs=2,
        dataloader_num_workers=workers, dataloader_persistent_workers=workers > 0,
    )  # fmt: skip
    trainer.train()
    found = records(dump)
    assert list(dump.parent.iterdir()) == [dump]
    for epoch in (0, 1):
        rows = [row for r in found if r["epoch"] == epoch and r["weight"] for row in r["rows"]]
        assert sorted(rows) == list(range(41))
    lengths = lengths_of(data)
    for record in found:
        held = [lengths[row] for row in record["rows"]]
        assert record["computed_tokens"] == len(held) * max(held)
        assert record["real_tokens"] == (sum(held) if record["weight"] else 0)
        assert list(record) == [
            "epoch", "step", "micro_batch", "rank", "rows", "computed_tokens", "real_tokens", "weight",
        ]  # fmt: skip
    places = [(r["epoch"], r["step"], r["micro_batch"], r["rank"]) for r in found]
    assert places == sorted(set(places))
    assert [r["rows"] for r in found if r["epoch"] == 0] != [r["rows"] for r in found if r["epoch"] == 1]


def test_counters_are_those_of_the_dump(tmp_path: Path) -> None:
    data = toy.examples("single", 41, seed=3)
    plan, dump = real_plan(data), tmp_path / "batches.jsonl"
    trainer = runs.trainer("single", plan, data, tmp_path, own={"dump_batches": str(dump)})
    metrics = trainer.train().metrics
    real = sum(record["real_tokens"] for record in records(dump))
    computed = sum(record["computed_tokens"] for record in records(dump))
    assert real == sum(lengths_of(data))
    assert (trainer.counters.real_tokens, trainer.counters.computed_tokens) == (real, computed)
    assert metrics["padding_efficiency"] == pytest.approx(real / computed)
    assert metrics["train_tokens_per_second"] == pytest.approx(real / metrics["train_runtime"], rel=1e-3)
    assert metrics["rank_imbalance"] == 1
    assert trainer.throughput_metrics().items() <= metrics.items()
    assert metrics["train_samples_per_second"] == pytest.approx(41 / metrics["train_runtime"], rel=0.01)
    # A second training starts counting anew.
    trainer.train()
    assert trainer.counters.real_tokens == real


def test_resuming_at_every_step_equals_the_uninterrupted_run(tmp_path: Path) -> None:
    data = toy.examples("single", 30, seed=3)
    plan = real_plan(data)
    total = 2 * plan.steps_per_epoch
    assert plan.steps_per_epoch >= 3
    dump = tmp_path / "whole.jsonl"
    whole = runs.trainer(
        "single", plan, data, tmp_path / "whole", own={"dump_batches": str(dump)},
        max_steps=total, save_strategy="steps", save_steps=1,
    )  # fmt: skip
    whole.train()
    end = torch.cat([p.detach().reshape(-1) for p in whole.model.parameters()])
    for step in range(1, total):
        again = tmp_path / f"again{step}.jsonl"
        resumed = runs.trainer(
            "single", plan, data, tmp_path / "resumed", own={"dump_batches": str(again)}, max_steps=total
        )
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        position = divmod(step, plan.steps_per_epoch)
        assert records(again) == [r for r in records(dump) if (r["epoch"], r["step"]) >= position]
        found = torch.cat([p.detach().reshape(-1) for p in resumed.model.parameters()])
        assert torch.equal(found, end)


def test_a_resumed_run_keeps_the_lines_before_it_and_replaces_those_after(tmp_path: Path) -> None:
    data = toy.examples("single", 30, seed=3)
    plan, dump = real_plan(data), tmp_path / "batches.jsonl"
    own = {"dump_batches": str(dump)}
    total = plan.steps_per_epoch
    runs.trainer(
        "single", plan, data, tmp_path, own=own, max_steps=total, save_strategy="steps", save_steps=1
    ).train()
    whole = records(dump)
    # A killed run leaves its part, with a torn last line, and no joined file.
    part = dump.with_name("batches.jsonl.rank00000.part")
    part.write_text(dump.read_text() + '{"epoch": 0, "st')
    dump.unlink()
    resumed = runs.trainer("single", plan, data, tmp_path, own=own, max_steps=total)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{total - 1}"))
    assert records(dump) == whole
    assert not part.exists()
    # A run from the start owes nothing to an older file.
    runs.trainer("single", plan, data, tmp_path, own=own, max_steps=1).train()
    assert {record["step"] for record in records(dump)} == {0}


def test_unused_columns_are_removed_and_an_arrow_data_set_works(tmp_path: Path) -> None:
    data = toy.examples("single", 16, seed=3)
    table = datasets.Dataset.from_list([{**row, "text": "x", "idx": i} for i, row in enumerate(data)])
    _, gradient = toy.reference("single", toy.model("single"), data)
    seen: list[set[str]] = []

    class Spy(toy.ToyTask):
        def collate(self, batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
            seen.append(set(batch[0]))
            return super().collate(batch)

    plan = toy.ListedPlan(SPLITS["1x4"], data)
    trainer = runs.trainer("single", plan, table, tmp_path, task=Spy("single"))
    trainer.train()
    assert toy.relative_error(trainer.gradients[0], gradient) < 1e-5
    assert all(names == {"input_ids", "labels"} for names in seen)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_random_collator_draws_by_row_and_epoch(workers: int, tmp_path: Path) -> None:
    """Masks of a row are the same in any split: the gradient of a masked step is that of the whole."""

    class Masked(toy.ToyTask):
        def collate_rows(self, batch: list[dict[str, Any]], *, epoch: int, rows: Any) -> dict[str, Any]:
            drawn = []
            for example, row in zip(batch, rows, strict=True):
                generator = torch.Generator().manual_seed(1000 * epoch + row)
                keep = torch.rand(len(example["labels"]), generator=generator) < 0.5
                labels = [x if k else -100 for x, k in zip(example["labels"], keep, strict=True)]
                drawn.append({**example, "labels": labels})
            return self.collate(drawn)

    data = toy.examples("tagging", 16, seed=3)
    gradients = []
    for split in ("1x1", "1x4"):
        plan = toy.ListedPlan(SPLITS[split], data)
        trainer = runs.trainer(
            "tagging", plan, data, tmp_path, task=Masked("tagging"), learning_rate=0.0, num_train_epochs=2,
            dataloader_num_workers=workers if split == "1x4" else 0,
        )  # fmt: skip
        trainer.train()
        gradients.append(trainer.gradients)
    for epoch in (0, 1):
        assert toy.relative_error(gradients[1][epoch], gradients[0][epoch]) < 1e-5
    assert toy.relative_error(gradients[0][1], gradients[0][0]) > 1e-2


def test_settings_that_disagree_with_the_plan_are_refused(tmp_path: Path) -> None:
    data = toy.examples("single", 30, seed=3)
    plan = real_plan(data)
    with pytest.raises(ConfigError, match="gradient_accumulation_steps is 2; the plan needs at least 3"):
        runs.trainer("single", plan, data, tmp_path, gradient_accumulation_steps=2)
    with pytest.raises(DataError, match="the plan is for 30 rows and the Trainer has 29 rows"):
        runs.trainer("single", plan, data[:-1], tmp_path)
    with pytest.raises(ConfigError, match="dataloader_drop_last set"):
        runs.trainer("single", plan, data, tmp_path, dataloader_drop_last=True)
    with pytest.raises(ConfigError, match="split_batches"):
        runs.trainer("single", plan, data, tmp_path, accelerator_config={"split_batches": True})
    with pytest.raises(ConfigError, match="no cross entropy"):
        qa = toy.examples("qa", 16)
        runs.trainer("qa", toy.ListedPlan(SPLITS["1x1"], qa), qa, tmp_path, label_smoothing_factor=0.1)
    with pytest.raises(DataError, match="no plan to train by"):
        runs.trainer("single", None, None, tmp_path).train()
    stream = datasets.Dataset.from_list(data).to_iterable_dataset()
    with pytest.raises(DataError, match="stream"):
        runs.trainer("single", None, None, tmp_path).evaluate(stream)


def test_running_out_of_memory_names_the_shape_and_the_budget(tmp_path: Path, monkeypatch: Any) -> None:
    # A mock: there is no accelerator here to run out of memory.
    data = toy.examples("single", 30, seed=3)
    plan = real_plan(data)
    trainer = runs.trainer("single", plan, data, tmp_path)
    first = plan.epoch(0).deal(0, 1, plan.accumulation_steps(1))[0][0]

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(trainer, "compute_loss", full)
    with pytest.raises(EngineError) as caught:
        trainer.train()
    assert f"step 0 of epoch 0, in a forward pass of {len(first.rows)} rows x " in str(caught.value)
    assert f"lower --max_tokens_per_device (now {plan.batching.max_tokens_per_device})" in str(caught.value)


def _stock_gradient(kind: str, data: list[dict[str, Any]], folder: Path, accumulation: int) -> torch.Tensor:
    kept = runs.Gradients()
    trainer = Trainer(
        model=toy.model(kind),
        args=runs.arguments(
            folder, per_device_train_batch_size=16 // accumulation,
            gradient_accumulation_steps=accumulation, max_steps=1,
        ),
        train_dataset=data,
        data_collator=toy.ToyTask(kind).collate,
        callbacks=[kept],
    )  # fmt: skip
    trainer.train()
    return kept.steps[0]


@pytest.mark.parametrize("kind", ["single", "regression", "tagging", "seq2seq"])
def test_upstream_still_multiplies_the_gradient_by_the_accumulation(kind: str, tmp_path: Path) -> None:
    """Transformers 5.24 (issue 47688); when this fails for all kinds, the loss may go back to the model."""
    data = toy.examples(kind, 16, seed=3)
    _, gradient = toy.reference(kind, toy.model(kind), data)
    factor = float(_stock_gradient(kind, data, tmp_path, 4).norm() / gradient.norm())
    assert factor == pytest.approx(4, rel=0.1)


def test_upstream_still_takes_a_mean_of_means_for_spans(tmp_path: Path) -> None:
    """Transformers 5.24: batches without a `labels` key get no count, and softmax runs over padding."""
    data = toy.examples("qa", 16, seed=3)
    _, gradient = toy.reference("qa", toy.model("qa"), data)
    assert toy.relative_error(_stock_gradient("qa", data, tmp_path, 4), gradient) > 1e-3


def test_upstream_still_pops_the_labels_for_a_loss_function(tmp_path: Path) -> None:
    """Transformers 5.24: hence `compute_loss` is overridden and no `compute_loss_func` is given."""
    data = toy.examples("seq2seq", 4, seed=3)
    trainer = Trainer(
        model=toy.model("seq2seq", architecture="t5"),
        args=runs.arguments(tmp_path, per_device_train_batch_size=4, max_steps=1),
        train_dataset=data,
        data_collator=toy.ToyTask("seq2seq").collate,
        compute_loss_func=lambda outputs, labels, num_items_in_batch: outputs.logits.sum(),
    )
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        trainer.train()
