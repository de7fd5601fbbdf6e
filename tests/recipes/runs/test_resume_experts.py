"""A mixture of experts, whose weights change names when they are saved, goes on and comes back as it was."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from hf_dist.data.builtin.small_models import causal_tokenizer
from recipes.causal_lm import main
from tests.launch import call
from tests.recipes.seq2seq_runs import write

FLAGS = (
    "--max_length=32",
    "--max_tokens_per_device=256",
    "--tokens_per_step=256",
    "--logging_steps=1",
    "--max_steps=6",
    "--save_strategy=steps",
    "--save_steps=2",
    "--learning_rate=1e-2",
)


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    tokenizer = causal_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    config = transformers.MixtralConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    transformers.set_seed(1)
    transformers.MixtralForCausalLM(config).save_pretrained(folder / "model")
    words = ("file", "socket", "thread", "class")
    texts = [f"the {word} opens the {other} and closes the {word}" for word in words for other in words]
    write(folder / "texts.jsonl", [{"text": text} for text in texts * 4])
    return (
        *FLAGS,
        f"--model_name_or_path={folder / 'model'}",
        f"--train_file={folder / 'texts.jsonl'}",
        f"--validation_file={folder / 'texts.jsonl'}",
    )


def weights(folder):
    return transformers.MixtralForCausalLM.from_pretrained(folder).state_dict()


def test_resumed_experts_keep_their_weights(flags, tmp_path):
    assert call(main, *flags, "--eval_strategy=no", f"--output_dir={tmp_path / 'whole'}") == 0
    resume = f"--resume={tmp_path / 'whole' / 'checkpoint-4'}"
    assert call(main, *flags, "--eval_strategy=no", resume, f"--output_dir={tmp_path / 'resumed'}") == 0
    mine, theirs = weights(tmp_path / "resumed"), weights(tmp_path / "whole")
    assert any("experts" in name for name in theirs)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_the_best_experts_are_the_ones_that_are_saved(flags, tmp_path):
    # Called best here is the worst one, which is not the last.
    run = tmp_path / "run"
    best = ("--load_best_model_at_end=true", "--metric_for_best_model=loss", "--greater_is_better=true")
    evaluated = ("--eval_strategy=steps", "--eval_steps=2")
    assert call(main, *flags, *best, *evaluated, f"--output_dir={run}") == 0
    state = json.loads((run / "trainer_state.json").read_text())
    assert state["best_global_step"] == 2
    mine, theirs = weights(run), weights(state["best_model_checkpoint"])
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
