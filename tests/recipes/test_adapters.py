"""LoRA in every recipe: it beats the baseline, its files hold the adapter and no more, and load again."""

from __future__ import annotations

import importlib
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
from tests.recipes import test_language_models as language
from tests.recipes import test_question_answering as spans
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


@pytest.mark.parametrize("recipe", CASES)
def test_a_recipe_with_lora(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    capsys.readouterr()
    exec(card.partition("```python\n")[2].partition("```")[0], {"FOLDER": str(folder)})
    assert capsys.readouterr().out.strip()
