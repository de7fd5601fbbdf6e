"""LoRA in every recipe: it beats the baseline, its files hold the adapter and no more, and load again."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
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
from tests.recipes import test_language_models as language
from tests.recipes import test_question_answering as spans
from tests.recipes import test_resume as resume
from tests.recipes import test_text_classification as texts
from tests.recipes import test_token_classification as tags
from tests.recipes.seq2seq_runs import ROWS as PAIRS
from tests.recipes.seq2seq_runs import write
from tests.recipes.test_translation import ROWS as SENTENCES

R = 8


@dataclass(frozen=True, kw_only=True)
class Case:
    """A recipe on a task that a small model learns in seconds.

    Attributes:
        auto_class: Of its models.
        rows: Of the training file.
        beats: Whether the scores beat the baseline.
        settings: Beside those of all.
    """

    auto_class: Any
    rows: list[dict[str, Any]]
    beats: Callable[[dict[str, Any]], bool]
    settings: dict[str, Any]


def better_perplexity(found: dict[str, Any]) -> bool:
    return found["eval_perplexity"] < 0.8 * found["eval_perplexity_baseline"]


CASES = {
    "text_classification": Case(
        auto_class=transformers.AutoModelForSequenceClassification,
        rows=[{"text": text, "label": label} for text, label in texts.ROWS],
        beats=lambda found: found["eval_accuracy"] > 0.4 + found["eval_majority_baseline"],
        settings={"max_steps": 20},
    ),
    "token_classification": Case(
        auto_class=transformers.AutoModelForTokenClassification,
        rows=[{"tokens": words, "ner_tags": names} for words, names in tags.ROWS],
        beats=lambda found: found["eval_f1"] > 0.2 + found["eval_f1_baseline"],
        settings={"max_steps": 40},
    ),
    "question_answering": Case(
        auto_class=transformers.AutoModelForQuestionAnswering,
        rows=spans.ROWS,
        beats=lambda found: found["eval_f1"] > 30 + found["eval_f1_baseline"],
        settings={"max_steps": 60, "doc_stride": 8, "max_question_tokens": 8},
    ),
    "masked_lm": Case(
        auto_class=transformers.AutoModelForMaskedLM,
        rows=[{"text": text} for text in language.TEXTS],
        beats=better_perplexity,
        settings={"max_steps": 40},
    ),
    "causal_lm": Case(
        auto_class=transformers.AutoModelForCausalLM,
        rows=[{"text": text} for text in language.TEXTS],
        beats=better_perplexity,
        settings={"max_steps": 40},
    ),
    "summarization": Case(
        auto_class=transformers.AutoModelForSeq2SeqLM,
        rows=[{"article": text, "highlights": summary} for text, summary in PAIRS],
        beats=lambda found: found["eval_rougeL"] > found["eval_rougeL_baseline"],
        settings={"max_steps": 60, "max_target_length": 12, "source_prefix": "tldr: "},
    ),
    "translation": Case(
        auto_class=transformers.AutoModelForSeq2SeqLM,
        rows=[{"translation": {"xx": source, "en": target}} for source, target in SENTENCES],
        beats=lambda found: found["eval_bleu"] > found["eval_bleu_baseline"],
        settings={"max_steps": 60, "max_target_length": 12, "source_lang": "xx"},
    ),
}


def settings_of(recipe: str, folder: Path, **more: Any) -> dict[str, Any]:
    case = CASES[recipe]
    train = write(folder / "train.jsonl", case.rows)
    dev = write(folder / "dev.jsonl", case.rows[:16])
    common = dict(
        train_file=train, validation_file=dev, max_length=32, max_tokens_per_device=512, tokens_per_step=512,
        logging_steps=20, save_strategy="no", eval_strategy="no", warmup_steps=0, learning_rate=1e-2,
        peft="lora", lora_r=R, lora_modules_to_save=["embeddings"], output_dir=str(folder / "run"),
    )  # fmt: skip
    return {**common, **case.settings, **more}


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


# ---- Killed and resumed ----

SHORT = (
    "--peft=lora", "--max_train_samples=200", "--max_eval_samples=20", "--max_length=32", "--max_steps=9",
    "--save_strategy=steps", "--save_steps=3", "--eval_strategy=no", "--logging_steps=1",
    "--lora_dropout=0.1",
)  # fmt: skip


def weights(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def same(one: Path, other: Path) -> bool:
    mine, theirs = weights(one), weights(other)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert launch.call(texts.main, *SHORT, "--save_total_limit=9", f"--output_dir={folder}") == 0
    return folder


def test_a_resumed_run_ends_with_the_same_adapter(whole: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    shutil.copytree(whole / "checkpoint-6", cut / "checkpoint-6")
    assert launch.call(texts.main, *SHORT, f"--output_dir={cut}") == 0
    assert same(cut, whole)
    assert launch.losses(cut) == launch.losses(whole) and len(launch.losses(cut)) == 9
    # Two moments of each trained number, and nothing of the frozen ones.
    optimizer = torch.load(whole / "checkpoint-9" / "optimizer.pt")["state"]
    moments = sum(state[name].numel() for state in optimizer.values() for name in ("exp_avg", "exp_avg_sq"))
    assert moments == 2 * sum(tensor.numel() for tensor in weights(whole).values())


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_adapter(whole: Path, tmp_path: Path) -> None:
    """Killed for real, in a process of its own, behind step 6."""
    run = tmp_path / "killed"
    script = launch.ROOT / "recipes" / "text_classification.py"
    started = subprocess.Popen(
        [sys.executable, str(script), *SHORT, f"--output_dir={run}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    resume.wait_for(run / "checkpoint-6")
    os.kill(started.pid, signal.SIGKILL)
    started.wait()
    assert not (run / "all_results.json").exists()
    assert launch.call(texts.main, *SHORT, f"--output_dir={run}") == 0
    assert same(run, whole)
    assert launch.losses(run) == launch.losses(whole) and len(launch.losses(run)) == 9


@pytest.mark.parametrize(
    "flags, says",
    [
        (("--lora_r=4",), "adapter: the checkpoint has lora r=16 alpha=32, this run lora r=4 alpha=8"),
        (
            ("--peft=none", "--lora_dropout=0"),
            "adapter: the checkpoint has lora r=16 alpha=32, this run None",
        ),
    ],
)
def test_another_adapter_is_not_resumed(
    flags: tuple[str, ...], says: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole / "checkpoint-3", tmp_path / "checkpoint-3")
    assert launch.call(texts.main, *SHORT, *flags, f"--output_dir={tmp_path}") == 2
    assert says in launch.only_error(capsys.readouterr().err)


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


# ---- Two processes ----

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
