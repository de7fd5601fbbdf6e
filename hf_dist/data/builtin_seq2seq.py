"""Built-in data, tokenizer and model of the encoder-decoder tasks: summaries, and Python read aloud.

Summaries: the rest of a docstring under its name -> its first line, which the author wrote to sum it up.
Translation: a statement of the standard library's source -> the same in English words, by fixed rules.
"""

from __future__ import annotations

import ast
import gc
import json
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import tokenizers
from datasets import Dataset, DatasetDict, Features, Translation, Value
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, T5Config

from hf_dist.data.cache import build_once, key_of
from hf_dist.data.docstrings import SPLITS, Docstring, Split, builtin_folder, digest, docstrings, split_of
from hf_dist.data.spoken_python import statements
from hf_dist.errors import DataError

LANGUAGES = ("python", "english")
VOCABULARY = 2048
MOST_EVALUATED = 200

# Parts of the cache's keys: raise them when the same library would give other rows or pieces.
_STATEMENTS = 1
_PIECES = 1
_SPECIAL = ["<pad>", "</s>", "<unk>"]
_FEWEST_STATEMENTS = 1000


def summaries(*, most_evaluated: int = MOST_EVALUATED) -> DatasetDict:
    """Docstring without its first line -> its first line, for docstrings with a blank line after the first.

    A document begins with the name of what it documents, as a headline would. Copies are left out. Rows
    come in the order of their hash.

    Args:
        most_evaluated: most rows of validation and of test.

    Returns:
        train, validation and test with the columns `document` and `summary` (strings).
    """
    rows: dict[str, tuple[str, str]] = {}
    for row in docstrings():
        if (pair := _document_and_summary(row)) is not None:
            rows.setdefault(digest(row.text), pair)
    table: dict[Split, list[dict[str, str]]] = {split: [] for split in SPLITS}
    for _, (document, summary) in sorted(rows.items()):
        # Split by the summary: the same first line over two texts must not lie in two splits.
        table[split_of(summary)].append({"document": document, "summary": summary})
    features = Features({"document": Value("string"), "summary": Value("string")})
    return _splits(table, features, {"train": None, "validation": most_evaluated, "test": most_evaluated})


def spoken_python(*, most_trained: int = 8000, most_evaluated: int = MOST_EVALUATED) -> DatasetDict:
    """Statements of the standard library's top-level modules, in Python and in English words.

    Args:
        most_trained: most rows of train.
        most_evaluated: most rows of validation and of test.

    Returns:
        train, validation and test with the column `translation` (`{"python": ..., "english": ...}`), in the
        order of the statements' hash.
    """
    table: dict[Split, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    for python, english in _statements():
        pair = dict(zip(LANGUAGES, (python, english), strict=True))
        table[split_of(python)].append({"translation": pair})
    features = Features({"translation": Translation(languages=LANGUAGES)})
    limits: dict[Split, int | None] = {
        "train": most_trained,
        "validation": most_evaluated,
        "test": most_evaluated,
    }
    return _splits(table, features, limits)


def word_tokenizer(name: str, texts: Iterable[str], vocabulary: int = VOCABULARY) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer for lower-case words, with T5's special tokens.

    Capitals become small letters, and words inside `getPayload` or `get_payload` stand apart as they do in
    a sentence, so that a small model meets each of them in one form only.

    Args:
        name: names it in the cache, with the texts' contents left out: they are a function of the library.
        texts: what it is trained on, once; the training split alone.
        vocabulary: number of pieces.
    """

    def build(folder: Path) -> None:
        _train(texts, vocabulary).save_pretrained(folder)

    key = key_of(tokenizers.__version__, vocabulary, _SPECIAL, _PIECES, _STATEMENTS)
    return PreTrainedTokenizerFast.from_pretrained(build_once(builtin_folder() / f"{name}-{key}", build))


def summary_tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer trained on the training documents and summaries."""

    def texts() -> Iterator[str]:
        rows = summaries()["train"]
        yield from rows["document"]
        yield from rows["summary"]

    return word_tokenizer("summary-pieces", texts())


def spoken_python_tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer trained on the training statements in both languages."""
    texts = (text for row in spoken_python()["train"] for text in row["translation"].values())
    return word_tokenizer("spoken-python-pieces", texts)


def small_t5(tokenizer: PreTrainedTokenizerBase, **head: Any) -> T5Config:
    """The config of a T5 of about a million weights for `tokenizer`'s vocabulary.

    Args:
        tokenizer: gives the size of the vocabulary and the special tokens.
        head: other fields of the config.
    """
    # The start token is a field of every config, but not of this class's signature.
    head = {"decoder_start_token_id": tokenizer.pad_token_id, **head}
    return T5Config(
        vocab_size=len(tokenizer),
        d_model=128,
        d_kv=32,
        num_heads=4,
        d_ff=256,
        num_layers=2,
        dropout_rate=0.0,
        feed_forward_proj="relu",
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **head,
    )


def _document_and_summary(row: Docstring) -> tuple[str, str] | None:
    if row.kind == "topic":
        return None
    head, _, body = row.text.partition("\n\n")
    summary, body = " ".join(head.split()), body.strip()
    if not 3 <= len(summary.split()) <= 16 or len(body.split()) < 5:
        return None
    name = f"{row.module}.{row.name}" if row.name else row.module
    return f"{name}\n\n{body}", summary


def _splits(
    table: dict[Split, list[dict[str, Any]]], features: Features, limits: dict[Split, int | None]
) -> DatasetDict:
    return DatasetDict(
        {split: Dataset.from_list(rows[: limits[split]], features=features) for split, rows in table.items()}
    )


def _statements() -> list[tuple[str, str]]:
    """All pairs in the order of their hash; parsed once and then read from the cache."""
    root = Path(sysconfig.get_path("stdlib"))

    def build(folder: Path) -> None:
        found = _read_statements(root)
        if len(found) < _FEWEST_STATEMENTS:
            raise DataError(
                f"the built-in data needs the source of Python's standard library, and {root} has only "
                f"{len(found)} statements in .py files; use a full Python, or give --train_file or "
                "--dataset_name"
            )
        (folder / "statements.json").write_text(json.dumps(found), encoding="utf-8")

    folder = build_once(builtin_folder() / f"statements-{_STATEMENTS}", build)
    return [tuple(pair) for pair in json.loads((folder / "statements.json").read_text(encoding="utf-8"))]


def _read_statements(root: Path) -> list[tuple[str, str]]:
    found: dict[str, str] = {}
    # The trees hold no cycles: the collector would walk millions of nodes for nothing.
    collecting = gc.isenabled()
    gc.disable()
    try:
        for path in sorted(root.glob("*.py")):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # old escapes such as "\d"
                    tree = ast.parse(path.read_bytes())
            except (SyntaxError, ValueError, OSError):
                continue
            for python, english in statements(tree):
                if len(python) <= 60 and 3 <= len(english.split()) <= 20:
                    found.setdefault(python, english)
    finally:
        if collecting:
            gc.enable()
    return sorted(found.items(), key=lambda pair: digest(pair[0]))


def _train(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    apart = [
        normalizers.Replace(Regex(pattern), " ")
        for pattern in (r"_", r"(?<=[a-z0-9])(?=[A-Z])", r"(?<=\w)(?=[^\w\s'])|(?<=[^\w\s'])(?=\w)", r"\s+")
    ]
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), *apart, normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    end = [("</s>", tokenizer.token_to_id("</s>"))]
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=end)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=512,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )
