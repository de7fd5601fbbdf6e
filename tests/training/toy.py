"""Tiny models, data and tasks of every kind of items, for tests that train for real.

The reference of a step's gradient (`reference`) is plain torch on the unsplit batch: it shares no code
with hf_dist.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers

from hf_dist.batching.plan import MicroBatch
from hf_dist.tasks.items import ExampleItems, Items, SpanItems, TokenItems

VOCABULARY = 50
CLASSES = 5
KINDS = ("single", "multi", "regression", "tagging", "mlm", "clm", "seq2seq", "qa")

ITEMS: dict[str, Items] = {
    "single": ExampleItems("single_label"),
    "multi": ExampleItems("multi_label"),
    "regression": ExampleItems("regression"),
    "tagging": TokenItems(),
    "mlm": TokenItems(),
    "clm": TokenItems(shift=True),
    "seq2seq": TokenItems(),
    "qa": SpanItems(),
}


def examples(kind: str, count: int, *, seed: int = 0, longest: int = 13) -> list[dict[str, Any]]:
    """Rows of 3 to `longest` tokens. Some labels are ignored, so that rows hold uneven items."""
    draw = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        length = int(draw.integers(3, longest + 1))
        tokens = draw.integers(4, VOCABULARY, length)
        row: dict[str, Any] = {"input_ids": tokens.tolist()}
        if kind == "single":
            row["labels"] = int(draw.integers(CLASSES))
        elif kind == "multi":
            row["labels"] = draw.integers(0, 2, CLASSES).astype(float).tolist()
        elif kind == "regression":
            row["labels"] = float(draw.normal())
        elif kind == "qa":
            start, end = sorted(draw.integers(0, length, 2).tolist())
            row.update(start_positions=start, end_positions=end)
        else:
            size = CLASSES if kind == "tagging" else VOCABULARY
            labels = draw.integers(0, size, length)
            if kind == "clm":
                labels = tokens.copy()
            if kind == "seq2seq":
                labels = draw.integers(4, size, int(draw.integers(2, longest)))
            else:
                labels[draw.random(length) < 0.4] = -100
            row["labels"] = labels.tolist()
        rows.append(row)
    return rows


def _padded(rows: Sequence[Sequence[int]], value: int) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows])


@dataclass
class ToyTask:
    """A task of one kind; its predictions say which row they belong to by a digest of the logits."""

    kind: str
    best_metric: str = "digest"
    items: Items = field(init=False)

    def __post_init__(self) -> None:
        self.items = ITEMS[self.kind]

    def collate(self, batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        rows = [example["input_ids"] for example in batch]
        collated = {"input_ids": _padded(rows, 0), "attention_mask": _padded([[1] * len(r) for r in rows], 0)}
        for name in ("labels", "start_positions", "end_positions"):
            if name in batch[0]:
                values = [example[name] for example in batch]
                nested = isinstance(values[0], list) and self.kind != "multi"
                collated[name] = _padded(values, -100) if nested else torch.tensor(values)
        return collated

    def predict(self, outputs: Any, batch: Any) -> list[float]:
        logits = outputs["start_logits"] if self.kind == "qa" else outputs["logits"]
        return [round(float(row.reshape(-1)[0]), 4) for row in logits]

    def score(self, predictions: list[float], dataset: Any) -> dict[str, float]:
        assert len(predictions) == len(dataset)
        return {"digest": sum(value * (row + 1) for row, value in enumerate(predictions))}


def model(kind: str, *, architecture: str | None = None) -> torch.nn.Module:
    """A tiny model without dropout; the same weights for the same arguments."""
    torch.manual_seed(11)
    bert = dict(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=32,
    )
    if kind == "seq2seq" and architecture == "t5":
        return transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2,
                dropout_rate=0.0, decoder_start_token_id=0,
            )
        )  # fmt: skip
    if kind == "seq2seq":
        return transformers.BartForConditionalGeneration(
            transformers.BartConfig(
                vocab_size=VOCABULARY, d_model=16, encoder_layers=1, decoder_layers=1,
                encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24,
                dropout=0.0, max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
                decoder_start_token_id=2, forced_eos_token_id=None,
            )
        )  # fmt: skip
    if kind == "clm" and architecture == "mixtral":
        return transformers.MixtralForCausalLM(
            transformers.MixtralConfig(
                vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                num_attention_heads=2, num_key_value_heads=1, num_local_experts=3, num_experts_per_tok=1,
                router_aux_loss_coef=0.2, output_router_logits=True, max_position_embeddings=32,
                pad_token_id=0, bos_token_id=1, eos_token_id=2,
            )
        )  # fmt: skip
    if kind == "qa" and architecture == "llama":
        return transformers.LlamaForQuestionAnswering(
            transformers.LlamaConfig(
                vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32, pad_token_id=0,
                bos_token_id=1, eos_token_id=2,
            )
        )  # fmt: skip
    if kind == "clm":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=32,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
            )
        )  # fmt: skip
    if kind == "mlm":
        return transformers.BertForMaskedLM(transformers.BertConfig(**bert))
    if kind == "qa":
        return transformers.BertForQuestionAnswering(transformers.BertConfig(**bert))
    if kind == "tagging":
        return transformers.BertForTokenClassification(transformers.BertConfig(**bert, num_labels=CLASSES))
    problems = {"single": "single_label", "multi": "multi_label"}
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            **bert,
            num_labels=1 if kind == "regression" else CLASSES,
            problem_type=f"{problems[kind]}_classification" if kind in problems else "regression",
        )
    )


def item_losses(
    kind: str, outputs: Any, batch: dict[str, torch.Tensor], *, smoothing: float = 0.0, weights: Any = None
) -> torch.Tensor:
    """The loss of every item of a batch by its textbook formula, shape (items,)."""
    if kind == "regression":
        return (outputs["logits"][:, 0] - batch["labels"]) ** 2
    if kind == "multi":
        chance = torch.sigmoid(outputs["logits"])
        truth = batch["labels"]
        return -(truth * chance.log() + (1 - truth) * (1 - chance).log()).mean(dim=1)
    if kind == "qa":
        found = []
        for side in ("start", "end"):
            for row, position in enumerate(batch[f"{side}_positions"].tolist()):
                length = int(batch["attention_mask"][row].sum())
                logits = outputs[f"{side}_logits"][row, :length]
                found.append(logits.logsumexp(0) - logits[position])
        return torch.stack(found)
    found = []
    logits, labels = outputs["logits"], batch["labels"]
    if kind == "single":
        logits, labels = logits[:, None], labels[:, None]
    for row in range(labels.shape[0]):
        for place in range(labels.shape[1]):
            label = int(labels[row, place])
            source = place - 1 if kind == "clm" else place
            if label == -100 or source < 0:
                continue
            scores = F.log_softmax(logits[row, source], dim=-1)
            if weights is not None:
                scores = scores * torch.tensor(weights)
            found.append(-(1 - smoothing) * scores[label] - smoothing * scores.mean())
    return torch.stack(found)


def reference(
    kind: str,
    net: torch.nn.Module,
    rows: list[dict[str, Any]],
    *,
    divide_by: float | None = None,
    **shape: Any,
) -> tuple[float, torch.Tensor]:
    """Loss and flat gradient of a step: all its rows in one batch, plain autograd."""
    net = copy.deepcopy(net).train()
    batch = ToyTask(kind).collate(rows)
    losses = item_losses(kind, net(**batch), batch, **shape)
    loss = losses.sum() / (divide_by or len(losses))
    loss.backward()
    return losses.mean().item(), flat_gradient(net)


def flat_gradient(net: torch.nn.Module) -> torch.Tensor:
    return torch.cat(
        [
            (torch.zeros_like(p) if p.grad is None else p.grad).detach().reshape(-1).clone()
            for p in net.parameters()
            if p.requires_grad
        ]
    )


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


class ListedEpoch:
    def __init__(self, steps: list[list[list[Sequence[int]]]], lengths: np.ndarray) -> None:
        self._steps = steps
        self._lengths = lengths

    def deal_to_rank(self, step: int, size: int, accumulation_steps: int, rank: int) -> list[MicroBatch]:
        dealt = self._steps[step]
        assert len(dealt) == accumulation_steps and all(len(ranks) == size for ranks in dealt)
        rows = [int(row) for ranks in dealt for rows in ranks for row in rows]
        shortest = min(rows, key=lambda row: self._lengths[row])
        return [self._batch(ranks[rank], shortest) for ranks in dealt]

    def _batch(self, rows: Sequence[int], shortest: int) -> MicroBatch:
        held = np.array(rows if len(rows) else [shortest], dtype=np.int64)
        lengths = self._lengths[held]
        return MicroBatch(
            rows=held,
            empty=not len(rows),
            computed_tokens=int(len(held) * lengths.max()),
            real_tokens=int(lengths.sum()) if len(rows) else 0,
        )


class ListedPlan:
    """A plan that is written down: steps[step][accumulation index][rank] lists rows; [] is an empty one."""

    def __init__(self, steps: list[list[list[Sequence[int]]]], data: list[dict[str, Any]]) -> None:
        self.steps = steps
        self.rows = len(data)
        self.batching = None
        self.dropped = 0
        self.steps_per_epoch = len(steps)
        self.mean_rows_per_step = sum(len(r) for s in steps for a in s for r in a) / len(steps)
        self._lengths = np.array([len(row["input_ids"]) for row in data])

    def accumulation_steps(self, data_parallel_size: int) -> int:
        return len(self.steps[0])

    def epoch(self, epoch: int) -> ListedEpoch:
        return ListedEpoch(self.steps, self._lengths)
