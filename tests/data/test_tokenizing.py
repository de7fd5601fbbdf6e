"""Tokens against the tokenizer itself; the cache; several processes."""

from __future__ import annotations

import multiprocessing

import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from transformers import CanineTokenizer

from hf_dist.config import DataConfig
from hf_dist.data import tokenizing
from hf_dist.data.builtin import small_models
from hf_dist.data.tokenizing import tokenise

TEXTS = ["Return the name.", "Close.", "word " * 40, "", "Return the name."]
FEATURES = Features({"text": Value("string"), "labels": ClassLabel(names=["a", "b"])})


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path, monkeypatch):
    tokenizer = small_models.bpe_tokenizer()  # from the session's cache
    monkeypatch.setenv("HF_DIST_CACHE", str(tmp_path / "cache"))
    return tokenizer


@pytest.fixture
def tokenizer(_fresh_cache):
    return _fresh_cache


@pytest.fixture
def raw():
    rows = Dataset.from_dict({"text": TEXTS, "labels": [0, 1, 0, 1, 0]}, features=FEATURES)
    return DatasetDict({"train": rows, "validation": rows.select([2, 2])})


def test_tokens_labels_and_truncation(raw, tokenizer):
    encoded, truncated = tokenise(raw, tokenizer, DataConfig(max_length=12), texts=("text",))
    wanted = [tokenizer(text)["input_ids"] for text in TEXTS]
    assert truncated == {"train": 1, "validation": 2}
    assert [len(ids) for ids in encoded["train"]["input_ids"]] == [min(len(ids), 12) for ids in wanted]
    assert encoded["train"]["input_ids"][0] == wanted[0]
    assert encoded["train"]["labels"][:] == [0, 1, 0, 1, 0]
    assert encoded["train"].features["labels"] == FEATURES["labels"]
    assert set(encoded["train"].column_names) == {"input_ids", "token_type_ids", "labels"}


def test_a_row_of_exactly_max_length_is_not_truncated(raw, tokenizer):
    longest = max(len(tokenizer(text)["input_ids"]) for text in TEXTS)
    assert tokenise(raw, tokenizer, DataConfig(max_length=longest), texts=("text",))[1]["train"] == 0
    assert tokenise(raw, tokenizer, DataConfig(max_length=longest - 1), texts=("text",))[1]["train"] == 1


def test_pairs(tokenizer):
    raw = DatasetDict({"train": Dataset.from_dict({"text": ["a", "b " * 30], "text_pair": ["c", "d " * 30]})})
    encoded, truncated = tokenise(raw, tokenizer, DataConfig(max_length=16), texts=("text", "text_pair"))
    assert encoded["train"][0] == {
        name: tokenizer("a", "c")[name] for name in ("input_ids", "token_type_ids")
    }
    assert len(encoded["train"][1]["input_ids"]) == 16 and truncated == {"train": 1}


def test_a_tokenizer_in_python_counts_too(raw):
    """Canine's pieces are characters: no vocabulary file, and no Rust tokenizer behind it."""
    tokenizer = CanineTokenizer()
    encoded, truncated = tokenise(raw, tokenizer, DataConfig(max_length=10), texts=("text",))
    assert [len(ids) for ids in encoded["train"]["input_ids"]] == [min(len(text) + 2, 10) for text in TEXTS]
    assert truncated == {"train": 3, "validation": 2}


def _count_calls(monkeypatch) -> list[int]:
    calls: list[int] = []
    call = tokenizing._Tokenise.__call__

    def counted(self, batch):
        calls.append(len(batch["text"]))
        return call(self, batch)

    monkeypatch.setattr(tokenizing._Tokenise, "__call__", counted)
    return calls


def test_the_cache_is_hit_by_equal_and_missed_by_other_inputs(raw, tokenizer, monkeypatch):
    calls = _count_calls(monkeypatch)
    first, _ = tokenise(raw, tokenizer, DataConfig(max_length=12), texts=("text",))
    assert calls == [5, 2]
    tokenizer(["other use", "of it"], padding=True, truncation=True, max_length=3)
    equal = DatasetDict({"train": Dataset.from_dict(raw["train"].to_dict(), features=FEATURES)})
    again, truncated = tokenise(equal, tokenizer, DataConfig(max_length=12), texts=("text",))
    assert calls == [5, 2] and truncated == {"train": 1}
    assert again["train"]["input_ids"][:] == first["train"]["input_ids"][:]

    tokenise(equal, tokenizer, DataConfig(max_length=13), texts=("text",))
    tokenise(
        DatasetDict({"train": equal["train"].select([1, 0, 2, 3, 4])}),
        tokenizer,
        DataConfig(max_length=12),
        texts=("text",),
    )
    tokenizer.add_tokens(["Return"])
    tokenise(equal, tokenizer, DataConfig(max_length=12), texts=("text",))
    assert calls == [5, 2, 5, 5, 5]


def test_overwrite_cache_works_on_the_first_process_only(raw, tokenizer, monkeypatch):
    calls = _count_calls(monkeypatch)
    tokenise(raw, tokenizer, DataConfig(), texts=("text",))
    monkeypatch.setenv("LOCAL_RANK", "1")
    tokenise(raw, tokenizer, DataConfig(overwrite_cache=True), texts=("text",))
    assert len(calls) == 2
    monkeypatch.setenv("LOCAL_RANK", "0")
    tokenise(raw, tokenizer, DataConfig(overwrite_cache=True), texts=("text",))
    assert len(calls) == 4


def _tokenise_and_log(raw, tokenizer, log) -> None:
    call = tokenizing._Tokenise.__call__

    def logged(self, batch):
        with open(log, "a") as file:
            file.write(f"{len(batch['text'])}\n")
        return call(self, batch)

    tokenizing._Tokenise.__call__ = logged  # in this forked process only
    encoded, _ = tokenise(raw, tokenizer, DataConfig(), texts=("text",))
    assert len(encoded["train"]["input_ids"][0]) > 3


def test_processes_that_start_together_tokenise_once(raw, tokenizer, tmp_path):
    context = multiprocessing.get_context("fork")
    arguments = (raw, tokenizer, tmp_path / "log")
    processes = [context.Process(target=_tokenise_and_log, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "5\n2\n"


def test_worker_processes_give_the_same(raw, tokenizer):
    one, _ = tokenise(raw, tokenizer, DataConfig(max_length=12), texts=("text",))
    two, truncated = tokenise(
        raw,
        tokenizer,
        DataConfig(max_length=12, preprocessing_num_workers=2, overwrite_cache=True),
        texts=("text",),
    )
    assert two["train"].to_dict() == one["train"].to_dict() and truncated == {"train": 1, "validation": 2}
