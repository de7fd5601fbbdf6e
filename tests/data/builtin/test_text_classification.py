"""The built-in data: what the standard library says, the same each time."""

from __future__ import annotations

import email.message
import hashlib
import inspect
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from hf_dist.data.builtin import docstrings, small_models
from hf_dist.data.builtin import text_classification as builtin
from hf_dist.errors import DataError


@pytest.fixture(scope="module")
def rows():
    return docstrings.docstrings()


def test_docstrings_are_what_inspect_finds_in_the_running_python(rows):
    found = {(row.module, row.name): row for row in rows}
    assert found["email.message", "Message.get_payload"].text == inspect.getdoc(
        email.message.Message.get_payload
    )
    assert found["email.message", ""].text == inspect.getdoc(email.message)
    assert found["hashlib", "file_digest" if sys.version_info >= (3, 11) else "new"].kind == "function"
    assert {row.kind for row in rows} == {"module", "class", "function", "topic"}
    assert len(rows) > 5000


def test_topics_of_help(rows):
    import pydoc_data.topics

    topics = {row.name: row.text for row in rows if row.kind == "topic"}
    assert topics == {name: text.strip() for name, text in pydoc_data.topics.topics.items()}


def test_a_python_without_library_source(tmp_path, monkeypatch):
    monkeypatch.setattr(docstrings.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match="standard library"):
        docstrings.docstrings()


def test_an_optimised_python_sees_the_same(rows, tmp_path):
    code = (
        "from pathlib import Path; from hf_dist.data.builtin.docstrings import _of_file; "
        "import email.message as m; "
        "assert m.__doc__ is None; print(len(list(_of_file(Path(m.__file__), 'email.message'))))"
    )
    out = subprocess.run([sys.executable, "-OO", "-c", code], capture_output=True, text=True, check=True)
    assert int(out.stdout) == sum(row.module == "email.message" for row in rows)


def test_modules_view_is_balanced_and_shares_no_text(rows):
    splits = builtin.docstring_modules()
    names = splits["train"].features["label"].names
    assert names == sorted(names) and len(names) == 20
    total = Counter(label for split in splits.values() for label in split["label"])
    assert max(total.values()) <= 300
    texts = [" ".join(text.lower().split()) for split in splits.values() for text in split["text"]]
    assert len(texts) == len(set(texts))
    for split in splits.values():
        assert set(split["label"]) == set(range(20))
        assert max(Counter(split["label"]).values()) / len(split) < 0.12
    owners: dict[str, set[str]] = {}
    for row in rows:
        owners.setdefault(row.text, set()).add(row.package)
    for text, label in zip(splits["test"]["text"], splits["test"]["label"], strict=True):
        assert owners[text] == {names[label]}


def test_shares_of_the_splits(rows):
    shares = Counter(docstrings.split_of(row.text) for row in rows)
    assert shares["train"] / len(rows) == pytest.approx(0.8, abs=0.03)
    assert shares["validation"] / len(rows) == pytest.approx(0.1, abs=0.02)
    assert docstrings.split_of("Return  the\nname.") == docstrings.split_of("return the name.")


def test_another_process_finds_the_same_rows_and_trains_the_same_tokenizer(rows, tmp_path):
    """A fresh cache, another hash seed: the bytes must not differ."""
    code = (
        "from hf_dist.data.builtin import docstrings, small_models as m\n"
        "m.bpe_tokenizer(); print(docstrings.builtin_folder())"
    )
    environment = {**os.environ, "HF_DIST_CACHE": str(tmp_path), "PYTHONHASHSEED": "7"}
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    small_models.bpe_tokenizer()
    assert _digests(Path(out.stdout.strip())) == _digests(docstrings.builtin_folder())


def _digests(folder: Path) -> dict[str, str]:
    # Other tests may have trained other tokenizers in the same folder.
    names = ("*/docstrings.jsonl", "bpe-*/tokenizer.json", "bpe-*/tokenizer_config.json")
    found = {path.name: path for name in names for path in folder.glob(name)}
    assert len(found) == len(names)
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in found.items()}


def test_the_tokenizer_loses_nothing_and_marks_pairs():
    tokenizer = small_models.bpe_tokenizer()
    text = "Return é or None, as Message.get_payload() does: \t 数\n"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids).removeprefix(" ") == text
    assert tokenizer.unk_token_id not in ids
    pair = tokenizer("a", "b")
    assert tokenizer.convert_ids_to_tokens(pair["input_ids"]) == ["[CLS]", "Ġa", "[SEP]", "Ġb", "[SEP]"]
    assert pair["token_type_ids"] == [0, 0, 0, 1, 1]


def test_the_model_fits_the_tokenizer():
    tokenizer = small_models.bpe_tokenizer()
    config = small_models.small_bert(tokenizer, num_labels=3)
    assert config.vocab_size == len(tokenizer) == small_models.VOCABULARY
    assert config.num_labels == 3 and config.pad_token_id == tokenizer.pad_token_id
    assert tokenizer.model_max_length == config.max_position_embeddings
