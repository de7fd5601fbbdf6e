"""Tiny models of many architectures, rows for them, and each head's loss by its textbook formula.

A head is an auto-class and a model type, like `tagging/bert`. Its config is the type's own with small sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
import transformers
from transformers.models.auto import modeling_auto

from hf_dist.config import PeftConfig
from hf_dist.tasks.items import ExampleItems, Items, SpanItems, TokenItems
from hf_dist.training.adapters.lora import add_adapter

CLASSES, VOCABULARY, EOS = 5, 99, 2
ROWS = 16
TINY = {
    **dict.fromkeys(["hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_size"], 32),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"], 2),
    **dict.fromkeys(["encoder_layers", "decoder_layers"], 2),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads"], 4),
    **dict.fromkeys(["encoder_attention_heads", "decoder_attention_heads"], 4),
    **dict.fromkeys(["intermediate_size", "ffn_dim", "n_inner", "d_ff", "hidden_dim"], 48),
    **dict.fromkeys(["encoder_ffn_dim", "decoder_ffn_dim"], 48),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "n_ctx"], 64),
    **dict.fromkeys(["num_local_experts", "num_experts", "n_routed_experts"], 4),
    **{"vocab_size": VOCABULARY, "num_key_value_heads": 2, "head_dim": 8, "d_kv": 8, "rotary_dim": 8},
    **{"moe_intermediate_size": 16, "num_experts_per_tok": 2, "word_embed_proj_dim": 32},
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": EOS, "decoder_start_token_id": EOS}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A task: its auto-class, its items, and where the auto-class lists its model types."""

    auto_class: Any
    mapping: str
    items: Items
    problem: str | None = None


_SEQUENCE = dict(
    auto_class=transformers.AutoModelForSequenceClassification,
    mapping="MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
)
KINDS: dict[str, Kind] = {
    "classification": Kind(
        **_SEQUENCE, items=ExampleItems("single_label"), problem="single_label_classification"
    ),
    "regression": Kind(**_SEQUENCE, items=ExampleItems("regression"), problem="regression"),
    "multi_label": Kind(**_SEQUENCE, items=ExampleItems("multi_label"), problem="multi_label_classification"),
    "tagging": Kind(
        auto_class=transformers.AutoModelForTokenClassification,
        mapping="MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
        items=TokenItems(),
    ),
    "question_answering": Kind(
        auto_class=transformers.AutoModelForQuestionAnswering,
        mapping="MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
        items=SpanItems(),
    ),
    "masked_lm": Kind(
        auto_class=transformers.AutoModelForMaskedLM,
        mapping="MODEL_FOR_MASKED_LM_MAPPING_NAMES",
        items=TokenItems(),
    ),
    "causal_lm": Kind(
        auto_class=transformers.AutoModelForCausalLM,
        mapping="MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
        items=TokenItems(shift=True),
    ),
    "seq2seq": Kind(
        auto_class=transformers.AutoModelForSeq2SeqLM,
        mapping="MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
        items=TokenItems(),
    ),
}
EXAMPLE_KINDS = ("classification", "regression", "multi_label")


@dataclass(frozen=True)
class Head:
    """One model to train: all of it, or a LoRA adapter beside its frozen weights (`tagging/bert+lora`)."""

    kind: str
    model_type: str
    adapter: bool = False

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.model_type}{'+lora' if self.adapter else ''}"

    @classmethod
    def parse(cls, name: str) -> Head:
        kind, model_type = name.removesuffix("+lora").split("/")
        return cls(kind, model_type, name.endswith("+lora"))


def config_of(head: Head) -> Any:
    """The type's own config with small sizes and without dropout."""
    names = transformers.AutoConfig.for_model(head.model_type).to_dict()
    sizes = {name: value for name, value in TINY.items() if name in names}
    config = transformers.AutoConfig.for_model(head.model_type, **sizes, **TOKENS)
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
        # A router loss is no sum over items.
        if name in ("router_aux_loss_coef", "router_z_loss_coef", "aux_loss_alpha"):
            setattr(config, name, 0.0)
    # Heads that every decoder shares take 0.1 where the config says nothing.
    config.classifier_dropout = config.hidden_dropout = 0.0
    config.num_labels = {"regression": 1, "question_answering": 2}.get(head.kind, CLASSES)
    config.problem_type = KINDS[head.kind].problem
    config.forced_eos_token_id = None
    return config


def build(head: Head) -> Any:
    """The head with the same weights at every call."""
    return adapt(head, base(head))


