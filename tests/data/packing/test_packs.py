"""Packs as rows, what the collator makes of them, and which models keep their documents apart."""

from __future__ import annotations

import pickle
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import transformers
from torch.utils.data import DataLoader
from transformers import modeling_flash_attention_utils as flash_utils

from hf_dist.batching.lengths import lengths_of
from hf_dist.batching.packing import Packing
from hf_dist.batching.plan import Plan, TokenBatching
from hf_dist.batching.sampler import PlannedBatchSampler, PlannedDataset
from hf_dist.data.packing.attention import PackedAttention, block_mask
from hf_dist.data.packing.packs import Pack, PackedCollator, PackedDataset
from hf_dist.data.packing.probe import packed_collator
from hf_dist.errors import ConfigError, DataError

DOCUMENTS = [[11, 12, 13], [21, 22], [31, 32, 33, 34], [41]]
TINY = dict(
    vocab_size=60,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=24,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
)


def arrow(**columns: Any) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"input_ids": DOCUMENTS, **columns})


def packed(dataset: Any, capacity: int = 6) -> PackedDataset:
    return PackedDataset(dataset, Packing.build([3, 2, 4, 1], capacity))


def model(name: str, attention: str = "sdpa", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A tiny model whose weights are large enough for attention to matter."""
    config = getattr(transformers, f"{name}Config")(**{**TINY, **changes})
    config._attn_implementation = attention
    torch.manual_seed(0)
    heads = {"GPT2": "GPT2LMHeadModel", "Bert": "BertLMHeadModel"}
    net = getattr(transformers, heads.get(name, f"{name}ForCausalLM"))(config)
    for weight in net.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.3)
    return net.to(dtype)


# ---- Rows ----


@pytest.mark.parametrize("source", ["arrow", "shuffled arrow", "list"])
def test_a_row_is_the_documents_of_its_pack(source: str) -> None:
    data: Any = [{"input_ids": tokens} for tokens in DOCUMENTS]
    if source == "arrow":
        data = arrow(text=["a", "b", "c", "d"])
    if source == "shuffled arrow":
        order = [2, 0, 3, 1]
        stored = datasets.Dataset.from_dict({"input_ids": [DOCUMENTS[i] for i in order]})
        data = stored.select([order.index(i) for i in range(4)])
    rows = packed(data)
    # 4 + 2 and 3 + 1 tokens; documents of a pack stand in the order of the data.
    assert rows.lengths.tolist() == [6, 4]
    first, second = rows.__getitems__([1, 0])
    assert first["input_ids"].tolist() == [11, 12, 13, 41]
    assert first["document_lengths"].tolist() == [3, 1]
    assert second["input_ids"].tolist() == [21, 22, 31, 32, 33, 34]
    assert second["labels"].tolist() == second["input_ids"].tolist()
    assert rows[0]["input_ids"].tolist() == second["input_ids"].tolist()
    assert len(rows) == 2


def test_labels_of_the_data_are_kept() -> None:
    labels = [[-100, -100, 13], [21, 22], [-100, -100, 33, 34], [41]]
    rows = packed(arrow(labels=labels))
    assert rows[0]["labels"].tolist() == [21, 22, -100, -100, 33, 34]
    assert rows[1]["labels"].tolist() == [-100, -100, 13, 41]


def test_a_row_of_no_tokens() -> None:
    rows = PackedDataset(
        datasets.Dataset.from_dict(
            {"input_ids": [[], []]},
            features=datasets.Features(input_ids=datasets.List(datasets.Value("int64"))),
        ),
        Packing.build([0, 0], 4),
    )
    batch = PackedCollator(attention=PackedAttention.POSITIONS, pad_token_id=9)([rows[0]])
    assert batch["input_ids"].tolist() == [[9]] and batch["labels"].tolist() == [[-100]]


def test_refusals() -> None:
    with pytest.raises(DataError, match="the packing is for 4 documents and the data set has 2"):
        packed(datasets.Dataset.from_dict({"input_ids": DOCUMENTS[:2]}))
    with pytest.raises(DataError, match=r"no column 'input_ids' \(did you mean input_id\?\)"):
        packed(datasets.Dataset.from_dict({"input_id": DOCUMENTS}))
    wrong = PackedDataset(arrow(), Packing.build([3, 2, 3, 1], 6))
    with pytest.raises(DataError, match="document 2 has 4 input_ids and its length was given as 3"):
        wrong.__getitems__([0, 1])
    uneven = packed(arrow(labels=[[1, 2, 3], [1], [1, 2, 3, 4], [1]]))
    with pytest.raises(DataError, match="document 1 has 1 labels and its length was given as 2"):
        uneven.__getitems__([0])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_planned_loader_runs_every_token_once(workers: int) -> None:
    draw = np.random.default_rng(2)
    documents = [draw.integers(4, 60, draw.integers(1, 15)).tolist() for _ in range(60)]
    data = datasets.Dataset.from_dict({"input_ids": documents})
    rows = PackedDataset(data, Packing.build(lengths_of(data), 24))
    plan = Plan.build(rows.lengths, TokenBatching(max_tokens_per_device=48, tokens_per_step=96), seed=0)
    collate = PackedCollator(attention=PackedAttention.POSITIONS)
    seen: list[int] = []
    for rank in range(2):
        loader: Any = DataLoader(
            PlannedDataset(rows),
            batch_sampler=PlannedBatchSampler(plan, data_parallel_rank=rank, data_parallel_size=2),  # type: ignore[arg-type]
            collate_fn=lambda batch: (batch.key, collate(batch.examples)),
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
        )
        for key, batch in loader:
            assert batch["input_ids"].numel() == key.computed_tokens <= 48
            if not key.empty:
                # Padding is 0, tokens are not.
                seen += batch["input_ids"][batch["input_ids"] > 0].tolist()
    assert sorted(seen) == sorted(token for document in documents for token in document)


def test_rows_travel_to_a_worker_that_is_spawned() -> None:
    rows = pickle.loads(pickle.dumps(packed(arrow())))
    assert rows[1]["input_ids"].tolist() == [11, 12, 13, 41]
    example = pickle.loads(pickle.dumps(rows[1]))
    assert isinstance(example, Pack) and not isinstance(example, dict)


# ---- Batches ----


def test_a_batch_by_hand() -> None:
    rows = packed(arrow())
    collate = PackedCollator(attention=PackedAttention.BOOLEAN_MASK, pad_token_id=9, pad_to_multiple_of=4)
    batch = collate([rows[0], rows[1]])
    assert batch["input_ids"].tolist() == [
        [21, 22, 31, 32, 33, 34, 9, 9],
        [11, 12, 13, 41, 9, 9, 9, 9],
    ]
    assert batch["labels"].tolist() == [
        [-100, 22, -100, 32, 33, 34, -100, -100],
        [-100, 12, 13, -100, -100, -100, -100, -100],
    ]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 0, 1, 2, 3]]
    bounds = [[0, 0, 2, 2, 2, 2, 6, 6], [0, 0, 0, 3, 4, 4, 4, 4]]
    for row in range(2):
        for query in range(8):
            seen = np.flatnonzero(batch["attention_mask"][row, 0, query]).tolist()
            assert seen == list(range(bounds[row][query], query + 1))


def test_rows_may_be_longer_than_the_model_has_positions() -> None:
    # 64 positions, rows of 90 tokens, 86 of them padding in the second.
    draw = np.random.default_rng(3)
    documents = [draw.integers(3, 60, n).tolist() for n in (40, 50, 4)]
    rows = PackedDataset(datasets.Dataset.from_dict({"input_ids": documents}), Packing.build([40, 50, 4], 90))
    net = model("GPT2", n_positions=64).eval()
    net.config.use_cache = False
    batch = packed_collator(net, longest_document=50)(rows.__getitems__([0, 1]))
    assert batch["input_ids"].shape == (2, 90) and int(batch["position_ids"].max()) == 49
    with torch.no_grad():
        found = net(input_ids=batch["input_ids"], position_ids=batch["position_ids"])["logits"][1, :4]
        alone = net(input_ids=torch.tensor([documents[2]]))["logits"][0]
    assert float((found - alone).norm() / alone.norm()) < 1e-5


def test_what_each_way_gives_the_model() -> None:
    examples = packed(arrow()).__getitems__([0, 1])
    for way in PackedAttention:
        batch = PackedCollator(attention=way)(examples)
        names = {"input_ids", "labels"}
        if "ALONE" not in way.name:
            names.add("position_ids")
        if "MASK" in way.name:
            names.add("attention_mask")
            kind = torch.bool if "BOOLEAN" in way.name else torch.float32
            assert batch["attention_mask"].dtype is kind
        assert set(batch) == names
    flat = PackedCollator(attention=PackedAttention.VARLEN, pad_to_multiple_of=4)(examples)
    assert flat["input_ids"].tolist() == [[21, 22, 31, 32, 33, 34, 11, 12, 13, 41, 0, 0]]
    assert flat["position_ids"].tolist() == [[0, 1, 0, 1, 2, 3, 0, 1, 2, 0, 0, 1]]
    # The items are those of the rows: each document's tokens but its first.
    assert int((flat["labels"][:, 1:] != -100).sum()) == 1 + 3 + 2


def test_the_additive_mask_is_the_boolean_one() -> None:
    documents = torch.tensor([[0, 0, 1, -1]])
    seen = block_mask(PackedAttention.BOOLEAN_MASK, documents)
    for dtype in (torch.float32, torch.bfloat16):
        added = block_mask(PackedAttention.ADDITIVE_MASK, documents, dtype)
        assert seen is not None and added is not None and added.dtype is dtype
        assert torch.equal(added == 0, seen)
        assert torch.equal(torch.softmax(added, -1) > 0, seen)


# ---- Models ----

FOUND = [
    ("GPT2", "sdpa", PackedAttention.POSITIONS, {}),
    ("GPT2", "eager", PackedAttention.POSITIONS, {}),
    ("Llama", "sdpa", PackedAttention.POSITIONS, {"num_key_value_heads": 1}),
    ("Qwen2", "eager", PackedAttention.POSITIONS, {"num_key_value_heads": 1}),
    ("Mistral", "sdpa", PackedAttention.POSITIONS, {"num_key_value_heads": 1, "sliding_window": 4}),
    ("Mixtral", "sdpa", PackedAttention.POSITIONS, {"num_key_value_heads": 1, "num_local_experts": 3}),
    ("OPT", "sdpa", PackedAttention.BOOLEAN_MASK, {"ffn_dim": 24, "word_embed_proj_dim": 16}),
    ("OPT", "eager", PackedAttention.ADDITIVE_MASK, {"ffn_dim": 24, "word_embed_proj_dim": 16}),
    ("Mpt", "eager", PackedAttention.ADDITIVE_MASK, {"d_model": 16, "n_layers": 2, "n_heads": 2}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name, attention, expected, changes", FOUND)
def test_the_way_is_found_and_gives_the_logits_of_documents_alone(
    name: str, attention: str, expected: PackedAttention, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    net = model(name, attention, dtype, **changes).train()
    cached = net.config.use_cache
    found = packed_collator(net, longest_document=20, pad_token_id=0, pad_to_multiple_of=8)
    assert found.attention is expected and found.pad_to_multiple_of == 8
    assert net.training and net.config.use_cache is cached
    if dtype is torch.bfloat16:
        return
    # Other documents than the probe's, longer ones, and more of them.
    net.eval()
    net.config.use_cache = False
    draw = np.random.default_rng(5)
    documents = [draw.integers(3, 60, n).tolist() for n in (1, 12, 2, 20, 7, 7, 1)]
    data = datasets.Dataset.from_dict({"input_ids": documents})
    rows = PackedDataset(data, Packing.build(lengths_of(data), 30))
    batch = found(rows.__getitems__(range(len(rows))))
    del batch["labels"]
    with torch.no_grad():
        logits = net(**batch)["logits"]
        for row in range(len(rows)):
            start = 0
            for document in rows.packing.documents_of(row).tolist():
                alone = net(input_ids=torch.tensor([documents[document]]))["logits"][0]
                found_logits = logits[row, start : start + len(alone)]
                assert float((found_logits - alone).norm() / alone.norm()) < 1e-5
                start += len(alone)


@pytest.mark.parametrize(
    "name, changes, reason",
    [
        ("Mamba", {"state_size": 4}, "positions: logits differ"),
        ("Bloom", {"n_layer": 2, "n_head": 2}, "positions: logits differ"),
        # transformers 5.24 makes GPT-OSS's masks without position_ids; a block mask would widen the window.
        (
            "GptOss",
            {"num_key_value_heads": 1, "head_dim": 8, "sliding_window": 4}
            | {"num_local_experts": 2, "num_experts_per_tok": 1}
            | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "layers see 4 tokens, documents have 20",
        ),
    ],
)
def test_models_that_mix_documents_are_refused(name: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        packed_collator(model(name, "eager", **changes), longest_document=20)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{name}ForCausalLM can't keep packed documents apart")
    assert message.endswith("train without packing, or choose another model")


class _Leaky(torch.nn.Module):
    """Adds to a token's logit each time that token stood before, in any document of the row."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = model("GPT2", "eager", torch.bfloat16)
        self.config = self.inner.config

    def forward(self, input_ids: Any, **inputs: Any) -> Any:
        outputs = self.inner(input_ids=input_ids, **inputs)
        before = torch.nn.functional.one_hot(input_ids, 60).cumsum(1).to(torch.bfloat16)
        return {"logits": outputs["logits"] + 0.08 * before}


def test_a_small_leak_is_seen_in_bfloat16() -> None:
    with pytest.raises(ConfigError, match="changes the next one's logits"):
        packed_collator(_Leaky(), longest_document=20)


def test_weights_that_are_elsewhere_are_refused() -> None:
    net = model("GPT2")
    weight = net.lm_head.weight
    weight.data = torch.empty(0)
    weight.ds_id = 0
    with pytest.raises(ConfigError, match="ZeRO-3"):
        packed_collator(net, longest_document=20)


def test_flash_attention_gets_the_bounds_of_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flash path of transformers, with the kernel replaced by plain attention over each stretch."""
    stretches: list[list[int]] = []

    def varlen(q: Any, k: Any, v: Any, *, cu_seqlens_q: Any, cu_seqlens_k: Any, **_: Any) -> Any:
        assert torch.equal(cu_seqlens_q, cu_seqlens_k)
        stretches.append(cu_seqlens_q.diff().tolist())
        parts = [tensor.split(stretches[-1]) for tensor in (q, k, v)]
        made = [
            torch.nn.functional.scaled_dot_product_attention(
                *(part.transpose(0, 1)[None] for part in stretch), is_causal=True
            )[0].transpose(0, 1)
            for stretch in zip(*parts, strict=True)
        ]
        return torch.cat(made)

    def whole(q: Any, k: Any, v: Any, *, causal: bool, **_: Any) -> Any:
        assert causal
        parts = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2)

    net = model("Llama", num_key_value_heads=2)
    net.config._attn_implementation = "flash_attention_2"
    monkeypatch.setattr(
        flash_utils,
        "lazy_import_flash_attention",
        lambda *_, **__: ((whole, varlen, None, None, None), (lambda **k: {"causal": k["is_causal"]}, dict)),
    )
    found = packed_collator(net, longest_document=20)
    assert found.attention is PackedAttention.VARLEN
    stretches.clear()
    net.config.use_cache = False
    batch = found(packed(arrow()).__getitems__([0, 1]))
    net(input_ids=batch["input_ids"], position_ids=batch["position_ids"])
    assert stretches == [[2, 4, 3, 1]] * 2
