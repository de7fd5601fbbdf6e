"""Adapters on tiny models of many kinds: what is trained and saved, by formula; gradients; refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors import safe_open

from hf_dist.config import ModelConfig, PeftConfig, RunConfig
from hf_dist.errors import CheckpointError, ConfigError, EngineError
from hf_dist.training.adapters import lora
from hf_dist.training.adapters import table as adapter_table
from tests.training import runs, toy
from tests.training.run.test_trainer import SPLITS

BERT = dict(
    vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
    max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
LLAMA = dict(
    vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
DISTILBERT = dict(vocab_size=50, dim=16, n_layers=2, n_heads=2, hidden_dim=24, max_position_embeddings=32)
BART = dict(
    vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=32,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2,
)  # fmt: skip

# Model -> (auto class, config, parameters of the head, and of the adapter at rank 1), counted by hand: the
# adapter of a layer has in + out parameters a rank.
ATTENTION = 4 * 32
MLP = 16 + 24
MODELS: dict[str, tuple[str, Any, int, int]] = {
    "bert classifier": (
        "SequenceClassification", transformers.BertConfig(**BERT, num_labels=3),
        3 * 16 + 3, 2 * (ATTENTION + 2 * MLP) + 32,  # and the pooler
    ),
    # A head of two layers, the first of which peft would give an adapter as well.
    "distilbert classifier": (
        "SequenceClassification", transformers.DistilBertConfig(**DISTILBERT, num_labels=3),
        16 * 16 + 16 + 3 * 16 + 3, 2 * (ATTENTION + 2 * MLP),
    ),
    "roberta classifier": (
        "SequenceClassification",
        transformers.RobertaConfig(**BERT, num_labels=3, pad_token_id=0, bos_token_id=1, eos_token_id=2),
        16 * 16 + 16 + 3 * 16 + 3, 2 * (ATTENTION + 2 * MLP),
    ),
    "llama classifier": (
        "SequenceClassification", transformers.LlamaConfig(**LLAMA, num_labels=3),
        3 * 16, 2 * (2 * 32 + 2 * 24 + 3 * MLP),
    ),
    "bart classifier": (
        "SequenceClassification", transformers.BartConfig(**BART, num_labels=3),
        16 * 16 + 16 + 3 * 16 + 3, 3 * ATTENTION + 4 * MLP,
    ),
    "bert tagger": (
        "TokenClassification", transformers.BertConfig(**BERT, num_labels=5),
        5 * 16 + 5, 2 * (ATTENTION + 2 * MLP),
    ),
    "bert spans": (
        "QuestionAnswering", transformers.BertConfig(**BERT), 2 * 16 + 2, 2 * (ATTENTION + 2 * MLP)
    ),
    # The masked language model's own head has a linear layer before the tied one.
    "bert masked": ("MaskedLM", transformers.BertConfig(**BERT), 0, 2 * (ATTENTION + 2 * MLP) + 32),
    "gpt2": (
        "CausalLM",
        transformers.GPT2Config(
            vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=2
        ),
        0, 2 * ((16 + 48) + 32 + 2 * (16 + 64)),
    ),
    "llama": ("CausalLM", transformers.LlamaConfig(**LLAMA), 0, 2 * (2 * 32 + 2 * 24 + 3 * MLP)),
    "t5": (
        "Seq2SeqLM",
        transformers.T5Config(
            vocab_size=50, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, dropout_rate=0.0,
            decoder_start_token_id=0,
        ),
        0, 3 * ATTENTION + 2 * 2 * MLP,
    ),
    "bart": ("Seq2SeqLM", transformers.BartConfig(**BART), 0, 3 * ATTENTION + 2 * 2 * MLP),
}  # fmt: skip


def base(name: str) -> tuple[Any, Any]:
    auto_class = getattr(transformers, f"AutoModelFor{MODELS[name][0]}")
    torch.manual_seed(1)
    return auto_class.from_config(MODELS[name][1]).eval(), auto_class


def adapted(name: str, **settings: Any) -> PeftModel:
    model, auto_class = base(name)
    found = lora.add_adapter(
        model, auto_class, PeftConfig(**{"peft": "lora", "lora_r": 2, **settings}), seed=5
    )
    stir(found)
    return found


def stir(model: PeftModel) -> None:
    """An adapter starts as nothing (B is zero): here it does something."""
    torch.manual_seed(2)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)


def inputs(model: Any) -> dict[str, torch.Tensor]:
    tokens = torch.randint(4, 50, (3, 9), generator=torch.Generator().manual_seed(3))
    tokens[:, -1] = 2
    batch = {"input_ids": tokens}
    if model.config.is_encoder_decoder and "Sequence" not in model.get_base_model().__class__.__name__:
        batch["decoder_input_ids"] = tokens[:, :5]
    return batch


def logits(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        found = model.eval()(**batch)
    return found["start_logits"] if "start_logits" in found else found["logits"]


def saved_tensors(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("name", MODELS)
def test_what_is_trained_and_saved_follows_from_the_ranks(name: str, tmp_path: Path) -> None:
    model = adapted(name)
    _, _, head, each_rank = MODELS[name]
    table = adapter_table.trained_parameters(model)
    assert sum(entry.trainable for entry in table.values()) == head + 2 * each_rank
    unadapted = sum(parameter.numel() for parameter in base(name)[0].parameters())
    assert sum(entry.all for entry in table.values()) == unadapted + 2 * each_rank
    model.save_pretrained(tmp_path)
    tensors = saved_tensors(tmp_path)
    assert sum(tensor.nbytes for tensor in tensors.values()) == 4 * (head + 2 * each_rank)
    assert all(tensor.numel() for tensor in tensors.values())
    fresh, _ = base(name)
    again = PeftModel.from_pretrained(fresh, str(tmp_path))
    batch = inputs(model)
    wanted = logits(model, batch)
    assert not torch.allclose(wanted, logits(base(name)[0], batch), rtol=1e-3)
    assert torch.equal(logits(again, batch), wanted)


@pytest.mark.parametrize("peft, r, more", [("dora", 2, 1), ("rslora", 3, 0)])
def test_the_kin_of_lora(peft: str, r: int, more: int, tmp_path: Path) -> None:
    model = adapted("bert tagger", peft=peft, lora_r=r)
    model.save_pretrained(tmp_path)
    # DoRA has a magnitude for each output of a layer: 16 of 5 layers and 24 of one, two times.
    magnitudes = more * 2 * (5 * 16 + 24)
    stored = sum(tensor.numel() for tensor in saved_tensors(tmp_path).values())
    assert stored == 85 + r * MODELS["bert tagger"][3] + magnitudes
    layer = next(m for n, m in model.named_modules() if n.endswith("layer.0.attention.self.query"))
    assert layer.scaling["default"] == pytest.approx(2 * r / (r**0.5 if peft == "rslora" else r))


def test_transformers_still_loads_dora_wrong(tmp_path: Path) -> None:
    """Transformers 5.24 doesn't find DoRA's magnitudes; once this fails, the card may load the folder."""
    model = adapted("bert tagger", peft="dora")
    base("bert tagger")[0].save_pretrained(tmp_path / "base")
    model.active_peft_config.base_model_name_or_path = str(tmp_path / "base")
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path)
    batch = inputs(model)
    assert not torch.allclose(logits(loaded, batch), logits(model, batch), rtol=1e-3)


def test_named_targets_and_alpha() -> None:
    model = adapted("bert tagger", lora_target=["query,value"], lora_alpha=3)
    assert sum(e.trainable for e in adapter_table.trained_parameters(model).values()) == 85 + 2 * 4 * 32
    layer = next(m for n, m in model.named_modules() if n.endswith("layer.0.attention.self.query"))
    assert layer.scaling["default"] == 1.5


# Modules that hold the embeddings, and what else they hold (the bias of BERT's output layer).
@pytest.mark.parametrize(
    "name, holders, more", [("bert masked", 2, 50), ("gpt2", 2, 0), ("t5", 4, 0), ("bart", 4, 0)]
)
def test_embeddings_kept_in_full_stay_tied(name: str, holders: int, more: int, tmp_path: Path) -> None:
    model = adapted(name, lora_modules_to_save=["embeddings"])
    model.save_pretrained(tmp_path)
    stored = sum(tensor.numel() for tensor in saved_tensors(tmp_path).values())
    assert stored == holders * 50 * 16 + more + 2 * MODELS[name][3]
    # Counted and trained once.
    trained = sum(entry.trainable for entry in adapter_table.trained_parameters(model).values())
    assert trained == 50 * 16 + more + 2 * MODELS[name][3]
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == trained
    batch = inputs(model)
    again = PeftModel.from_pretrained(base(name)[0], str(tmp_path))
    assert torch.equal(logits(again, batch), logits(model, batch))


def test_the_same_adapter_on_every_rank_and_the_random_state_is_left_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    found = []
    for _ in range(2):
        model, auto_class = base("gpt2")
        torch.manual_seed(7)
        made = lora.add_adapter(model, auto_class, PeftConfig(peft="lora"), seed=5)
        assert torch.equal(torch.rand(3), expected)
        found.append(torch.cat([p.flatten() for p in made.parameters() if p.requires_grad]))
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"lora_target": ["query", "vale"]}, r"--lora_target vale.*did you mean value\?"),
        ({"lora_modules_to_save": ["poler"]}, r"--lora_modules_to_save poler.*did you mean pooler\?"),
        ({"lora_modules_to_save": ["bert", "classifier"]}, "no adapter can be added"),
    ],
)  # fmt: skip
def test_modules_that_are_not_there(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        adapted("bert classifier", **settings)


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"lora_r": 4}, "--lora_r given and no adapter"),
        ({"peft": "lora", "lora_r": 0}, "--lora_r is 0"),
        ({"peft": "lora", "lora_alpha": 0}, "--lora_alpha is 0"),
        ({"peft": "lora", "lora_dropout": 1.0}, "--lora_dropout is 1"),
        ({"peft": "lora", "lora_target": [","]}, "--lora_target names no module"),
        ({"adapter_name_or_path": "x", "lora_r": 4}, "which brings its own"),
        ({"quantize": "4bit"}, "--quantize 4bit freezes the weights"),
    ],
)
def test_bad_settings(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        PeftConfig(**settings)


def test_quantised_weights_need_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is one, bitsandbytes is asked for next; neither is here, so the GPU is made up."""
    settings = PeftConfig(peft="lora", quantize="4bit")
    assert lora.load_options(PeftConfig(peft="lora"), {}) == {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EngineError, match="--quantize 4bit needs a CUDA GPU"):
        lora.load_options(settings, {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EngineError, match="pip install bitsandbytes"):
        lora.load_options(settings, {})


def prepared(model: Any, auto_class: Any, folder: Path, **settings: Any) -> Any:
    config = RunConfig(model=ModelConfig(model_name_or_path="some/name"), peft=PeftConfig(**settings))
    made = lora.wrap(model, auto_class, config, seed=1)
    lora.prepare(made, config, output_dir=folder)
    return made


def test_all_or_nothing_is_refused(tmp_path: Path) -> None:
    model, auto_class = base("bert tagger")
    assert prepared(model, auto_class, tmp_path) is model
    everything = ["embeddings", "position_embeddings", "token_type_embeddings", "LayerNorm", "layer.1"]
    everything += ["layer.0.output", "layer.0.intermediate", "attention.output", "key", "value"]
    # Only `query` of one layer is left for an adapter, whose frozen weights are the last.
    partly = prepared(model, auto_class, tmp_path, peft="lora", lora_modules_to_save=everything)
    table = adapter_table.trained_parameters(partly)
    assert sum(entry.all - entry.trainable for entry in table.values()) == 16 * 16 + 16
    for parameter in partly.parameters():
        parameter.requires_grad = False
    with pytest.raises(ConfigError, match="no parameter of the adapter would be trained"):
        adapter_table.refuse_all_or_nothing(adapter_table.trained_parameters(partly))
    for parameter in partly.parameters():
        parameter.requires_grad = True
    with pytest.raises(ConfigError, match="every parameter would be trained"):
        adapter_table.refuse_all_or_nothing(adapter_table.trained_parameters(partly))


def test_the_table_says_what_is_trained() -> None:
    lines = adapter_table.table_lines(
        adapter_table.trained_parameters(adapted("bert tagger", lora_target=["query"]))
    )
    rows = {line.split()[0]: line.split()[1:] for line in lines}
    assert rows["module"] == ["number", "trainable", "all", "share"]
    assert rows["query"] == ["2", "128", "672", "19.0%"]
    assert rows["classifier"] == ["1", "85", "85", "100.0%"]
    assert rows["word_embeddings"] == ["1", "0", "800", "0.0%"]
    assert rows["sum"][1] == "213"


def test_going_on_with_an_adapter(tmp_path: Path) -> None:
    first = adapted("bert classifier")
    first.save_pretrained(tmp_path / "one")
    model, auto_class = base("bert classifier")
    second = prepared(model, auto_class, tmp_path, adapter_name_or_path=str(tmp_path / "one"))
    batch = inputs(second)
    assert torch.equal(logits(second, batch), logits(first, batch))
    trained = [name for name, p in second.named_parameters() if p.requires_grad]
    assert trained == [name for name, p in first.named_parameters() if p.requires_grad]
    other, auto_class = base("bert tagger")
    with pytest.raises(CheckpointError, match="can't be loaded|doesn't fit"):
        prepared(other, auto_class, tmp_path, adapter_name_or_path=str(tmp_path / "one"))
    with pytest.raises(CheckpointError, match="nowhere"):
        prepared(other, auto_class, tmp_path, adapter_name_or_path=str(tmp_path / "nowhere"))


# ---- Trained ----


def toy_adapter(kind: str, *, architecture: str | None = None, **settings: Any) -> PeftModel:
    net: Any = toy.model(kind, architecture=architecture)
    names = {
        "tagging": "TokenClassification",
        "mlm": "MaskedLM",
        "clm": "CausalLM",
        "seq2seq": "Seq2SeqLM",
        "qa": "QuestionAnswering",
    }
    auto_class = getattr(transformers, f"AutoModelFor{names.get(kind, 'SequenceClassification')}")
    made = lora.add_adapter(net, auto_class, PeftConfig(**{"peft": "lora", "lora_r": 3, **settings}), seed=5)
    stir(made)
    return made


@pytest.mark.parametrize("split", ["1x4 with an empty micro-batch"])
@pytest.mark.parametrize("kind", toy.KINDS)
def test_a_split_step_has_the_adapter_gradient_of_the_whole(kind: str, split: str, tmp_path: Path) -> None:
    data = toy.examples(kind, 16, seed=3)
    loss, gradient = toy.reference(kind, toy_adapter(kind), data)
    assert gradient.count_nonzero() > 0.5 * gradient.numel()
    trainer = runs.trainer(kind, toy.ListedPlan(SPLITS[split], data), data, tmp_path, net=toy_adapter(kind))
    trainer.train()
    assert toy.relative_error(trainer.gradients[0], gradient) < 1e-5
    assert runs.logged(trainer, "loss") == [pytest.approx(loss, rel=1e-5)]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["single", "clm", "seq2seq"])
def test_gradient_checkpointing_with_a_frozen_base(kind: str, reentrant: bool, tmp_path: Path) -> None:
    data = toy.examples(kind, 16, seed=3)
    _, gradient = toy.reference(kind, toy_adapter(kind), data)
    trainer = runs.trainer(
        kind, toy.ListedPlan(SPLITS["1x4"], data), data, tmp_path, net=toy_adapter(kind),
        gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": reentrant},
    )  # fmt: skip
    trainer.train()
    assert toy.relative_error(trainer.gradients[0], gradient) < 1e-5


def test_the_frozen_base_gets_no_optimizer_state_and_does_not_move(tmp_path: Path) -> None:
    data = toy.examples("single", 16, seed=3)
    net = toy_adapter("single")
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    trainer = runs.trainer(
        "single", toy.ListedPlan(SPLITS["1x4"], data), data, tmp_path, net=net, optim="adamw_torch"
    )
    trainer.train()
    held = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    for name, parameter in net.named_parameters():
        assert (id(parameter) in held) == parameter.requires_grad
        assert torch.equal(parameter, before[name]) != parameter.requires_grad, name
    assert all(id(parameter) in held for parameter in trainer.optimizer.optimizer.state)
