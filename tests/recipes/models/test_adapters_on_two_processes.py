"""Adapters on two processes: the same as on one, under DDP and DeepSpeed."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path

import pytest
import torch

from tests import launch
from tests.recipes.models.adapter_runs import R, weights

PAIRED = (
    "--do_train", "--max_train_samples=200", "--max_length=32", "--max_steps=4", "--save_strategy=no",
    "--eval_strategy=no", "--logging_steps=1", "--dropout=0", "--peft=lora", f"--lora_r={R}",
    "--tokens_per_step=1024", "--max_tokens_per_device=512",
)  # fmt: skip


@pytest.mark.parametrize(
    "preset, recipe, more",
    [
        pytest.param("none", "text_classification", (), marks=pytest.mark.slow),
        *(
            pytest.param(preset, recipe, more, marks=pytest.mark.slow)
            for preset in ("zero2", "zero3", "zero3_offload")
            for recipe, more in (
                ("text_classification", ()),
                ("causal_lm", ("--lora_modules_to_save=embeddings",)),
                ("summarization", ("--lora_modules_to_save=embeddings", "--max_target_length=12")),
                ("masked_lm", ("--peft=dora",)),
                ("token_classification", ()),
                # Two biases of a span head have only rounding noise for a gradient, which Adam scales up.
                ("question_answering", ("--adam_epsilon=1e-6", "--max_length=96")),
                ("translation", ("--max_target_length=12",)),
            )
            if preset != "zero3_offload" or recipe == "text_classification"
        ),
    ],
)
def test_two_processes_train_and_save_the_same_adapter(
    preset: str, recipe: str, more: tuple[str, ...], tmp_path: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    module = importlib.import_module(f"recipes.{recipe}")
    assert launch.call(module.main, *PAIRED, *more, f"--output_dir={one}") == 0
    found = launch.run(recipe, *PAIRED, *more, f"--preset={preset}", output_dir=two, nproc=2)
    engine = "ddp" if preset == "none" else f"deepspeed-{preset.replace('_', '-')}"
    assert (found["world_size"], found["engine"]) == (2, engine)
    assert launch.losses(two) == pytest.approx(launch.losses(one), rel=1e-4)
    mine, theirs = weights(two), weights(one)
    assert {name: tensor.shape for name, tensor in mine.items()} == {n: t.shape for n, t in theirs.items()}
    assert (two / "adapter_model.safetensors").stat().st_size == (
        one / "adapter_model.safetensors"
    ).stat().st_size
    apart = sum(float((mine[name] - theirs[name]).square().sum()) for name in mine) ** 0.5
    assert apart <= 1e-4 * sum(float(tensor.square().sum()) for tensor in theirs.values()) ** 0.5
    assert (two / "base" / "model.safetensors").read_bytes() == (
        one / "base" / "model.safetensors"
    ).read_bytes()


@pytest.mark.slow
def test_two_processes_resume_and_go_on_under_zero3(tmp_path: Path) -> None:
    """A head that is kept in full is a copy of a partitioned module: its weights come back all the same."""
    one, two, on = (tmp_path / name for name in ("one", "two", "on"))
    flags = [flag for flag in PAIRED if flag != "--save_strategy=no"]
    saves = ("--save_strategy=steps", "--save_steps=2", "--preset=zero3")
    launch.run("text_classification", *flags, *saves, output_dir=one, nproc=2)
    shutil.copytree(one / "checkpoint-2", two / "checkpoint-2")
    launch.run("text_classification", *flags, *saves, output_dir=two, nproc=2)
    mine, theirs = weights(two), weights(one)
    assert mine.keys() == theirs.keys()
    assert all(torch.allclose(mine[name], theirs[name], rtol=1e-5, atol=1e-7) for name in mine)
    assert launch.losses(two) == pytest.approx(launch.losses(one), rel=1e-5) and len(launch.losses(two)) == 4
    plain = [flag for flag in flags if not flag.startswith(("--peft", "--lora"))]
    still = ("--learning_rate=0", "--preset=zero3", f"--adapter_name_or_path={one}")
    launch.run("text_classification", *plain, *still, output_dir=on, nproc=2)
    mine = weights(on)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
