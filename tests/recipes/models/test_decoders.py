"""Decoders whose tokenizer has no pad token (GPT-2, Llama), in the recipes and then in pipelines."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    LlamaConfig,
    pipeline,
)

from hf_dist.data.builtin import small_models
from hf_dist.tasks.question_answering.decode import answer
from recipes.causal_lm import main as causal_lm
from recipes.masked_lm import main as masked_lm
from recipes.question_answering import main as question_answering
from recipes.text_classification import main as text_classification
from recipes.token_classification import main as token_classification
from tests.launch import call, only_error

END = "<|end|>"
# Of many lengths; two that end in (or are nothing but) the token that pads.
TEXTS = [
    "Return the sum.",
    "Open the file that the path names and return a stream of its lines.",
    f"Close the stream. {END}",
    "x",
    f"{END}{END}",
    "Raise an error if the key is not there, unless a default is given by the caller.",
]
QUICK = (
    "--max_steps=2",
    "--save_strategy=no",
    "--max_length=48",
    "--learning_rate=0.01",
    "--logging_steps=1",
)


@pytest.fixture(autouse=True)
def _log(monkeypatch):
    """A run's log goes where pytest looks, and not to the captured stderr of an earlier test."""
    logger = logging.getLogger("hf_dist")
    monkeypatch.setattr(logger, "handlers", [logging.NullHandler()])
    monkeypatch.setattr(logger, "propagate", True)


def without_pad_token(folder: Path, kind: str, *, side: str = "right", **tokens) -> Path:
    """A folder with the config of a small decoder and a tokenizer that can't pad, as GPT-2's is published."""
    tokenizer = small_models.causal_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "bos_token_id": tokenizer.eos_token_id,
             "eos_token_id": tokenizer.eos_token_id}  # fmt: skip
    if kind == "gpt2":
        config = GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=128, **sizes)
    else:
        config = LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            max_position_embeddings=128, pad_token_id=None, **sizes,
        )  # fmt: skip
    torch.manual_seed(0)
    AutoModel.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = {**json.loads(path.read_text()), "padding_side": side, **tokens}
    for name in ("pad_token", "chat_template"):
        settings.pop(name, None)
    path.write_text(json.dumps(settings))
    assert AutoTokenizer.from_pretrained(folder).pad_token is None
    return folder


