"""One process: losses by item, predictions by row, against plain torch on every row alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import Trainer

from hf_dist.errors import DataError
from hf_dist.training.ranks.gather import gather_rows
from tests.training import runs, toy


def by_hand(
    kind: str, net: torch.nn.Module, data: list[dict[str, Any]], **shape: Any
) -> tuple[float, list[Any]]:
    """Loss by item and each row's prediction, every row in a batch of its own."""
    task, losses, predictions = toy.ToyTask(kind), [], []
    net.eval()
    with torch.no_grad():
        for row in data:
            batch = task.collate([row])
            outputs = net(**batch)
            if kind not in ("tagging", "mlm", "clm", "seq2seq") or any(x != -100 for x in row["labels"][1:]):
                losses.append(toy.item_losses(kind, outputs, batch, **shape))
            predictions += task.predict(outputs, batch)
    return torch.cat(losses).mean().item(), predictions


@pytest.mark.parametrize("kind", toy.KINDS)
def test_loss_is_by_item_and_predictions_by_row(kind: str, tmp_path: Path) -> None:
    data = toy.examples(kind, 23, seed=4)
    loss, predictions = by_hand(kind, toy.model(kind), data)
    trainer = runs.trainer(kind, None, None, tmp_path)
    metrics = trainer.evaluate(data)
    assert metrics["eval_loss"] == pytest.approx(loss, rel=1e-5)
    digest = toy.ToyTask(kind).score(predictions, data)["digest"]
    assert metrics["eval_digest"] == pytest.approx(digest, abs=1e-4 * sum(range(24)))
    predicted = trainer.predict(data)
    assert predicted.predictions == pytest.approx(predictions, abs=1e-3)
    assert predicted.metrics["test_loss"] == pytest.approx(loss, rel=1e-5)


def test_smoothing_is_part_of_the_evaluation_loss(tmp_path: Path) -> None:
    data = toy.examples("single", 23, seed=4)
    loss, _ = by_hand("single", toy.model("single"), data, smoothing=0.1)
    metrics = runs.trainer("single", None, None, tmp_path, label_smoothing_factor=0.1).evaluate(data)
    assert metrics["eval_loss"] == pytest.approx(loss, rel=1e-5)


def test_scores_see_the_data_set_with_all_its_columns(tmp_path: Path) -> None:
    data = datasets.Dataset.from_list([{**row, "text": "x"} for row in toy.examples("single", 9)])
    seen: list[Any] = []

    class Spy(toy.ToyTask):
        def score(self, predictions: list[float], dataset: Any) -> dict[str, float]:
            seen.append(dataset.column_names)
            return {}

    runs.trainer("single", None, None, tmp_path, task=Spy("single")).evaluate(data)
    assert seen == [["input_ids", "labels", "text"]]


def test_rows_without_labels_are_predicted_and_not_scored(tmp_path: Path) -> None:
    data = toy.examples("single", 9, seed=4)
    _, predictions = by_hand("single", toy.model("single"), data)
    unlabelled = [{"input_ids": row["input_ids"]} for row in data]
    predicted = runs.trainer("single", None, None, tmp_path).predict(unlabelled)
    assert predicted.predictions == pytest.approx(predictions, abs=1e-3)
    assert "test_loss" not in predicted.metrics and "test_digest" not in predicted.metrics


def test_forward_passes_stay_within_the_budget_and_count_as_steps(tmp_path: Path) -> None:
    data = toy.examples("single", 23, seed=4)
    shapes: list[int] = []

    class Spy(toy.ToyTask):
        def predict(self, outputs: Any, batch: Any) -> list[float]:
            shapes.append(batch["input_ids"].numel())
            return super().predict(outputs, batch)

    metrics = runs.trainer("single", None, None, tmp_path, task=Spy("single")).evaluate(data)
    assert max(shapes) <= 40
    steps = metrics["eval_steps_per_second"] * metrics["eval_runtime"]
    assert steps == pytest.approx(len(shapes), rel=0.05)


def test_several_data_sets_are_evaluated_by_name(tmp_path: Path) -> None:
    data = toy.examples("single", 12, seed=4)
    own = {"eval_dataset": {"a": data[:5], "b": data[5:]}}
    metrics = runs.trainer("single", None, None, tmp_path, own=own).evaluate()
    for name, rows in (("a", data[:5]), ("b", data[5:])):
        loss, _ = by_hand("single", toy.model("single"), rows)
        assert metrics[f"eval_{name}_loss"] == pytest.approx(loss, rel=1e-5)


def test_a_best_checkpoint_can_be_chosen_by_a_score(tmp_path: Path) -> None:
    data = toy.examples("single", 16, seed=4)
    plan = toy.ListedPlan([[[range(16)]]], data)
    trainer = runs.trainer(
        "single", plan, data, tmp_path, own={"eval_dataset": data}, num_train_epochs=3,
        eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True,
        metric_for_best_model="eval_digest",
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_metric == pytest.approx(max(runs.logged(trainer, "eval_digest")))


def test_no_data_is_an_error_that_says_so(tmp_path: Path) -> None:
    trainer = runs.trainer("single", None, None, tmp_path)
    with pytest.raises(DataError, match="give an eval_dataset"):
        trainer.evaluate()
    with pytest.raises(DataError, match="holds no rows"):
        trainer.evaluate([])


def test_a_missing_row_is_never_papered_over() -> None:
    with pytest.raises(RuntimeError, match="2 of 3 rows were predicted"):
        gather_rows([(0, "a"), (2, "c")], 3, everywhere=True)
    assert gather_rows([(1, "b"), (0, "a")], 2, everywhere=False) == ["a", "b"]


def test_upstream_still_weighs_uneven_batches_alike(tmp_path: Path) -> None:
    """Transformers 5.24: token losses are averaged batch by batch, whatever the batches hold."""
    data = toy.examples("tagging", 6, seed=4)
    for row in data[:3]:
        row["labels"] = [*row["labels"][:2], *[-100] * (len(row["labels"]) - 2)]
    loss, _ = by_hand("tagging", toy.model("tagging"), data)
    stock = Trainer(
        model=toy.model("tagging"),
        args=runs.arguments(tmp_path, per_device_eval_batch_size=3),
        data_collator=toy.ToyTask("tagging").collate,
    )
    assert stock.evaluate(data)["eval_loss"] != pytest.approx(loss, rel=1e-4)
