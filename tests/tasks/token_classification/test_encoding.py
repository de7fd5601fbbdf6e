"""Labels at tokens: sub-words, padding, words that are cut or of which nothing is left."""

from __future__ import annotations

import json
import logging
import pickle

import pytest
import torch
from datasets import DatasetDict
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import DistilBertConfig, PreTrainedTokenizerFast, RobertaConfig

from hf_dist.config import DataConfig, ModelConfig
from hf_dist.data.builtin import small_models
from hf_dist.errors import DataError
from hf_dist.tasks import pretrained
from hf_dist.tasks.items import TokenItems
from hf_dist.tasks.token_classification.rows import TokenClassificationSettings as Settings
from hf_dist.tasks.token_classification.schemes import inside_of
from tests.tasks.token_classification.tagged import BIO, NO_MODEL, loaded, perfect


def test_labels_stand_at_first_sub_words(tmp_path):
    rows = [(["get_payload", "x", "unbelievable"], ["B-a", "O", "B-b"]), (["x"], ["O"]), (["x"], ["I-a"])]
    task, tokenizer, encoded, _ = loaded(tmp_path, train=rows, validation=rows)
    row = encoded["train"][0]
    words = [tokenizer(f" {word}", add_special_tokens=False)["input_ids"] for word in rows[0][0]]
    assert len(words[0]) > 1 and len(words[2]) > 1
    assert row["input_ids"] == [
        tokenizer.cls_token_id,
        *words[0],
        *words[1],
        *words[2],
        tokenizer.sep_token_id,
    ]
    expected = [-100]
    for ids, tag in zip(words, rows[0][1], strict=True):
        expected += [task.classes.index(tag), *[-100] * (len(ids) - 1)]
    assert row["labels"] == [*expected, -100]
    assert encoded["validation"][0]["first"] == [1, 1 + len(words[0]), 1 + len(words[0]) + len(words[1])]


def test_all_sub_words_can_be_labelled_and_go_on_inside_the_entity(tmp_path):
    rows = [(["get_payload", "unbelievable"], ["B-a", "B-b"]), (["x"], ["O"]), (["x"], ["I-a"])]
    task, _, encoded, _ = loaded(
        tmp_path, train=rows, validation=rows, settings=Settings(label_all_tokens=True)
    )
    names = [task.classes[tag] if tag >= 0 else None for tag in encoded["train"][0]["labels"]]
    b_at = names.index("B-b")
    assert names[0] is None and names[-1] is None
    assert names[1] == "B-a" and set(names[2:b_at]) == {"I-a"}
    # There is no I-b: its sub-words keep the tag of the word.
    assert set(names[b_at:-1]) == {"B-b"}
    assert inside_of(("B-x", "I-x", "S-x", "O", "B")) == (1, 1, 2, 3, 4)


def test_a_batch_is_padded_with_ignored_labels(tmp_path):
    task, _, encoded, _ = loaded(tmp_path)
    rows = [
        {name: row[name] for name in ("input_ids", "token_type_ids", "labels")} for row in encoded["train"]
    ]
    batch = task.collate(rows)
    assert set(batch) == {"input_ids", "token_type_ids", "attention_mask", "labels"}
    assert batch["labels"].shape == batch["input_ids"].shape
    assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()
    for at, row in enumerate(rows):
        assert batch["labels"][at, : len(row["labels"])].tolist() == row["labels"]
    sent = pickle.loads(pickle.dumps(task)).collate(rows)
    assert all(torch.equal(sent[name], batch[name]) for name in batch)
    assert task.items == TokenItems(shift=False)


def test_left_padding_moves_labels_along(tmp_path, monkeypatch):
    """Only of a model that reads a text at the end of its row, such as XLNet."""
    monkeypatch.setattr(pretrained, "_PADDED_LEFT", frozenset({"bert"}))
    task, tokenizer, encoded, _ = loaded(tmp_path)
    tokenizer.padding_side = "left"
    task.model_config(tokenizer, NO_MODEL)
    task.encode(DatasetDict(), tokenizer, DataConfig())
    rows = [encoded["validation"][at] for at in (0, 2)]
    batch = task.collate(rows)
    assert batch["labels"][1, -len(rows[1]["labels"]) :].tolist() == rows[1]["labels"]
    logits = torch.nn.functional.one_hot(batch["labels"].clamp(min=0), len(task.classes)).float()
    predictions = task.predict({"logits": logits}, batch)
    assert [len(found) for found in predictions] == [len(row["input_ids"]) for row in rows]
    assert list(task.records(predictions, encoded["validation"].select([0, 2]))) == [
        {"tokens": BIO[at][0], "tags": BIO[at][1]} for at in (0, 2)
    ]


