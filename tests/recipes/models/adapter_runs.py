"""Recipes with an adapter on tasks that a small model learns in seconds, and what they leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open

from tests.recipes.seq2seq_runs import ROWS as PAIRS
from tests.recipes.seq2seq_runs import write
from tests.recipes.tasks import test_language_models as language
from tests.recipes.tasks import test_question_answering as spans
from tests.recipes.tasks import test_text_classification as texts
from tests.recipes.tasks import test_token_classification as tags
from tests.recipes.tasks.test_translation import ROWS as SENTENCES

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