def base(head: Head) -> Any:
    """The head without its adapter."""
    torch.manual_seed(0)
    return KINDS[head.kind].auto_class.from_config(config_of(head)).float()


def adapt(head: Head, model: Any) -> Any:
    """The model with its adapter, if the head has one."""
    if not head.adapter:
        return model
    adapted = add_adapter(model, KINDS[head.kind].auto_class, PeftConfig(peft="lora", lora_r=4), seed=0)
    # As it starts B is zero, and so is the gradient of A.
    draw = torch.Generator().manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1, generator=draw)
    return adapted


def too_big(head: Head, parameters: int = 3_000_000) -> bool:
    """Whether the small sizes don't reach this type's config."""
    with torch.device("meta"):
        model = KINDS[head.kind].auto_class.from_config(config_of(head))
    return sum(p.numel() for p in model.parameters()) > parameters


def all_heads() -> list[Head]:
    """Every model type of every auto-class, buildable or not."""
    found = []
    for kind, known in KINDS.items():
        if kind not in ("regression", "multi_label"):
            found += [Head(kind, name) for name in getattr(modeling_auto, known.mapping)]
    return found


# ---- Rows ----


@functools.cache
def rows_of(kind: str) -> list[dict[str, Any]]:
    """The step's rows: 4 to 14 tokens that end in EOS, and labels of which some count nowhere."""
    draw = np.random.default_rng(7)
    rows = []
    for _ in range(ROWS):
        length = int(draw.integers(4, 15))
        tokens = draw.integers(5, VOCABULARY, length)
        tokens[-1] = EOS
        row: dict[str, Any] = {"input_ids": tokens.tolist()}
        if kind == "classification":
            row["labels"] = int(draw.integers(CLASSES))
        elif kind == "regression":
            row["labels"] = float(draw.normal())
        elif kind == "multi_label":
            row["labels"] = draw.integers(0, 2, CLASSES).astype(float).tolist()
        elif kind == "question_answering":
            start, end = sorted(draw.integers(0, length, 2).tolist())
            row.update(start_positions=start, end_positions=end)
        elif kind == "seq2seq":
            row["labels"] = [*draw.integers(5, VOCABULARY, int(draw.integers(2, 12))).tolist(), EOS]
        else:
            labels = tokens.copy() if kind == "causal_lm" else draw.integers(0, CLASSES, length)
            if kind == "masked_lm":
                labels = draw.integers(5, VOCABULARY, length)
            labels[draw.random(length) < 0.5] = -100
            labels[1] = tokens[1] if kind == "causal_lm" else 3
            row["labels"] = labels.tolist()
        rows.append(row)
    return rows


def _padded(rows: Sequence[Sequence[int]], value: int) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows])


