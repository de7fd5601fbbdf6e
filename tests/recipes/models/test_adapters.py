"""LoRA in every recipe: it beats the baseline, its files hold the adapter and no more, and load again."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors import safe_open
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_dist.merge import TOLERANCE, merge, random_batch, relative_difference
from tests import launch
from tests.recipes.models.adapter_runs import CASES, SHORT, R, same, settings_of, weights
from tests.recipes.tasks import test_text_classification as texts


def expected_tensors(model: Any) -> dict[str, int]:
    """Elements of each saved tensor by the base model: (in + out) x rank a linear layer, heads whole."""
    output = model.get_output_embeddings()
    shared = model.get_input_embeddings().weight
    head = None if output is not None else model.base_model
    expected: dict[str, int] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        weight = module._parameters.get("weight")
        in_head = head is not None and "." not in name and module is not head and name
        if weight is shared or in_head:
            for part, tensor in module.named_parameters():
                expected[f"{name}.{part}"] = tensor.numel()
        elif isinstance(module, (nn.Linear, Conv1D)):
            rows, columns = weight.shape if isinstance(module, Conv1D) else weight.T.shape
            expected[f"{name}.lora_A.weight"] = rows * R
            expected[f"{name}.lora_B.weight"] = columns * R
    return {f"base_model.model.{name}": count for name, count in expected.items()}


def held_tensors(folder: Path) -> dict[str, int]:
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        return {name: file.get_tensor(name).numel() for name in file.keys()}  # noqa: SIM118


def outputs(model: Any, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        found = model.eval()(**batch)
    return [found[name] for name in ("logits", "start_logits", "end_logits") if found.get(name) is not None]


QUICK = ("text_classification", "causal_lm")


@pytest.mark.parametrize(
    "recipe", [r if r in QUICK else pytest.param(r, marks=pytest.mark.slow) for r in CASES]
)
def test_a_recipe_with_lora(recipe: str, tmp_path: Path) -> None:
    case = CASES[recipe]
    made = importlib.import_module(f"recipes.{recipe}").build(**settings_of(recipe, tmp_path))
    found = made.run()
    assert case.beats(found), found
    folder = tmp_path / "run"
    plain = case.auto_class.from_pretrained(folder / "base")
    assert held_tensors(folder) == expected_tensors(plain)
    assert not (folder / "model.safetensors").exists()
    again = PeftModel.from_pretrained(plain, str(folder))
    batch = random_batch(again.config)
    wanted = outputs(made.model, batch)
    assert relative_difference(outputs(again, batch), wanted) == 0
    merged = merge(folder, tmp_path / "merged")
    assert merged.difference <= TOLERANCE
    alone = case.auto_class.from_pretrained(tmp_path / "merged")
    assert relative_difference(outputs(alone, batch), wanted) <= TOLERANCE
    card = (folder / "README.md").read_text()
    assert "library_name: peft" in card
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        exec(card.partition("```python\n")[2].partition("```")[0], {"FOLDER": str(folder)})
    assert shown.getvalue().strip()


def test_the_best_adapter_is_loaded_at_the_end(tmp_path: Path) -> None:
    flags = ["--eval_strategy=steps", "--eval_steps=3", "--load_best_model_at_end", "--learning_rate=0.03"]
    kept = "--metric_for_best_model=loss"
    assert launch.call(texts.main, *SHORT, *flags, kept, f"--output_dir={tmp_path}") == 0
    state = json.loads((tmp_path / "trainer_state.json").read_text())
    assert same(tmp_path, tmp_path / Path(state["best_model_checkpoint"]).name)


def test_one_adapter_goes_on_and_is_evaluated_alone(whole: Path, tmp_path: Path) -> None:
    first, second, alone = whole, tmp_path / "second", tmp_path / "alone"
    flags = [flag for flag in SHORT if not flag.startswith(("--peft", "--lora"))]
    going_on = [f"--adapter_name_or_path={first}", *flags]
    assert launch.call(texts.main, *going_on, f"--output_dir={second}") == 0
    assert launch.losses(second)[0] < launch.losses(first)[0]
    assert not same(first, second)
    named = json.loads((second / "adapter_config.json").read_text())["base_model_name_or_path"]
    # Its base has no name either: it is kept again.
    assert named == str(second / "base")
    kept = [(folder / "base" / "model.safetensors").read_bytes() for folder in (first, second)]
    assert kept[0] == kept[1]
    evaluated = [f"--adapter_name_or_path={second}", "--do_eval", "--max_eval_samples=20", "--max_length=32"]
    assert launch.call(texts.main, *evaluated, f"--output_dir={alone}") == 0
    found = [json.loads((folder / "all_results.json").read_text()) for folder in (second, alone)]
    assert found[0]["eval_loss"] == pytest.approx(found[1]["eval_loss"], rel=1e-5)


def test_a_named_base_gets_a_new_head(whole: Path, tmp_path: Path) -> None:
    """The base has 20 classes of its own; the labels of the new ones are in the card's code and merged."""
    named, run = tmp_path / "named", tmp_path / "run"
    merge(whole, named)
    files = settings_of("text_classification", tmp_path)
    flags = [f"--{name}={files[name]}" for name in ("train_file", "validation_file")]
    flags += [f"--model_name_or_path={named}", "--new_head", "--learning_rate=1e-2", "--max_steps=20"]
    flags += ["--lora_modules_to_save=embeddings"]
    short = [flag for flag in SHORT if not flag.startswith(("--max_steps", "--save"))]
    assert launch.call(texts.main, *short, *flags, "--save_strategy=no", f"--output_dir={run}") == 0
    assert json.loads((run / "all_results.json").read_text())["eval_accuracy"] > 0.9
    # Its weights are where they were: only its config, with the new labels, is kept.
    assert [path.name for path in (run / "base").iterdir()] == ["config.json"]
    code = (run / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        exec(code, {"FOLDER": str(run)})
    assert "'label': 'pos'" in shown.getvalue() or "'label': 'neg'" in shown.getvalue()
    assert merge(run, tmp_path / "merged").base == str(named)
    classify = transformers.pipeline("text-classification", model=str(tmp_path / "merged"), device="cpu")
    assert [found["label"] for found in classify(["good good good", "bad bad bad"])] == ["pos", "neg"]


def test_new_tokens_are_saved_with_the_adapter(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named, run = tmp_path / "named", tmp_path / "run"
    merge(whole, named)
    tokenizer = transformers.AutoTokenizer.from_pretrained(named)
    assert tokenizer.add_tokens(["qqq", "zzz", "jjj"]) == 3
    tokenizer.save_pretrained(tmp_path / "more")
    rows = len(tokenizer)
    short = [*SHORT, f"--model_name_or_path={named}", f"--tokenizer_name={tmp_path / 'more'}"]
    assert launch.call(texts.main, *short, f"--output_dir={run}") == 2
    assert "say --resize_embeddings" in launch.only_error(capsys.readouterr().err)
    assert launch.call(texts.main, *short, "--resize_embeddings", f"--output_dir={run}") == 0
    embeddings = "base_model.model.bert.embeddings.word_embeddings.weight"
    assert len(weights(run)[embeddings]) == rows
    assert json.loads((run / "base" / "config.json").read_text())["vocab_size"] == rows - 3
    # A killed run goes on, another one evaluates it, and it merges.
    shutil.copytree(run / "checkpoint-6", tmp_path / "cut" / "checkpoint-6")
    assert launch.call(texts.main, *short, "--resize_embeddings", f"--output_dir={tmp_path / 'cut'}") == 0
    assert same(tmp_path / "cut", run)
    evaluated = [f"--adapter_name_or_path={run}", "--do_eval", "--max_eval_samples=20", "--max_length=32"]
    assert launch.call(texts.main, *evaluated, f"--output_dir={tmp_path / 'alone'}") == 0
    found = [json.loads((tmp_path / name / "all_results.json").read_text()) for name in ("run", "alone")]
    assert found[0]["eval_loss"] == pytest.approx(found[1]["eval_loss"], rel=1e-5)
    merge(run, tmp_path / "merged")
    merged = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert merged.get_input_embeddings().num_embeddings == rows
    code = (run / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        exec(code, {"FOLDER": str(run)})
    assert "label" in shown.getvalue()
