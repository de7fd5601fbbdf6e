"""What two processes do for test_exact.py: everything in one start; each rank leaves its results.

Usage: torchrun --nproc_per_node 2 exact_worker.py STAGE FOLDER, with STAGE 0 for DDP, 1 to 3 for ZeRO. FOLDER
holds the initial weights of each kind (saved by the test, before zero.Init exists).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import torch
from transformers import Trainer

from hf_dist.batching.plan import Plan, TokenBatching
from hf_dist.errors import DataError
from tests.training import runs, toy

LEARNING_RATE = 1000.0
"""So large that the update is the gradient, hardly rounded."""
SPLIT: list[Any] = [[[range(3), [3, 4]], [range(5, 10), [10]], [range(11, 16), []]]]
STAGE, FOLDER = int(sys.argv[1]), Path(sys.argv[2])
RANK = int(os.environ["RANK"])


def engine() -> dict[str, Any]:
    if STAGE == 0:
        return {}
    auto = (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    )
    return {
        "deepspeed": {
            **dict.fromkeys(auto, "auto"),
            "zero_optimization": {"stage": STAGE},
            "zero_allow_untrusted_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
    }


def trainer(kind: str, plan: Any, data: Any, name: str, **options: Any) -> Any:
    folder = FOLDER / f"stage{STAGE}" / name
    # The arguments come before the model: zero.Init reads a global that they set.
    accumulation = plan.accumulation_steps(2) if plan is not None else 1
    own = options.pop("own", None)
    given = {**engine(), "gradient_accumulation_steps": accumulation, **options}
    kept = runs.arguments(folder, **given)
    net = (
        type(toy.model(kind)).from_pretrained(FOLDER / "initial" / kind) if STAGE < 3 else _partitioned(kind)
    )
    del kept
    return runs.trainer(kind, plan, data, folder, net=net, own=own, **given)


def _partitioned(kind: str) -> Any:
    classes = {
        "mlm": "BertForMaskedLM",
        "qa": "BertForQuestionAnswering",
        "tagging": "BertForTokenClassification",
        "clm": "GPT2LMHeadModel",
        "seq2seq": "BartForConditionalGeneration",
    }
    import transformers

    name = classes.get(kind, "BertForSequenceClassification")
    return getattr(transformers, name).from_pretrained(FOLDER / "initial" / kind)


def weights(net: torch.nn.Module) -> torch.Tensor:
    if STAGE < 3:
        return torch.cat([p.detach().reshape(-1).clone() for p in net.parameters()])
    import deepspeed

    found = []
    for p in net.parameters():
        with deepspeed.zero.GatheredParameters([p]):
            found.append(p.detach().reshape(-1).clone())
    return torch.cat(found)


def one_step(kind: str, *, evaluate_first: bool = False) -> dict[str, Any]:
    data = toy.examples(kind, 16, seed=3)
    made = trainer(kind, toy.ListedPlan(SPLIT, data), data, f"step-{kind}", learning_rate=LEARNING_RATE)
    if evaluate_first:
        made.evaluate(data)
    before = weights(made.model)
    made.train()
    return {
        "gradient": (before - weights(made.model)) / LEARNING_RATE,
        "loss": runs.logged(made, "loss")[0],
        "grad_norm": runs.logged(made, "grad_norm")[0],
        "mode": made.step_loss.found.mode.name,
    }


def plan_of(data: list[dict[str, Any]]) -> Plan:
    lengths = [len(row["input_ids"]) for row in data]
    return Plan.build(lengths, TokenBatching(max_tokens_per_device=32, tokens_per_step=96), seed=3)


def dump(rows: int, workers: int) -> dict[str, float]:
    data = toy.examples("single", rows, seed=3)
    path = FOLDER / f"stage{STAGE}" / f"rows{rows}-workers{workers}.jsonl"
    made = trainer(
        "single", plan_of(data), data, "dump", own={"dump_batches": str(path)}, num_train_epochs=2,
        dataloader_num_workers=workers, dataloader_persistent_workers=workers > 0,
    )  # fmt: skip
    return made.train().metrics


def evaluation(kind: str) -> dict[str, Any]:
    data = toy.examples(kind, 23, seed=4)
    made = trainer(kind, None, None, "evaluation")
    metrics = made.evaluate(data)
    predicted = made.predict(data)
    return {
        "loss": metrics["eval_loss"],
        "digest": metrics["eval_digest"],
        "test_loss": predicted.metrics["test_loss"],
        "predictions": predicted.predictions,
    }


def resumed() -> dict[str, Any]:
    data = toy.examples("single", 30, seed=3)
    plan = plan_of(data)
    total, at = 2 * plan.steps_per_epoch, plan.steps_per_epoch + 1
    path = FOLDER / f"stage{STAGE}" / "whole.jsonl"
    whole = trainer(
        "single", plan, data, "whole", max_steps=total, save_strategy="steps", save_steps=at,
        eval_strategy="steps", eval_steps=1, own={"dump_batches": str(path), "eval_dataset": data},
    )  # fmt: skip
    whole.train()
    end = weights(whole.model)
    again = path.with_name("again.jsonl")
    second = trainer("single", plan, data, "again", max_steps=total, own={"dump_batches": str(again)})
    second.train(resume_from_checkpoint=str(FOLDER / f"stage{STAGE}" / "whole" / f"checkpoint-{at}"))
    return {
        "whole": end,
        "again": weights(second.model),
        "position": divmod(at, plan.steps_per_epoch),
        "curve": {name: runs.logged(whole, name) for name in ("loss", "eval_loss", "grad_norm")},
    }


def failing_score() -> str:
    class Broken(toy.ToyTask):
        def score(self, predictions: list[float], dataset: Any) -> dict[str, float]:
            raise DataError("the labels make no sense; mend them")

    data = toy.examples("single", 5)
    made = runs.trainer("single", None, None, FOLDER / "failing", task=Broken("single"), **engine())
    try:
        made.evaluate(data)
    except DataError as error:
        return str(error)
    return "no error"


def stock_after_evaluation() -> dict[str, Any]:
    data = toy.examples("single", 16, seed=3)
    stock = Trainer(
        model=toy.model("single"),
        args=runs.arguments(FOLDER / "stock", max_steps=1, per_device_train_batch_size=8),
        train_dataset=data,
        eval_dataset=data,
        data_collator=toy.ToyTask("single").collate,
    )
    stock.evaluate()
    stock.train()
    return {"weights": weights(stock.model)}


def main() -> None:
    torch.set_num_threads(1)
    if STAGE:
        import deepspeed

        deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    kinds = toy.KINDS
    results: dict[str, Any] = {"steps": {kind: one_step(kind) for kind in kinds}}
    results["after_evaluation"] = one_step("single", evaluate_first=True)
    results["evaluation"] = {kind: evaluation(kind) for kind in ("single", "tagging", "qa")}
    results["metrics"] = {
        (rows, workers): dump(rows, workers) for rows, workers in ((41, 0), (41, 2), (1, 0), (2, 0))
    }
    results["resumed"] = resumed()
    if STAGE == 0:
        results["failing_score"] = failing_score()
        results["stock_after_evaluation"] = stock_after_evaluation()
    torch.save(results, FOLDER / f"stage{STAGE}" / f"rank{RANK}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
