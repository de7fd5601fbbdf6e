"""Points 5 and 6 of `batching.py`: training speed against the stock samplers, and the sampler's own time.

Also the worker that trains: `batching.py` starts this file in one process and, through torchrun, in two.
All samplers are trained in turn in the same processes, several rounds over, on the same rows, one epoch
each, at equal mean tokens a step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from common import Results

from hf_dist.batching.plan import Plan, TokenBatching
from hf_dist.batching.steps.cost import attention_weight

OURS = "hf_dist"
PEERS = ("random", "group_by_length", "batch_rebalance")
MICRO_BATCHES_PER_RANK = 2
VOCABULARY = 1000
# The Trainer prints lines of its own.
_MARK = "figures: "


def small_bert(layers: int, width: int) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=width // 32,
            intermediate_size=4 * width,
            max_position_embeddings=4096,
            num_labels=2,
        )
    )


class Sentiment:
    """A task whose rows are random tokens: only its shapes matter here."""

    best_metric = "accuracy"

    @property
    def items(self) -> Any:
        from hf_dist.tasks.items import ExampleItems

        return ExampleItems("single_label")

    def collate(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        import torch

        longest = max(len(example["input_ids"]) for example in examples)
        ids = torch.zeros(len(examples), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, example in enumerate(examples):
            tokens = torch.as_tensor(example["input_ids"])
            ids[row, : len(tokens)] = tokens
            mask[row, : len(tokens)] = 1
        labels = torch.tensor([example["labels"] for example in examples])
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    def predict(self, outputs: Any, batch: Mapping[str, Any]) -> list[Any]:
        return outputs.logits.argmax(-1).tolist()

    def score(self, predictions: list[Any], dataset: Any) -> dict[str, float]:
        return {"accuracy": 0.0}


def rows_of(lengths: np.ndarray) -> Any:
    import datasets

    random = np.random.default_rng(0)
    return datasets.Dataset.from_dict(
        {
            "input_ids": [random.integers(5, VOCABULARY, length).tolist() for length in lengths],
            "labels": random.integers(0, 2, len(lengths)).tolist(),
            "length": lengths.tolist(),
        }
    )


def build_trainer(who: str, lengths: np.ndarray, cap: int, data: Any, folder: str) -> Any:
    """The Trainer of one sampler, as a user would set it up."""
    import transformers

    from hf_dist.training.run.trainer import ExactTrainer

    world = int(os.environ.get("WORLD_SIZE", "1"))
    plan = Plan.build(
        lengths,
        TokenBatching(max_tokens_per_device=cap, tokens_per_step=MICRO_BATCHES_PER_RANK * world * cap),
        seed=0,
        attention_weight=attention_weight(small_bert(2, 128).config),
    )
    accumulation = plan.accumulation_steps(world)
    common: dict[str, Any] = {
        "output_dir": folder,
        "num_train_epochs": 1,
        "gradient_accumulation_steps": accumulation,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_strategy": "no",
        "dataloader_pin_memory": False,
        "seed": 0,
    }
    rows = max(1, round(plan.mean_rows_per_step / (accumulation * world)))
    if who != OURS:
        arguments = transformers.TrainingArguments(
            **common,
            per_device_train_batch_size=rows,
            train_sampling_strategy=who,
            length_column_name="length",
        )
        return transformers.Trainer(
            model=small_bert(2, 128), args=arguments, train_dataset=data, data_collator=Sentiment().collate
        )
    return ExactTrainer(
        model=small_bert(2, 128),
        args=transformers.TrainingArguments(**common, per_device_train_batch_size=rows),
        task=Sentiment(),
        plan=plan,
        train_dataset=data.remove_columns("length"),
        max_tokens_per_device=cap,
    )


def worker() -> None:
    """Trains with each sampler in turn; rank 0 prints one JSON line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("lengths", type=Path)
    parser.add_argument("--cap", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    options = parser.parse_args()
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    lengths = np.load(options.lengths)
    data = rows_of(lengths)
    figures: dict[str, list[dict[str, float]]] = {who: [] for who in (OURS, *PEERS)}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(options.rounds):
            # Each round starts with another one, so that a slow minute hits all alike.
            order = (OURS, *PEERS) if turn % 2 == 0 else (*PEERS[::-1], OURS)
            for who in order:
                trainer = build_trainer(who, lengths, options.cap, data, folder)
                watch = _Watch(trainer)
                trainer.add_callback(watch.callback())
                trainer.train()
                figures[who].append({**watch.figures(), "steps": trainer.state.global_step})
                trainer.accelerator.free_memory()
    if torch.distributed.is_initialized():
        if torch.distributed.get_rank() == 0:
            print(_MARK + json.dumps(figures), flush=True)
        torch.distributed.destroy_process_group()
    else:
        print(_MARK + json.dumps(figures), flush=True)


class _Watch:
    """Wall and CPU time from the first step's start to the end of training, summed over the ranks."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._begin = self._end = (0.0, 0.0)

    def callback(self) -> Any:
        import transformers

        watch = self

        class Times(transformers.TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if state.global_step == 0:
                    watch._begin = (time.perf_counter(), time.process_time())

            def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                watch._end = (time.perf_counter(), time.process_time())

        return Times()

    def figures(self) -> dict[str, float]:
        import torch

        wall, cpu = (end - begin for begin, end in zip(self._begin, self._end, strict=True))
        if torch.distributed.is_initialized():
            total = torch.tensor([cpu])
            torch.distributed.all_reduce(total)
            cpu = float(total)
        return {"wall": wall, "cpu": cpu}


def training(results: Results, lengths: np.ndarray, cap: int, *, rounds: int) -> None:
    """Point 5, first half: real tokens a second on one process and on two."""
    tokens = int(lengths.sum())
    rows = []
    for world in (1, 2):
        figures = _train(lengths, cap, world, rounds)
        seconds = {
            who: {kind: statistics.median(run[kind] for run in runs) for kind in ("wall", "cpu")}
            for who, runs in figures.items()
        }
        for who, taken in seconds.items():
            rows.append(
                [
                    *(world, who, int(figures[who][0]["steps"]), tokens / taken["wall"]),
                    *(tokens / taken["cpu"], taken["wall"] / seconds[OURS]["wall"]),
                    taken["cpu"] / seconds[OURS]["cpu"],
                ]
            )
        # Wall time of a single round says more about what else the machine does.
        for kind in ("wall", "cpu") if rounds > 1 else ("cpu",):
            best = min(seconds[who][kind] for who in PEERS)
            results.at_least(
                f"real tokens/s over the best stock sampler's, {kind} time, {world} process(es)",
                best / seconds[OURS][kind],
                1.0,
            )
    results.table(
        f"5. training a BERT of 2 layers, width 128, on {len(lengths):,} real lengths, median of {rounds}",
        [
            *("processes", "sampler", "steps", "real tokens/s", "real tokens/s of CPU time"),
            *("wall time / ours", "CPU time / ours"),
        ],
        rows,
    )


def _train(lengths: np.ndarray, cap: int, world: int, rounds: int) -> dict[str, list[dict[str, float]]]:
    launcher = [sys.executable]
    if world > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "0"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lengths.npy"
        np.save(path, lengths)
        command = [*launcher, __file__, str(path), "--cap", str(cap), "--rounds", str(rounds)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"training failed: {' '.join(command)}\n{done.stderr[-4000:]}")
    return json.loads(next(line[len(_MARK) :] for line in done.stdout.splitlines() if line.startswith(_MARK)))


def waiting_for_the_slowest(
    results: Results, lengths: np.ndarray, cap: int, forwards: Mapping[str, list[list[np.ndarray]]]
) -> None:
    """Point 5, second half: what 8 ranks would take if each waited for the slowest.

    Args:
        results: takes the table.
        lengths: tokens of each row.
        cap: most computed tokens of a micro-batch.
        forwards: for each sampler some forward passes, each with the rows of every rank.
    """
    import torch

    torch.set_num_threads(1)
    model = small_bert(2, 128)
    rows = []
    speeds = {}
    for who, passes in forwards.items():
        waited = worked = tokens = 0.0
        for ranks in passes:
            seconds = [_seconds(model, len(part), int(lengths[part].max())) for part in ranks]
            waited += max(seconds)
            worked += sum(seconds) / len(seconds)
            tokens += sum(int(lengths[part].sum()) for part in ranks)
        speeds[who] = tokens / waited
        rows.append([who, len(passes), tokens / waited, waited / worked, speeds[OURS] / speeds[who]])
    results.table(
        "5. eight ranks that wait for the slowest, by measured times of micro-batches",
        ["sampler", "forward passes", "real tokens/s of 8 ranks", "slowest / mean", "time / ours"],
        rows,
    )
    best = max(speeds[who] for who in speeds if who != OURS)
    results.at_least("real tokens/s of 8 ranks over the best stock sampler's", speeds[OURS] / best, 1.0)


def _seconds(model: Any, rows: int, longest: int) -> float:
    """CPU time of forward and backward of one micro-batch: a busy machine disturbs it least."""
    import torch

    ids = torch.ones(rows, longest, dtype=torch.long)
    labels = torch.zeros(rows, dtype=torch.long)
    best = float("inf")
    for _ in range(2):
        before = time.process_time()
        model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels).loss.backward()
        best = min(best, time.process_time() - before)
    return best


def overhead(results: Results, lengths: np.ndarray, cap: int, *, steps: int) -> None:
    """Point 6: the batch sampler's time a step against a step of a 4-layer, 256-wide model."""
    import torch

    from hf_dist.batching.sampler import PlannedBatchSampler

    torch.set_num_threads(1)
    model = small_bert(4, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    rows = []
    worst = 0.0
    for micro_batches, ranks in ((1, 1), (8, 1), (8, 8), (8, 5), (64, 8)):
        plan = Plan.build(
            lengths, TokenBatching(max_tokens_per_device=cap, tokens_per_step=micro_batches * cap), seed=0
        )
        accumulation = plan.accumulation_steps(ranks)
        sampler = PlannedBatchSampler(plan, data_parallel_rank=0, data_parallel_size=ranks)
        plan.epoch(0)
        before = time.process_time()
        keys = list(sampler)
        sampling = (time.process_time() - before) / plan.steps_per_epoch
        wanted = keys[: accumulation * (1 if accumulation > 4 else steps)]
        before = time.process_time()
        for index, key in enumerate(wanted):
            ids = torch.ones(len(key.rows), int(lengths[list(key.rows)].max()), dtype=torch.long)
            labels = torch.zeros(len(key.rows), dtype=torch.long)
            model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels).loss.backward()
            if (index + 1) % accumulation == 0:
                optimizer.step()
                optimizer.zero_grad()
        step = (time.process_time() - before) * accumulation / len(wanted)
        worst = max(worst, sampling / step)
        rows.append([micro_batches, ranks, accumulation, 1e3 * sampling, 1e3 * step, 100 * sampling / step])
    results.table(
        "6. the sampler's own time (CPU time, one thread)",
        ["micro-batches a step", "ranks", "accumulation", "sampler, ms a step", "step, ms", "%"],
        rows,
    )
    results.at_most("sampler's time over a step's", worst, 0.01)


if __name__ == "__main__":
    worker()
