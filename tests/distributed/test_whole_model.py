"""What ZeRO-3 saves is whole: reloaded by one process without DeepSpeed it computes the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open

from tests.distributed.processes import torchrun

SCRIPT = Path(__file__).with_name("whole_model.py")
VOCABULARY = 100


@pytest.fixture(scope="module")
def initial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "initial"
    transformers.set_seed(1)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=64, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def _run(initial: Path, folder: Path, *flags: str) -> tuple[dict, dict]:
    (folder / "initial").symlink_to(initial)
    done = torchrun(SCRIPT, "--folder", str(folder), *flags)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "facts.json").read_text()), torch.load(folder / "live.pt")


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    with safe_open(file, "pt") as tensors:
        return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 (not a dict)


def _same(model: transformers.PreTrainedModel, live: dict) -> None:
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=live["inputs"]).logits
        generated = model.generate(
            input_ids=live["inputs"][:2], max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0
        )
    torch.testing.assert_close(logits, live["logits"], rtol=0, atol=1e-6)
    assert torch.equal(generated, live["generated"])


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["zero3", "zero3_offload"])
def test_a_saved_model_computes_what_the_live_one_did(initial: Path, tmp_path: Path, preset: str) -> None:
    facts, live = _run(initial, tmp_path, "--preset", preset)
    assert facts["engine"].startswith("deepspeed-zero3")
    # Built under zero.Init: each of the two ranks kept half (and a little padding), none the whole.
    assert facts["partitioned"] == facts["parameters"]
    whole = sum(
        weight.numel() for weight in transformers.GPT2LMHeadModel.from_pretrained(initial).parameters()
    )
    assert facts["held"] < 0.51 * whole
    saved = _tensors(tmp_path / "saved" / "model.safetensors")
    assert all(tensor.numel() for tensor in saved.values())
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
    assert model.get_input_embeddings().num_embeddings == VOCABULARY + 6
    assert model.lm_head.weight is model.get_input_embeddings().weight
    _same(model, live)
    before = transformers.GPT2LMHeadModel.from_pretrained(initial)
    assert not torch.equal(before.transformer.h[0].mlp.c_fc.weight, model.transformer.h[0].mlp.c_fc.weight)


@pytest.mark.slow
def test_an_adapter_computes_what_the_live_one_did(initial: Path, tmp_path: Path) -> None:
    import peft

    _, live = _run(initial, tmp_path, "--preset", "zero3", "--lora")
    saved = _tensors(tmp_path / "saved" / "adapter_model.safetensors")
    assert all(tensor.numel() for tensor in saved.values())
    base = transformers.GPT2LMHeadModel.from_pretrained(initial)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "saved").merge_and_unload()
    _same(model, live)


@pytest.mark.slow
def test_the_best_model_is_loaded_at_the_end(initial: Path, tmp_path: Path) -> None:
    facts, live = _run(initial, tmp_path, "--preset", "zero3", "--best")
    best = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "run" / f"checkpoint-{facts['best']}")
    _same(best, live)
