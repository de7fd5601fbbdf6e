"""Built-in data, tokenizer and model of the encoder-decoder tasks, from the standard library's source.

Summaries: a short function -> its name, what it takes and what it calls, in words. (A docstring's first line
for the rest of it would be a better summary, but no model learns that from nothing in minutes: a T5 stays
below the baseline of the first words.)
Translation: a statement -> the same in English words. Both by fixed rules
(`hf_dist.data.builtin.spoken_python`).
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

from hf_dist.data.builtin import spoken_python as spoken
from hf_dist.data.builtin.docstrings import SPLITS, Split, builtin_folder, digest, split_of
from hf_dist.data.cache import build_once, key_of
from hf_dist.errors import DataError

LANGUAGES = ("python", "english")
VOCABULARY = 2048
MOST_EVALUATED = 200

# Parts of the cache's keys: raise them when the same library would give other rows or pieces.
_PAIRS = 1
_PIECES = 1
_SPECIAL = ["<pad>", "</s>", "<unk>"]
_FEWEST_PAIRS = 1000
_PACKAGES = (
    "asyncio/*.py",
    "email/*.py",
    "http/*.py",
    "importlib/*.py",
    "logging/*.py",
    "multiprocessing/*.py",
    "tkinter/*.py",
    "unittest/*.py",
    "urllib/*.py",
    "xml/*/*.py",
)


def outlines(*, most_evaluated: int = MOST_EVALUATED) -> DatasetDict:
    """Short functions of the standard library, and what each is called, takes and calls, in words.

    Args:
        most_evaluated: most rows of validation and of test.

    Returns:
        train, validation and test with the columns `document` and `summary` (strings), in the order of the
        sources' hash.
    """
    table: dict[Split, list[dict[str, str]]] = {split: [] for split in SPLITS}
    for source, outline in _pairs()["outlines"]:
        table[split_of(source)].append({"document": source, "summary": outline})
    features = Features({"document": Value("string"), "summary": Value("string")})
    return _splits(table, features, {"train": None, "validation": most_evaluated, "test": most_evaluated})


def spoken_python(*, most_trained: int = 8000, most_evaluated: int = MOST_EVALUATED) -> DatasetDict:
    """Statements of the standard library, in Python and in English words.

    Args:
        most_trained: most rows of train.
        most_evaluated: most rows of validation and of test.

    Returns:
        train, validation and test with the column `translation` (`{"python": ..., "english": ...}`), in the
        order of the statements' hash.
    """
    table: dict[Split, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    for python, english in _pairs()["statements"]:
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

    key = key_of(tokenizers.__version__, vocabulary, _SPECIAL, _PIECES, _PAIRS)
    return PreTrainedTokenizerFast.from_pretrained(build_once(builtin_folder() / f"{name}-{key}", build))


def outline_tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer trained on the training functions and their outlines."""

    def texts() -> Iterator[str]:
        rows = outlines()["train"]
        yield from rows["document"]
        yield from rows["summary"]

    return word_tokenizer("outline-pieces", texts())


def spoken_python_tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer trained on the training statements in both languages."""
    texts = (text for row in spoken_python()["train"] for text in row["translation"].values())
    return word_tokenizer("spoken-python-pieces", texts)


def small_t5(tokenizer: PreTrainedTokenizerBase, **head: Any) -> T5Config:
    """The config of a T5 of 300,000 weights for `tokenizer`'s vocabulary.

    Args:
        tokenizer: gives the size of the vocabulary and the special tokens.
        head: other fields of the config.
    """
    # The start token is a field of every config, but not of this class's signature.
    head = {"decoder_start_token_id": tokenizer.pad_token_id, **head}
    return T5Config(
        vocab_size=len(tokenizer),
        d_model=64,
        d_kv=16,
        num_heads=4,
        d_ff=128,
        num_layers=2,
        dropout_rate=0.0,
        feed_forward_proj="relu",
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **head,
    )


def _splits(
    table: dict[Split, list[dict[str, Any]]], features: Features, limits: dict[Split, int | None]
) -> DatasetDict:
    return DatasetDict(
        {split: Dataset.from_list(rows[: limits[split]], features=features) for split, rows in table.items()}
    )


def _pairs() -> dict[str, list[tuple[str, str]]]:
    """Statements and outlines in the order of their hash; parsed once and then read from the cache."""
    root = Path(sysconfig.get_path("stdlib"))

    def build(folder: Path) -> None:
        found = _read_library(root)
        if (fewest := min(len(pairs) for pairs in found.values())) < _FEWEST_PAIRS:
            raise DataError(
                f"the built-in data needs the source of Python's standard library, and {root} has only "
                f"{fewest} short functions or statements in .py files; use a full Python, or give "
                "--train_file or --dataset_name"
            )
        (folder / "pairs.json").write_text(json.dumps(found), encoding="utf-8")

    folder = build_once(builtin_folder() / f"spoken-{_PAIRS}", build)
    read = json.loads((folder / "pairs.json").read_text(encoding="utf-8"))
    return {kind: [tuple(pair) for pair in pairs] for kind, pairs in read.items()}


def _read_library(root: Path) -> dict[str, list[tuple[str, str]]]:
    found: dict[str, dict[str, str]] = {"statements": {}, "outlines": {}}
    # The trees hold no cycles: the collector would walk millions of nodes for nothing.
    collecting = gc.isenabled()
    gc.disable()
    try:
        for path in sorted(path for pattern in ("*.py", *_PACKAGES) for path in root.glob(pattern)):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # old escapes such as "\d"
                    tree = ast.parse(path.read_bytes())
            except (SyntaxError, ValueError, OSError):
                continue
            for python, english in spoken.statements(tree, words=range(3, 21)):
                if len(python) <= 60:
                    found["statements"].setdefault(python, english)
            for source, outline in spoken.outlines(tree, longest=200):
                found["outlines"].setdefault(source, outline)
    finally:
        if collecting:
            gc.enable()
    return {kind: sorted(pairs.items(), key=lambda pair: digest(pair[0])) for kind, pairs in found.items()}


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
