"""`hf-dist merge` on tiny models of all kinds, from adapters as a run leaves them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedTokenizerFast

from hf_dist.cli import main
from hf_dist.data.builtin.small_models import small_bert
from hf_dist.errors import CheckpointError
from hf_dist.merge import TOLERANCE, merge, random_batch, relative_difference
from hf_dist.training.adapters.lora import save_beside
from tests.launch import only_error
from tests.training.adapters.test_lora import MODELS, adapted, base, inputs, logits


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    words = {f"w{number}": number for number in range(50)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "w3")), pad_token="w0")


def left_by_a_run(name: str, folder: Path, **settings: Any) -> Any:
    """A folder as a run without a model name leaves it; returns the adapter model."""
    base(name)[0].save_pretrained(folder / "base")
    model = adapted(name, **settings)
    model.active_peft_config.base_model_name_or_path = str(folder / "base")
    model.save_pretrained(folder)
    save_beside(model, folder)
    tokenizer().save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    "name, settings",
    [
        *((name, {}) for name in MODELS),
        ("bert tagger", {"peft": "dora"}),
        ("gpt2", {"peft": "rslora"}),
        *((name, {"lora_modules_to_save": ["embeddings"]}) for name in ("bert masked", "gpt2", "t5", "bart")),
    ],
)
def test_a_merged_model_loads_without_peft_and_computes_the_same(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    model = left_by_a_run(name, tmp_path / "run", **settings)
    batch = inputs(model)
    wanted = logits(model, batch)
    merged = merge(tmp_path / "run", tmp_path / "out")
    assert merged.difference <= TOLERANCE
    auto_class = base(name)[1]
    again = auto_class.from_pretrained(tmp_path / "out")
    assert not hasattr(again, "peft_config")
    assert relative_difference([logits(again, batch)], [wanted]) <= TOLERANCE
    assert {type(again).__name__} == set(
        json.loads((tmp_path / "out" / "config.json").read_text())["architectures"]
    )
    assert len(PreTrainedTokenizerFast.from_pretrained(tmp_path / "out")) == 50
    assert not list(tmp_path.glob(".*"))


def test_a_moved_run_and_its_checkpoints_find_their_base(tmp_path: Path) -> None:
    left_by_a_run("bert classifier", tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoint-3"
    checkpoint.mkdir()
    for file in (
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ):
        shutil.copy(tmp_path / "run" / file, checkpoint)
    shutil.move(tmp_path / "run", tmp_path / "moved")
    merge(tmp_path / "moved", tmp_path / "one")
    merge(tmp_path / "moved" / "checkpoint-3", tmp_path / "two")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two")]
    assert weights[0] == weights[1]
    shutil.rmtree(tmp_path / "moved" / "base")
    with pytest.raises(CheckpointError, match="the base model of .*moved is gone"):
        merge(tmp_path / "moved", tmp_path / "three")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes(dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = left_by_a_run("llama", tmp_path / "run")
    main(["merge", str(tmp_path / "run"), str(tmp_path / "out"), f"--dtype={dtype}"])
    shown = capsys.readouterr().out
    assert f"in {dtype}; its logits differ" in shown
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.dtype == getattr(torch, dtype)
    batch = inputs(model)
    assert relative_difference([logits(again.float(), batch)], [logits(model, batch)]) < 0.02


def test_a_named_base_with_a_new_head(tmp_path: Path) -> None:
    """The base has a head for two classes of its own; the adapter brings one for three."""
    config = transformers.BertConfig(**{**MODELS["bert classifier"][1].to_dict(), "num_labels": 2})
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "named")
    model, _ = base("bert classifier")
    pretrained = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "named")
    model.bert.load_state_dict(pretrained.bert.state_dict())
    model.save_pretrained(tmp_path / "three")
    from hf_dist.config import PeftConfig
    from hf_dist.training.adapters import lora

    made = lora.add_adapter(
        model, transformers.AutoModelForSequenceClassification, PeftConfig(peft="lora"), seed=1
    )
    made.active_peft_config.base_model_name_or_path = str(tmp_path / "named")
    made.save_pretrained(tmp_path / "run")
    save_beside(made, tmp_path / "run")
    tokenizer().save_pretrained(tmp_path / "run")
    merge(tmp_path / "run", tmp_path / "out")
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    batch = inputs(made)
    assert again.config.num_labels == 3
    assert relative_difference([logits(again, batch)], [logits(made, batch)]) <= TOLERANCE


def test_what_can_not_be_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    left_by_a_run("bert tagger", run)

    def says(*words: str) -> str:
        with pytest.raises(SystemExit):
            main(["merge", *words])
        return only_error(capsys.readouterr().err)

    out = str(tmp_path / "out")
    assert "exists; name a folder" in says(str(run), str(run))
    assert "holds no adapter" in says(str(run / "base"), out)
    assert "holds no adapter" in says(str(tmp_path / "nowhere"), out)
    # Another base: one layer less.
    smaller = transformers.BertConfig(**{**MODELS["bert tagger"][1].to_dict(), "num_hidden_layers": 1})
    shutil.rmtree(run / "base")
    transformers.BertForTokenClassification(smaller).save_pretrained(run / "base")
    assert "doesn't fit" in (said := says(str(run), out)) and "which the model has no place for" in said
    (run / "adapter_config.json").write_text("{")
    assert "adapter_config.json can't be read" in says(str(run), out)
    assert not Path(out).exists()


def test_the_batch_is_made_for_the_model() -> None:
    batch = random_batch(small_bert(tokenizer()))
    assert batch["input_ids"].shape == (4, 24) and int(batch["attention_mask"].sum()) == 2 * 24 + 2 * 12
    assert set(random_batch(MODELS["t5"][1])) == {"input_ids", "attention_mask", "decoder_input_ids"}
