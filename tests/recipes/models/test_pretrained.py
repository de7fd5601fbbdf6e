"""A pretrained encoder with a new head: the same start on every engine, and again after a kill.

The encoder is trained here, seconds before, by the masked_lm recipe.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_dist.verify import verify
from recipes.masked_lm import main as masked_lm
from recipes.text_classification import main as text_classification
from tests.launch import ROOT, call, losses, start

SMALL = ("--max_train_samples=200", "--max_length=32", "--max_tokens_per_device=1024", "--seed=5")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pretrained") / "encoder"
    flags = ("--max_steps=3", "--max_train_samples=100", "--max_eval_samples=20", "--max_length=32")
    assert call(masked_lm, *flags, "--save_strategy=no", f"--output_dir={folder}") == 0
    return folder


def same_weights(one: Path, other: Path) -> bool:
    mine, theirs = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_new_head_is_the_same_on_one_process_and_under_zero3(encoder):
    flags = [f"--model_name_or_path={encoder}", *SMALL, "--max_steps=2"]
    assert verify("text_classification", splits="1x1,2x1", presets="none,zero3", flags=flags, tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("peft", ["none", "lora"])
@pytest.mark.parametrize(
    "recipe", ["text_classification", "token_classification", "question_answering", "masked_lm"]
)
def test_a_pretrained_model_trains_the_same_on_every_split_and_engine(encoder, recipe, peft):
    flags = [f"--model_name_or_path={encoder}", *SMALL, "--max_steps=6", f"--peft={peft}"]
    if recipe == "question_answering":
        # A row must hold the question and some of its text.
        flags += ["--max_length=128"]
    assert verify(recipe, splits="1x1,1x4,2x2", presets="none,zero2,zero3", flags=flags, tolerance=1e-5)


def test_the_same_command_twice_and_after_a_kill_before_the_first_checkpoint(encoder, tmp_path):
    """Dropout is on: the random state behind it is the run's own as well."""
    flags = [f"--model_name_or_path={encoder}", *SMALL, "--max_steps=8", "--logging_steps=1"]
    flags += ["--eval_strategy=no", "--max_eval_samples=20", "--save_strategy=steps", "--save_steps=8"]
    torch.manual_seed(1)
    assert call(text_classification, *flags, f"--output_dir={tmp_path / 'one'}") == 0
    torch.manual_seed(2)
    assert call(text_classification, *flags, f"--output_dir={tmp_path / 'two'}") == 0
    assert same_weights(tmp_path / "one", tmp_path / "two")

    dump = tmp_path / "batches.jsonl"
    script = str(ROOT / "recipes" / "text_classification.py")
    killed = subprocess.Popen(
        [sys.executable, script, *flags, f"--dump_batches={dump}", f"--output_dir={tmp_path / 'killed'}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    end = time.monotonic() + 200
    while not list(tmp_path.glob("batches.jsonl*")):
        assert time.monotonic() < end and killed.poll() is None, "the run never took a step"
        time.sleep(0.005)
    killed.kill()
    killed.wait()
    assert not list((tmp_path / "killed").glob("checkpoint-*"))
    assert call(text_classification, *flags, f"--output_dir={tmp_path / 'killed'}") == 0
    assert same_weights(tmp_path / "one", tmp_path / "killed")
    assert losses(tmp_path / "one") == losses(tmp_path / "killed")


def test_a_new_head_in_place_of_one_for_other_classes_under_zero3(encoder, tmp_path):
    rows = ["a good day,x", "a bad day,y", "a long day,z"] * 8
    for count, name in ((2, "two"), (3, "three")):
        kept = [row for at, row in enumerate(rows) if at % 3 < count]
        (tmp_path / f"{name}.csv").write_text("text,label\n" + "\n".join(kept) + "\n")
    common = [
        "--dropout=0",
        "--max_steps=2",
        "--max_length=32",
        "--save_strategy=no",
        "--eval_strategy=no",
        "--logging_steps=1",
    ]
    trained = tmp_path / "trained"
    assert call(
        text_classification,
        f"--model_name_or_path={encoder}",
        f"--train_file={tmp_path / 'two.csv'}",
        *common,
        f"--output_dir={trained}",
    ) == 0  # fmt: skip
    flags = [f"--model_name_or_path={trained}", f"--train_file={tmp_path / 'three.csv'}", *common]
    refused = start(
        "text_classification", *flags, "--preset=zero3", f"--output_dir={tmp_path / 'no'}", nproc=2
    )
    errors = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
    assert refused.returncode != 0 and len(errors) == 1
    # The one traceback is torchrun's own, below the error.
    assert "Traceback" not in refused.stderr.split("error: ")[0] and "in rank" not in refused.stderr
    assert "--new_head" in errors[0] and "ignore_mismatched_sizes" not in refused.stderr
    done = start(
        "text_classification",
        *flags,
        "--new_head",
        "--preset=zero3",
        f"--output_dir={tmp_path / 'zero3'}",
        nproc=2,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert call(text_classification, *flags, "--new_head", f"--output_dir={tmp_path / 'one'}") == 0
    assert losses(tmp_path / "zero3")[0] == pytest.approx(losses(tmp_path / "one")[0], rel=1e-5)