def collate(kind: str, examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pads on the right."""
    tokens = [example["input_ids"] for example in examples]
    batch = {
        "input_ids": _padded(tokens, 0),
        "attention_mask": _padded([[1] * len(row) for row in tokens], 0),
    }
    for name in ("labels", "start_positions", "end_positions"):
        if name in examples[0]:
            values = [example[name] for example in examples]
            nested = isinstance(values[0], list) and kind != "multi_label"
            batch[name] = _padded(values, -100) if nested else torch.tensor(values)
    return batch


class Task:
    """The Trainer's view of a head."""

    best_metric = "none"

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.items = KINDS[kind].items
        self.collate: Callable[..., dict[str, torch.Tensor]] = functools.partial(collate, kind)

    def predict(self, outputs: Any, batch: Any) -> list[Any]:
        return [0] * len(batch["input_ids"])

    def score(self, predictions: list[Any], dataset: Any) -> dict[str, float]:
        return {}


# ---- References ----


def _picked(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Minus the log-probability of every label that counts."""
    counted = labels != -100
    chances = F.log_softmax(logits.float(), dim=-1)[counted]
    return -chances.gather(-1, labels[counted][:, None])[:, 0]


def item_losses(kind: str, outputs: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Every item's loss by its formula, shape (items,); no code of hf_dist or transformers."""
    if kind == "question_answering":
        found = []
        for side in ("start", "end"):
            logits = outputs[f"{side}_logits"].float()
            real = torch.where(batch["attention_mask"] > 0, logits.exp(), torch.zeros_like(logits))
            chosen = logits.gather(1, batch[f"{side}_positions"][:, None])[:, 0]
            found.append(real.sum(dim=1).log() - chosen)
        return torch.cat(found)
    logits, labels = outputs["logits"].float(), batch["labels"]
    if kind == "regression":
        return (logits[:, 0] - labels) ** 2
    if kind == "multi_label":
        chances = torch.sigmoid(logits)
        return -(labels * chances.log() + (1 - labels) * (1 - chances).log()).mean(dim=1)
    if kind == "causal_lm":
        return _picked(logits[:, :-1], labels[:, 1:])
    return _picked(logits, labels)


def flat_gradient(model: torch.nn.Module) -> torch.Tensor:
    """The gradients of all parameters, one after the other; zeros where there is none."""
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([part.detach().reshape(-1).float().clone() for part in parts])


def formula_gradient(head: Head) -> torch.Tensor:
    """Gradient of the unsplit step: mean over all items, by the formula."""
    model, batch = build(head).train(), collate(head.kind, rows_of(head.kind))
    # Of labels an encoder-decoder makes its decoder's input.
    names = batch if model.config.is_encoder_decoder else ("input_ids", "attention_mask")
    inputs = {name: batch[name] for name in names}
    item_losses(head.kind, model(**inputs), batch).mean().backward()
    return flat_gradient(model)


def own_gradient(head: Head) -> torch.Tensor:
    """Gradient of the model's own loss on the unsplit step: what the stock Trainer should give."""
    model, batch = build(head).train(), collate(head.kind, rows_of(head.kind))
    model(**batch)["loss"].backward()
    return flat_gradient(model)


def padding_change(head: Head) -> float:
    """Largest relative change of a row's outputs when it is padded to the longest row's length."""
    model, rows = build(head).eval(), rows_of(head.kind)
    together = _outputs(model, head.kind, rows)
    changes = []
    by_token = head.kind not in (*EXAMPLE_KINDS, "seq2seq")
    for row, with_padding in zip(rows, together, strict=True):
        (plain,) = _outputs(model, head.kind, [row])
        padded = with_padding[: len(row["input_ids"])] if by_token else with_padding
        changes.append(float((padded - plain).norm() / plain.norm()))
    return max(changes)


@torch.no_grad()
def _outputs(model: Any, kind: str, rows: list[dict[str, Any]]) -> torch.Tensor:
    batch = collate(kind, rows)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    if kind == "seq2seq":
        inputs["decoder_input_ids"] = torch.tensor([[EOS, 20, 21, 22]]).expand(len(rows), -1)
    return model(**inputs)["start_logits" if kind == "question_answering" else "logits"]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


# ---- Which heads ----

CHOSEN = {
    "classification": (
        "albert bart bert big_bird bloom camembert canine deberta deberta-v2 distilbert electra ernie "
        "esm falcon fnet gemma2 gpt2 gptj llama longformer mistral mixtral mobilebert modernbert "
        "mpnet mpt mt5 nystromformer olmo2 opt phi3 qwen3 roberta roformer squeezebert starcoder2 xlm "
        "xlm-roberta xlnet yoso"
    ),
    "regression": "bert llama",
    "multi_label": "roberta gpt2",
    "tagging": (
        "albert bert biogpt deberta-v2 distilbert electra fnet gpt_neox llama modernbert qwen2 "
        "roberta t5 xlm-roberta"
    ),
    "question_answering": (
        "bart bert deberta-v2 distilbert electra gpt2 llama modernbert roberta splinter t5 xlm-roberta"
    ),
    "masked_lm": (
        "albert bart bert camembert deberta-v2 distilbert electra ernie esm fnet longformer "
        "mobilebert modernbert mpnet nomic_bert rembert roberta roformer squeezebert xlm xlm-roberta"
    ),
    "causal_lm": (
        "bert biogpt bloom falcon gemma2 gpt2 gpt_neox granite llama mistral mixtral olmo2 opt phi3 "
        "qwen2 qwen3 roberta starcoder2"
    ),
    "seq2seq": (
        "bart blenderbot led longt5 m2m_100 marian mbart mt5 pegasus pegasus_x plbart "
        "switch_transformers t5 umt5"
    ),
}


def chosen_heads() -> list[Head]:
    """The heads of the full table."""
    return [Head(kind, name) for kind, names in CHOSEN.items() for name in names.split()]


def quick_heads() -> list[Head]:
    """One or two heads a task."""
    names = (
        "classification/bert regression/bert multi_label/roberta tagging/distilbert question_answering/bert "
        "masked_lm/modernbert causal_lm/gpt2 causal_lm/mixtral seq2seq/t5 seq2seq/bart"
    )
    return [Head.parse(name) for name in names.split()]
