"""Training on packs: the gradient is that of the documents one by one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

from hf_dist.batching.lengths import lengths_of
from hf_dist.batching.packing import Packing
from hf_dist.batching.plan import Plan, TokenBatching
from hf_dist.data.packing.attention import PackedAttention
from hf_dist.data.packing.packs import PackedCollator, PackedDataset
from hf_dist.data.packing.probe import packed_collator
from hf_dist.tasks.items import TokenItems
from tests.training import runs, toy

CAPACITY = 40
LLAMA = dict(
    vocab_size=toy.VOCABULARY,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
)
GPT2 = dict(
    vocab_size=toy.VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=64,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
OPT = dict(
    vocab_size=toy.VOCABULARY, hidden_size=16, word_embed_proj_dim=16, ffn_dim=24, num_hidden_layers=2,
    num_attention_heads=2, max_position_embeddings=64, dropout=0.0, pad_token_id=1,
)  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "llama": ("LlamaForCausalLM", LLAMA),
    # Documents are longer than the window.
    "qwen2": (
        "Qwen2ForCausalLM",
        {**LLAMA, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "opt": ("OPTForCausalLM", OPT),
}


def model(name: str, attention: str = "sdpa") -> Any:
    """Weights large enough for attention, and so for a leak, to matter."""
    head, values = MODELS[name]
    made = getattr(transformers, head)
    config = made.config_class(**values)
    config._attn_implementation = attention
    torch.manual_seed(5)
    net = made(config)
    for weight in net.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.2)
    return net


def documents(count: int = 36, *, prompts: bool = False) -> datasets.Dataset:
    draw = np.random.default_rng(1)
    tokens = [draw.integers(3, toy.VOCABULARY, draw.integers(1, 21)).tolist() for _ in range(count)]
    columns = {"input_ids": tokens}
    if prompts:
        columns["labels"] = [[-100] * (len(row) // 3) + row[len(row) // 3 :] for row in tokens]
    return datasets.Dataset.from_dict(columns)


class Task:
    best_metric = "loss"
    items = TokenItems(shift=True)

    def __init__(self, collate: Any) -> None:
        self.collate = collate

    def predict(self, outputs: Any, batch: Any) -> list[float]:
        return [float(row[0, 0]) for row in outputs["logits"]]

    def score(self, predictions: list[float], dataset: Any) -> dict[str, float]:
        return {"rows": float(len(predictions))}


def one_by_one(net: Any, data: datasets.Dataset, chosen: list[int]) -> tuple[float, int, torch.Tensor]:
    """Sum of the losses, items and gradient of the mean: a loop over documents, plain autograd."""
    net = copy.deepcopy(net).train()
    net.config.use_cache = False
    losses = []
    for number in chosen:
        tokens = torch.tensor(data[number]["input_ids"])
        labels = torch.tensor(data[number].get("labels", data[number]["input_ids"]))
        logits = net(input_ids=tokens[None])["logits"][0]
        kept = labels[1:] != -100
        losses.append(F.cross_entropy(logits[:-1][kept], labels[1:][kept], reduction="none"))
    every = torch.cat(losses)
    every.mean().backward()
    return every.sum().item(), len(every), toy.flat_gradient(net)


def packed_trainer(net: Any, data: datasets.Dataset, folder: Path, collate: Any = None) -> Any:
    rows = PackedDataset(data, Packing.build(lengths_of(data), CAPACITY))
    plan = Plan.build(rows.lengths, TokenBatching(max_tokens_per_device=80, tokens_per_step=160), seed=0)
    assert plan.steps_per_epoch >= 2 and plan.accumulation_steps(1) == 2
    if collate is None:
        collate = packed_collator(net, longest_document=20, pad_to_multiple_of=8)
    # A learning rate of 0 keeps the weights, so that every step has a reference.
    return runs.trainer(
        "clm",
        plan,
        rows,
        folder,
        net=net,
        task=Task(collate),
        own={"pad_to_multiple_of": 8},
        learning_rate=0.0,
    )


def documents_of_step(trainer: Any, step: int) -> list[int]:
    packs = trainer.plan.epoch(0).step_rows(step)
    return [d for row in packs for d in trainer.train_dataset.packing.documents_of(row).tolist()]


@pytest.mark.parametrize("prompts", [False, True], ids=["all tokens", "prompts masked"])
@pytest.mark.parametrize(
    "name, attention, way",
    [
        ("gpt2", "sdpa", PackedAttention.POSITIONS),
        ("llama", "eager", PackedAttention.POSITIONS),
        ("qwen2", "sdpa", PackedAttention.POSITIONS),
        ("opt", "sdpa", PackedAttention.BOOLEAN_MASK),
        ("opt", "eager", PackedAttention.ADDITIVE_MASK),
    ],
)
def test_gradients_are_those_of_documents_one_by_one(
    name: str, attention: str, way: PackedAttention, prompts: bool, tmp_path: Path
) -> None:
    data = documents(prompts=prompts)
    net = model(name, attention)
    trainer = packed_trainer(net, data, tmp_path)
    assert trainer.task.collate.attention is way
    trainer.train()
    seen: list[int] = []
    for step, gradient in enumerate(trainer.gradients):
        chosen = documents_of_step(trainer, step)
        seen += chosen
        loss, items, expected = one_by_one(net, data, chosen)
        assert toy.relative_error(gradient, expected) <= 1e-5
        assert runs.logged(trainer, "loss")[step] == pytest.approx(loss / items, rel=1e-5)
    assert sorted(seen) == list(range(len(data)))


def without_positions(examples: Any) -> dict[str, torch.Tensor]:
    """One long document a row, but for its labels."""
    batch = PackedCollator(attention=PackedAttention.POSITIONS)(examples)
    del batch["position_ids"]
    return batch


def borders_predicted(examples: Any) -> dict[str, torch.Tensor]:
    """The last token of a document predicts the first of the next."""
    batch = PackedCollator(attention=PackedAttention.POSITIONS)(examples)
    for row, example in enumerate(examples):
        batch["labels"][row, : len(example["labels"])] = torch.from_numpy(example["labels"])
    return batch


@pytest.mark.parametrize(
    "collate",
    [
        without_positions,
        borders_predicted,
        PackedCollator(attention=PackedAttention.BOOLEAN_MASK_ALONE),
    ],
    ids=["attention crosses", "loss crosses", "positions run on"],
)
def test_the_comparison_sees_what_packing_can_do_wrong(collate: Any, tmp_path: Path) -> None:
    data, net = documents(), model("gpt2")
    trainer = packed_trainer(net, data, tmp_path, collate)
    trainer.train()
    _, _, expected = one_by_one(net, data, documents_of_step(trainer, 0))
    assert toy.relative_error(trainer.gradients[0], expected) > 1e-2


def test_varlen_rows_are_the_same_step(tmp_path: Path) -> None:
    """All packs in one row, as flash attention takes them; sdpa's mask stands in for its kernel."""
    data, net = documents(), model("llama")
    collate = PackedCollator(attention=PackedAttention.VARLEN, pad_to_multiple_of=8)
    trainer = packed_trainer(net, data, tmp_path, collate=collate)
    trainer.train()
    for step, gradient in enumerate(trainer.gradients):
        _, _, expected = one_by_one(net, data, documents_of_step(trainer, step))
        assert toy.relative_error(gradient, expected) <= 1e-5


def test_evaluation_on_packs_has_the_loss_of_the_documents(tmp_path: Path) -> None:
    data, net = documents(), model("llama")
    trainer = packed_trainer(net, data, tmp_path)
    found = trainer.evaluate(trainer.train_dataset)
    loss, items, _ = one_by_one(net, data, list(range(len(data))))
    assert found["eval_loss"] == pytest.approx(loss / items, rel=1e-5)
    assert found["eval_rows"] == len(trainer.train_dataset)


def test_the_models_own_loss_counts_the_same_items(tmp_path: Path) -> None:
    """A mixture of experts keeps its own loss (it adds the router's), which must be that of the items."""
    net = toy.model("clm", architecture="mixtral")
    net.config.router_aux_loss_coef = net.router_aux_loss_coef = 0.0
    data = documents()
    collate = PackedCollator(attention=PackedAttention.POSITIONS, pad_to_multiple_of=8)
    trainer = packed_trainer(net, data, tmp_path, collate=collate)
    trainer.train()
    assert trainer.step_loss.found.extras
    for step, gradient in enumerate(trainer.gradients):
        _, _, expected = one_by_one(net, data, documents_of_step(trainer, step))
        assert toy.relative_error(gradient, expected) <= 1e-5