def test_cut_words_are_counted_and_predicted_as_outside(tmp_path, caplog):
    long = (["Rome"] * 40, ["B-LOC"] * 40)
    with caplog.at_level(logging.WARNING, logger="hf_dist"):
        logging.getLogger("hf_dist").propagate = True
        task, _, encoded, truncated = loaded(
            tmp_path, train=[*BIO, long], validation=[long, BIO[1]], max_length=12
        )
    assert truncated == {"train": 1, "validation": 1}
    first = encoded["validation"][0]["first"]
    kept = sum(place >= 0 for place in first)
    assert len(first) == 40 and 0 < kept <= 10 and first[kept:] == [-1] * (40 - kept)
    assert f"validation: {40 - kept} of 43 words are beyond --max_length" in caplog.text
    predictions = perfect(task, encoded["validation"])
    tags = next(iter(task.records(predictions, encoded["validation"])))["tags"]
    assert tags == ["B-LOC"] * kept + ["O"] * (40 - kept)
    assert task.score(predictions, encoded["validation"])["recall"] == pytest.approx((kept + 1) / 41)


def test_words_of_which_the_tokenizer_leaves_nothing_keep_the_others_in_step(tmp_path):
    """BERT's normaliser removes control characters, so that such a word has no token."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer_without_controls(), pad_token="[PAD]", unk_token="[UNK]"
    )
    tokenizer.save_pretrained(tmp_path / "t")
    rows = [(["a", "\u200d", "b"], ["B-X", "B-X", "O"]), (["b"], ["I-X"])]
    task, _, encoded, _ = loaded(
        tmp_path, train=rows, validation=rows, model=ModelConfig(tokenizer_name=str(tmp_path / "t"))
    )
    assert encoded["validation"][0]["first"] == [0, -1, 1]
    assert [task.classes[tag] for tag in encoded["train"][0]["labels"]] == ["B-X", "O"]
    records = list(task.records(perfect(task, encoded["validation"]), encoded["validation"]))
    assert records[0]["tags"] == ["B-X", "O", "O"]


def _tokenizer_without_controls() -> Tokenizer:
    from tokenizers import normalizers

    made = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "a": 2, "b": 3}, "[UNK]"))
    made.normalizer = normalizers.Replace("\u200d", "")
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


def test_byte_level_tokenizers_see_a_space_before_each_word(tmp_path):
    tokenizer = small_models.bpe_tokenizer()
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["pre_tokenizer"]["add_prefix_space"] = False
    bare = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)), pad_token="[PAD]", unk_token="[UNK]"
    )
    bare.save_pretrained(tmp_path / "t")
    RobertaConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=64, pad_token_id=0,
    ).save_pretrained(tmp_path / "t")  # fmt: skip
    model = ModelConfig(model_name_or_path=str(tmp_path / "t"))
    _, _, encoded, _ = loaded(tmp_path, model=model)
    expected = tokenizer(" Rome is old", add_special_tokens=False)["input_ids"]
    ids = encoded["validation"][1]["input_ids"]
    assert ids[1:-1] == expected


def test_a_batch_has_only_what_the_model_takes(tmp_path):
    tokenizer = small_models.bpe_tokenizer()
    tokenizer.save_pretrained(tmp_path / "m")
    DistilBertConfig(vocab_size=len(tokenizer), dim=32, n_layers=1, n_heads=2, hidden_dim=64).save_pretrained(
        tmp_path / "m"
    )
    task, _, encoded, _ = loaded(tmp_path, model=ModelConfig(model_name_or_path=str(tmp_path / "m")))
    assert set(task.collate([encoded["train"][0]])) == {"input_ids", "attention_mask", "labels"}


def test_truncation_that_leaves_a_row_without_labels(tmp_path):
    with pytest.raises(DataError, match="no label left in rows 1, 2, 3, 4 .* --max_length 2"):
        loaded(tmp_path, max_length=2)