def json_lines(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def says_how_it_pads(saved: Path) -> None:
    """The tokenizer and the config of a saved model agree on the end token."""
    tokenizer = AutoTokenizer.from_pretrained(saved)
    assert tokenizer.pad_token == END and tokenizer.padding_side == "right"
    assert json.loads((saved / "config.json").read_text())["pad_token_id"] == tokenizer.eos_token_id


def by_hand(model, tokenizer, text: str) -> list[float]:
    """Probabilities of a text alone: softmax of the score at its last token that isn't the end token."""
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    real = [place for place, token in enumerate(ids[0]) if token != tokenizer.eos_token_id]
    hidden = getattr(model, model.base_model_prefix)(ids, attention_mask=torch.ones_like(ids))[0]
    return model.score(hidden[0, max(real, default=0)]).softmax(-1).tolist()


@pytest.mark.parametrize(("kind", "side"), [("gpt2", "right"), ("gpt2", "left"), ("llama", "left")])
def test_a_classifier_answers_alike_in_training_evaluation_and_pipelines(kind, side, tmp_path, caplog):
    base = without_pad_token(tmp_path / "base", kind, side=side)
    rows = [{"text": text, "label": "ab"[place % 2]} for place, text in enumerate(TEXTS)]
    data = json_lines(tmp_path / "rows.jsonl", rows)
    out = tmp_path / "out"
    flags = [f"--{split}_file={data}" for split in ("train", "validation", "test")]
    flags += ["--do_train", "--do_eval", "--do_predict", f"--model_name_or_path={base}"]
    assert call(text_classification, *QUICK, *flags, f"--output_dir={out}") == 0
    assert caplog.text.count("rows are padded with the end-of-sequence token <|end|>") == 1
    says_how_it_pads(out)
    predicted = [json.loads(line) for line in (out / "predictions.jsonl").read_text().splitlines()]
    classify = pipeline("text-classification", model=str(out), top_k=None)
    model = AutoModelForSequenceClassification.from_pretrained(out).eval()
    for size in (1, 2, 6):
        for text, ours, theirs in zip(TEXTS, predicted, classify(TEXTS, batch_size=size), strict=True):
            best = theirs[0]
            assert ours["prediction"] == best["label"]
            assert ours["probability"] == pytest.approx(best["score"], abs=1e-5)
            scores = by_hand(model, classify.tokenizer, text)
            assert scores[model.config.label2id[best["label"]]] == pytest.approx(best["score"], abs=1e-5)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_tagger_answers_as_its_pipeline_does(kind, tmp_path):
    base = without_pad_token(tmp_path / "base", kind, side="left")
    rows = [{"tokens": text.split(), "tags": ["NP"[len(word) % 2] for word in text.split()]}
            for text in TEXTS if END not in text]  # fmt: skip
    data = json_lines(tmp_path / "rows.jsonl", rows)
    out = tmp_path / "out"
    flags = [f"--{split}_file={data}" for split in ("train", "validation", "test")]
    flags += ["--do_train", "--do_eval", "--do_predict", f"--model_name_or_path={base}"]
    assert call(token_classification, *QUICK, *flags, f"--output_dir={out}") == 0
    says_how_it_pads(out)
    predicted = [json.loads(line)["tags"] for line in (out / "predictions.jsonl").read_text().splitlines()]
    tag = pipeline("token-classification", model=str(out), ignore_labels=[])
    words = [row["tokens"] for row in rows]
    for size in (1, 2):
        found = tag(words, is_split_into_words=True, batch_size=size)
        for sentence, ours, theirs in zip(words, predicted, found, strict=True):
            owners = tag.tokenizer(sentence, is_split_into_words=True).word_ids()
            first = [owners.index(place) for place in range(len(sentence))]
            by_token = {one["index"]: one["entity"] for one in theirs}
            assert [by_token[place] for place in first] == ours
    # A word has the tokens that it has in running text, where a space stands before it.
    text = tag.tokenizer.convert_ids_to_tokens(tag.tokenizer(words[1], is_split_into_words=True)["input_ids"])
    assert text == tag.tokenizer.tokenize(" " + " ".join(words[1]))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_questions_in_a_batch_are_answered_as_one_by_one(kind, tmp_path):
    base = without_pad_token(tmp_path / "base", kind)
    contexts = [text for text in TEXTS if END not in text and len(text) > 10]
    rows = [
        {"id": str(place), "question": "What?", "context": text,
         "answers": {"text": [text.split()[1]], "answer_start": [text.index(text.split()[1])]}}
        for place, text in enumerate(contexts)
    ]  # fmt: skip
    data = json_lines(tmp_path / "rows.jsonl", rows)
    out = tmp_path / "out"
    flags = [f"--{split}_file={data}" for split in ("train", "validation", "test")]
    flags += ["--do_train", "--do_eval", "--do_predict", f"--model_name_or_path={base}"]
    flags += ["--doc_stride=8", "--max_question_tokens=8"]
    assert call(question_answering, *QUICK, *flags, f"--output_dir={out}") == 0
    says_how_it_pads(out)
    predicted = [json.loads(line) for line in (out / "predictions.jsonl").read_text().splitlines()]
    model = AutoModelForQuestionAnswering.from_pretrained(out).eval()
    tokenizer = AutoTokenizer.from_pretrained(out)
    for row, ours in zip(rows, predicted, strict=True):
        alone = answer(model, tokenizer, row["question"], row["context"], max_length=48, doc_stride=8)
        assert ours["prediction"] == alone.answers[0].text
        assert ours["score"] == pytest.approx(alone.answers[0].score, abs=1e-5)


def test_what_a_language_model_is_saved_with(tmp_path):
    base = without_pad_token(tmp_path / "base", "gpt2", side="left")
    data = json_lines(tmp_path / "rows.jsonl", [{"text": text} for text in TEXTS])
    out = tmp_path / "out"
    flags = [f"--{split}_file={data}" for split in ("train", "validation")]
    assert call(causal_lm, *QUICK, *flags, f"--model_name_or_path={base}", f"--output_dir={out}") == 0
    tokenizer = AutoTokenizer.from_pretrained(out)
    # What is generated with it later is padded on the left.
    assert tokenizer.pad_token == END and tokenizer.padding_side == "left"
    for name in ("config.json", "generation_config.json"):
        assert json.loads((out / name).read_text())["pad_token_id"] == tokenizer.eos_token_id
    write = pipeline("text-generation", model=str(out), max_new_tokens=4, do_sample=False)
    together = [one[0]["generated_text"] for one in write(TEXTS[:4], batch_size=2)]
    assert together == [write(text)[0]["generated_text"] for text in TEXTS[:4]]


def test_what_a_decoder_is_refused_for(tmp_path, capsys):
    base = without_pad_token(tmp_path / "base", "gpt2")
    named = (f"--model_name_or_path={base}", f"--output_dir={tmp_path / 'out'}")
    assert call(masked_lm, *QUICK, *named) == 2
    assert "has no mask token" in only_error(capsys.readouterr().err)
    data = json_lines(tmp_path / "blank.jsonl", [{"text": "", "label": 1}, {"text": "x", "label": 0}])
    files = (f"--train_file={data}", f"--validation_file={data}")
    assert call(text_classification, *QUICK, *named, *files) == 2
    assert "the train data has no token in row 1" in only_error(capsys.readouterr().err)
    settings = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": None}))
    for main in (text_classification, token_classification, question_answering, causal_lm, masked_lm):
        assert call(main, *QUICK, *named) == 2
        assert "has no pad token (and no end-of-sequence token" in only_error(capsys.readouterr().err)
    assert not (tmp_path / "out").exists()
