"""Translation without a Trainer: language pairs, multilingual tokenizers, scores and faults."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    M2M100Config,
    MBart50Tokenizer,
    MBartConfig,
    MBartTokenizer,
    NllbTokenizer,
)

from hf_dist.config import DataConfig, ModelConfig
from hf_dist.data.builtin import seq2seq as builtin_seq2seq
from hf_dist.errors import ConfigError, DataError
from hf_dist.tasks.seq2seq.translation import Translation, TranslationSettings

NO_MODEL = ModelConfig()
EN_DE = {"translation": {"en": "a house", "de": "ein Haus"}}


def load(tmp_path, rows, model=NO_MODEL, **settings):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = Translation(TranslationSettings(**settings))
    data = DataConfig(train_file=str(path), validation_file=str(path), max_length=32)
    return task, task.load(data, model), data


@pytest.mark.parametrize(
    ("row", "settings"),
    [
        (EN_DE, {"source_lang": "en", "target_lang": "de"}),
        (EN_DE, {"source_lang": "en_XX", "target_lang": "de_DE"}),
        (EN_DE, {"source_lang": "en"}),
        (EN_DE, {"target_lang": "de"}),
        (EN_DE, {"source_column": "en", "target_column": "de"}),
        (EN_DE, {"source_lang": "eng_Latn", "source_column": "en", "target_column": "de"}),
        ({"en": "a house", "de": "ein Haus", "id": "1"}, {"source_lang": "en", "target_lang": "de"}),
        ({"source": "a house", "target": "ein Haus"}, {}),
        ({"Src": "a house", "Tgt": "ein Haus"}, {"source_lang": "en", "target_lang": "de"}),
        ({"x": "a house", "y": "ein Haus"}, {"source_column": "x", "target_column": "y"}),
    ],
)  # fmt: skip
def test_pairs(tmp_path, row, settings):
    _, raw, _ = load(tmp_path, [row], **settings)
    assert raw["train"][0] == {"source": "a house", "target": "ein Haus"}


def test_the_other_direction(tmp_path):
    _, raw, _ = load(tmp_path, [EN_DE], source_lang="de", target_lang="en")
    assert raw["train"][0] == {"source": "ein Haus", "target": "a house"}


@pytest.mark.parametrize(
    ("row", "settings", "says"),
    [
        (EN_DE, {}, "give --source_lang and --target_lang"),
        (EN_DE, {"source_lang": "en", "target_lang": "fr"}, "found for the languages en and fr"),
        (EN_DE, {"source_lang": "en", "target_lang": "en"}, "no two columns"),
        (EN_DE, {"source_column": "en", "target_column": "dee"}, "--target_column dee.*did you mean de"),
        ({"x": "1", "y": "2"}, {}, "the data has x, y"),
        ({"translation": {"en": "a", "de": None}}, {"source_lang": "en", "target_lang": "de"}, "row 1"),
        ({"en": "a", "de": 1}, {"source_lang": "en", "target_lang": "de"}, "holds numbers.*--target_column"),
    ],
)
def test_pairs_that_are_not_there(tmp_path, row, settings, says):
    with pytest.raises(DataError, match=says):
        load(tmp_path, [row, EN_DE if "translation" in row else row], **settings)


def test_built_in_languages():
    task = Translation(TranslationSettings(max_target_length=16))
    data = DataConfig(max_train_samples=8, max_eval_samples=4, max_length=32)
    raw = task.load(data, NO_MODEL)
    assert task.pair == builtin_seq2seq.LANGUAGES
    row = raw["validation"][0]
    assert row["source"] != row["target"]
    back = Translation(TranslationSettings(source_lang="english", target_lang="python"))
    assert back.load(data, NO_MODEL)["validation"][0] == {"source": row["target"], "target": row["source"]}


def test_scores_and_the_copy_baseline(tmp_path):
    rows = [
        {"source": "the small house is red", "target": "the small house is green"},
        {"source": "one two three four", "target": "one two three four five"},
    ]
    task, raw, _ = load(tmp_path, rows)
    scores = task.score(["the small house is green", "one two three four five"], raw["train"])
    assert scores["bleu"] == pytest.approx(100) and scores["chrf"] == pytest.approx(100)
    copied = task.score([row["source"] for row in rows], raw["train"])
    assert copied["bleu"] == copied["bleu_baseline"] == scores["bleu_baseline"]
    # 8 of 9 words, 6 of 7 pairs, 4 of 5, 2 of 3; 9 words against 10.
    wanted = 100 * (8 / 9 * 6 / 7 * 4 / 5 * 2 / 3) ** 0.25 * torch.tensor(-1 / 9, dtype=torch.float64).exp()
    assert copied["bleu"] == pytest.approx(float(wanted))
    assert scores["generated_words"] == 5.0


@pytest.mark.parametrize(
    ("language", "flag", "wanted"),
    [("de", "auto", "13a"), ("zh_CN", "auto", "zh"), ("zho_Hans", "auto", "zh"), (None, "auto", "13a"),
     ("zh", "char", "char")],
)  # fmt: skip
def test_words_of_the_target_language(language, flag, wanted):
    task = Translation(TranslationSettings(target_lang=language, bleu_tokenize=flag))
    assert task.bleu_tokenize() == wanted


def test_japanese_without_its_analyser_is_split_into_characters(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert Translation(TranslationSettings(target_lang="ja_XX")).bleu_tokenize() == "char"


# ---- Multilingual tokenizers ----

_SIZES = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
}


def multilingual(kind, folder):
    """A tiny model with a real multilingual tokenizer over single letters."""
    letters = "▁abcdefghijklmnopqrstuvwxyzEH"
    if kind == "nllb":
        vocab = {token: place for place, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", *letters])}
        tokenizer, config_class = NllbTokenizer(vocab=vocab, merges=[]), M2M100Config
    else:
        tokenizer = {"mbart": MBartTokenizer, "mbart50": MBart50Tokenizer}[kind]()
        config_class = MBartConfig
    config = config_class(
        vocab_size=len(tokenizer), pad_token_id=1, eos_token_id=2, decoder_start_token_id=2, **_SIZES
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(folder)
    return ModelConfig(model_name_or_path=str(folder)), tokenizer


@pytest.mark.parametrize("kind", ["nllb", "mbart", "mbart50"])
def test_multilingual_models_are_told_their_languages(kind, tmp_path, capsys):
    model_config, plain = multilingual(kind, tmp_path / "m")
    codes = ("eng_Latn", "deu_Latn") if kind == "nllb" else ("en_XX", "de_DE")
    settings = {
        "source_lang": codes[0],
        "target_lang": codes[1],
        "source_column": "en",
        "target_column": "de",
    }
    task, raw, data = load(tmp_path, [EN_DE] * 2, model_config, max_target_length=12, **settings)
    tokenizer = task.tokenizer(data, model_config)
    task.model_config(tokenizer, model_config)
    encoded, _ = task.encode(raw, tokenizer, data)
    source, target = (plain.convert_tokens_to_ids(code) for code in codes)
    ids, labels = encoded["train"][0]["input_ids"], encoded["train"][0]["labels"]
    assert source in ids and target not in ids
    assert target in labels and source not in labels

    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "m").eval()
    task.prepare_for(model)
    batch = task.collate([encoded["validation"][0]])
    tokens = model.generate(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])[0].tolist()
    if kind == "mbart":
        assert tokens[0] == target and model.generation_config.forced_bos_token_id is None
        # Its training starts from the language too: the labels end with it, and are rolled round.
        decoder = model.prepare_decoder_input_ids_from_labels(batch["labels"])
        assert decoder[0, 0] == target
    else:
        assert tokens[:2] == [2, target]
        assert model.generation_config.forced_bos_token_id == target
    [text] = task.generate(model, batch, synced=False)
    assert codes[1] not in text

    model.save_pretrained(tmp_path / "out")
    tokenizer.save_pretrained(tmp_path / "out")
    exec(task.usage(), {"FOLDER": str(tmp_path / "out")})
    assert f"tokenizer.src_lang = {codes[0]!r}" in task.usage()
    assert capsys.readouterr().out.endswith("\n")


@pytest.mark.parametrize(
    ("kind", "settings", "says"),
    [
        ("nllb", {}, "give --source_lang and --target_lang"),
        ("nllb", {"source_lang": "en", "target_lang": "de"}, "--source_lang en: the tokenizer has no code"),
        (
            "mbart50",
            {"source_lang": "en", "target_lang": "xx"},
            "--target_lang xx: the tokenizer has no code",
        ),
    ],
)
def test_languages_that_a_tokenizer_does_not_know(kind, settings, says, tmp_path):
    model, _ = multilingual(kind, tmp_path / "m")
    task, _, data = load(tmp_path, [{"source": "a", "target": "b"}], model, **settings)
    with pytest.raises(ConfigError, match=says):
        task.tokenizer(data, model)


def test_a_short_code_finds_the_only_long_one(tmp_path):
    model, plain = multilingual("mbart50", tmp_path / "m")
    task, _, data = load(tmp_path, [EN_DE], model, source_lang="en", target_lang="de")
    task.tokenizer(data, model)
    assert task.languages() == {"src_lang": "en_XX", "tgt_lang": "de_DE"}
    assert task.decoding == {"forced_bos_token_id": plain.convert_tokens_to_ids("de_DE")}


def test_the_columns_that_were_found_are_logged(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "hf_dist"):
        load(tmp_path, [EN_DE], source_lang="en", target_lang="de")
    assert "sources from column translation.en, targets from column translation.de" in caplog.text
