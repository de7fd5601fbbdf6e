"""Token classification: a tag for every word, such as its part of speech or its place in an entity."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Dataset, DatasetDict
from tokenizers import pre_tokenizers
from transformers import AutoModelForTokenClassification, PretrainedConfig, PreTrainedTokenizerBase

from hf_dist.config import DataConfig, ModelConfig
from hf_dist.data import labels
from hf_dist.data.builtin import token_classification as builtin_tagging
from hf_dist.data.class_list import FIRST_ROWS, Words, all_classes, check_seen, learned, shown_by
from hf_dist.data.collate import IGNORED
from hf_dist.data.device import to_host
from hf_dist.data.loading import sources
from hf_dist.data.tokenizing import count_true, encode_rows
from hf_dist.errors import ConfigError, DataError
from hf_dist.metrics import load_metric
from hf_dist.tasks.base import Task
from hf_dist.tasks.items import TokenItems
from hf_dist.tasks.pretrained import class_head, classes_of, load_config, load_tokenizer
from hf_dist.tasks.token_classification import rows as tagging_rows
from hf_dist.tasks.token_classification import schemes
from hf_dist.tasks.token_classification.encoding import CUT, NOWHERE, TaggedWords
from hf_dist.tasks.token_classification.rows import TagColumns, TaggedRows, TokenClassificationSettings
from hf_dist.tasks.token_classification.schemes import Openings, Scheme

logger = logging.getLogger(__name__)

_SPLITS = ("train", "validation", "test")


class TokenClassification(Task[TokenClassificationSettings]):
    """The task as the Trainer and a recipe see it. `load` goes first: it finds the tags.

    `load` gives every split the columns `tokens` and `tags` (ids; absent where a test split has none). The
    order of the tags is that of classes elsewhere: a ClassLabel keeps its own, others are sorted as numbers
    if all are integers, else by code point; a fine-tuned model keeps its ids where it knows all tags of the
    training data. Tags that only other splits have are classes too (`data.class_list`).

    A word's tag stands at its first sub-word, and is read there. Words that `max_length` cuts off, and the
    rare ones of which the tokenizer leaves nothing, are predicted as O (or as the commonest tag, where there
    is no O), so that scores always count every word.

    Attributes:
        classes: the tags in the order of their ids.
        scheme: how they make entities, or "plain".
    """

    name = "token_classification"
    auto_class = AutoModelForTokenClassification
    settings_class: ClassVar[type] = TokenClassificationSettings
    items = TokenItems(shift=False)

    def __init__(
        self, settings: TokenClassificationSettings | None = None, *, pad_to_multiple_of: int = 1
    ) -> None:
        super().__init__(settings, pad_to_multiple_of=pad_to_multiple_of)
        self.classes: tuple[str, ...] = ()
        self.scheme: Scheme = "plain"
        self._max_length: int | None = None
        self._columns: TagColumns | None = None
        # The baseline: the commonest tag of each word of the training rows, and of all words.
        self._word_tags: dict[str, int] = {}
        self._commonest: int | None = None

    @property
    def best_metric(self) -> str:  # type: ignore[override]
        """F1 of entities, or accuracy."""
        return "accuracy" if self.scheme == "plain" else "f1"

    def load(self, data: DataConfig, model: ModelConfig) -> DatasetDict:
        """Loads and checks the splits.

        Raises:
            DataError: something is wrong with a file, a column, a word or a tag.
            ConfigError: the named model has no readable config, or the tags don't fit `tag_scheme`.
        """
        self._max_length = data.max_length
        splits = sources.load_splits(data, self.builtin_splits)
        self._columns = columns = tagging_rows.find_columns(splits, self.settings)
        read = {split: tagging_rows.read_rows(rows, columns, split) for split, rows in splits.items()}
        known = classes_of(load_config(model)) if model.model_name_or_path is not None else ()
        self.classes = _choose_classes(splits, read, columns, known, train=shown_by(data))
        opened = _openings(read)
        self.scheme = schemes.recognise(self.classes, self.settings.tag_scheme, opened)
        schemes.log_scheme(self.classes, self.scheme, opened)
        loaded = DatasetDict({split: rows.as_dataset(self.classes) for split, rows in read.items()})
        if "train" in loaded:
            loaded = sources.hold_out(loaded, data)
        loaded = sources.first_rows(loaded, data)
        if "train" in loaded:
            self._learn_baseline(loaded["train"])
        return loaded

    def builtin_splits(self) -> DatasetDict:
        """Lines of the standard library's source, and what their names are."""
        return builtin_tagging.source_lines()

    def convert(self, rows: Dataset, split: str) -> Dataset:
        """Raw rows with the columns `tokens` and `tags`; of a stream, whose first rows `load` has seen.

        Raises:
            DataError: something is wrong with a row, or it has a tag that the first rows don't show.
        """
        assert self._columns is not None
        read = tagging_rows.read_rows(rows, self._columns, split)
        if read.tags is not None:
            words = Words(column=str(self._columns.tags), label="tag")
            check_seen(read.labels, self.classes, split=split, words=words, by=FIRST_ROWS)
        return read.as_dataset(self.classes)

    def tokenizer(self, data: DataConfig, model: ModelConfig) -> PreTrainedTokenizerBase:
        """The tokenizer of the named model, the named tokenizer, or the built-in one.

        Raises:
            ConfigError: it can't be loaded, has no pad token, or doesn't know which word a token belongs to.
        """
        tokenizer = super().tokenizer(data, model)
        if not tokenizer.is_fast:
            raise ConfigError(
                f"the tokenizer {type(tokenizer).__name__} doesn't know which word a token belongs to; name "
                "a fast one (with a tokenizer.json) with --tokenizer_name"
            )
        if _bare_splitter(tokenizer) is not None:
            # Words come without the spaces between them, and the model knows them with one in front. Classes
            # such as RoBERTa's build their splitter anew from this setting, others keep the saved one.
            tokenizer = load_tokenizer(model, add_prefix_space=True)
            if (splitter := _bare_splitter(tokenizer)) is not None:
                tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
                    add_prefix_space=True, use_regex=splitter.get("use_regex", True)
                )
        return tokenizer

    def model_config(self, tokenizer: PreTrainedTokenizerBase, model: ModelConfig) -> PretrainedConfig:
        """The config of the named model, or of the built-in one, with the tags that `load` found.

        Raises:
            ConfigError: it can't be loaded, or tokenizer, `max_length` and model don't fit together.
        """
        if self._max_length is None:
            raise RuntimeError("TokenClassification.load must be called before model_config")
        return self.config_with_head(
            tokenizer, model, max_length=self._max_length, **class_head(self.classes)
        )

    def encode(
        self, raw: DatasetDict, tokenizer: PreTrainedTokenizerBase, data: DataConfig
    ) -> tuple[DatasetDict, dict[str, int]]:
        """Tokenises what `load` returned, once on a machine.

        Returns:
            The splits with `input_ids`, `token_type_ids` (where the tokenizer makes them) and `labels` (tag
            ids and -100); all but `train` keep `tokens`, `tags` and `first`. And how many rows of each were
            cut.

        Raises:
            DataError: truncation leaves a training row without any label.
        """
        self.pads_with(tokenizer)
        assert self._padding is not None
        self._padding = dataclasses.replace(self._padding, fill={**self._padding.fill, "labels": IGNORED})
        inside = schemes.inside_of(self.classes) if self.settings.label_all_tokens else None
        encoded, truncated = DatasetDict(), {}
        for split, rows in raw.items():
            function = TaggedWords(
                tokenizer=tokenizer, max_length=data.max_length, inside=inside, keep=split != "train"
            )
            key = [data.max_length, inside, function.keep]
            found = encode_rows(rows, function, split=split, tokenizer=tokenizer, data=data, key=key)
            truncated[split] = count_true(found, CUT)
            encoded[split] = found.remove_columns([CUT])
            if split == "train":
                _check_labelled(found, data.max_length)
            else:
                _count_lost(found, split, self._fallback_name())
        return encoded, truncated

    def collate(self, examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Pads a batch: `input_ids`, `attention_mask`, ... and `labels`, each (rows, length)."""
        return self.known(self.padding(examples))

    def predict(self, outputs: Any, batch: Mapping[str, Any]) -> list[np.ndarray]:
        """The tag id with the highest logit at every token of each row, without padding."""
        best, mask = to_host(outputs["logits"].argmax(dim=-1).to(torch.int32), batch["attention_mask"].bool())
        return [row[real] for row, real in zip(best.numpy(), mask.numpy(), strict=True)]

    def score(self, predictions: Sequence[np.ndarray], dataset: Dataset) -> dict[str, float]:
        """Entities by seqeval, or plain tags by scikit-learn, and the same of a baseline.

        The baseline gives a word the tag it bears most often in the training rows, and a word that they don't
        have the commonest tag of all. Without training rows it gives every word the commonest tag of the rows
        that are scored.
        """
        references = [[self.classes[tag] for tag in row] for row in dataset["tags"]]
        commonest = self._commonest
        if commonest is None:
            commonest = _commonest(np.concatenate([np.asarray(row) for row in dataset["tags"]]))
        guesses = [
            [self.classes[self._word_tags.get(word, commonest)] for word in row] for row in dataset["tokens"]
        ]
        metric = load_metric("tagging")
        options = {"scheme": self.scheme, "mode": self.settings.entity_mode}
        found = list(self._by_word(predictions, dataset))
        scores = metric.compute(predictions=found, references=references, **options)
        baseline = metric.compute(predictions=guesses, references=references, **options)
        named = ("accuracy", "f1_macro") if self.scheme == "plain" else ("accuracy", "f1")
        return {**scores, **{f"{name}_baseline": baseline[name] for name in named}}

    def records(self, predictions: Sequence[np.ndarray], dataset: Dataset) -> Iterable[dict[str, Any]]:
        """The words of a row and the tag of each."""
        for words, tags in zip(dataset["tokens"], self._by_word(predictions, dataset), strict=True):
            yield {"tokens": words, "tags": tags}

    def usage(self) -> str:
        """A pipeline, given the words."""
        strategy = "none" if self.scheme == "plain" else "first"
        return (
            "from transformers import pipeline\n\n"
            'words = ["def", "join", "(", "path", ",", "*", "paths", ")", ":"]\n'
            f'tag = pipeline("token-classification", model=FOLDER, aggregation_strategy="{strategy}")\n'
            "for found in tag([words], is_split_into_words=True)[0]:\n"
            '    print(found["word"], found.get("entity_group") or found["entity"], found["score"])\n'
        )

    # ---- Words ----

    def _by_word(self, predictions: Sequence[np.ndarray], dataset: Dataset) -> Iterator[list[str]]:
        """The name of the tag of every word of each row."""
        fallback = self._fallback_name()
        for tags, places in zip(predictions, dataset["first"], strict=True):
            yield [fallback if place == NOWHERE else self.classes[tags[place]] for place in places]

    def _fallback_name(self) -> str:
        if "O" in self.classes:
            return "O"
        return self.classes[self._commonest or 0]

    def _learn_baseline(self, rows: Dataset) -> None:
        words = labels.arrow_column(rows, "tokens")
        tags = pc.list_flatten(labels.arrow_column(rows, "tags")).to_numpy()
        counts: dict[str, Counter[int]] = {}
        for word, tag in zip(pc.list_flatten(words).to_pylist(), tags.tolist(), strict=True):
            counts.setdefault(word, Counter())[tag] += 1
        self._commonest = _commonest(tags)
        self._word_tags = {
            word: min(found, key=lambda tag: (-found[tag], tag)) for word, found in counts.items()
        }


def _choose_classes(
    splits: DatasetDict,
    read: Mapping[str, TaggedRows],
    columns: TagColumns,
    known: Sequence[str],
    *,
    train: str,
) -> tuple[str, ...]:
    tagged = {split: rows.labels for split, rows in read.items() if rows.tags is not None}
    words = Words(column=str(columns.tags), train=train, label="tag")
    if "train" in tagged:
        order, keeps_order = tagging_rows.class_order(splits["train"], words.column, tagged["train"].names)
        _refuse_one(learned(order, known), words.column)
        return all_classes(tagged, order, known, words=words, keeps_order=keeps_order)
    if not known:
        raise DataError(
            "there is no training data to take the tags from; give --train_file, or name a trained model"
        )
    for split, found in tagged.items():
        check_seen(found, known, split=split, words=words, by="the model")
    _refuse_one(known, words.column)
    return tuple(known)


def _refuse_one(classes: Sequence[str], column: str) -> None:
    if len(classes) < 2:
        raise DataError(
            f"column {column} has one tag in all training rows ({classes[0]}); a tagger needs at least two"
        )


def _openings(read: Mapping[str, TaggedRows]) -> Openings:
    """Of the training rows, or of the first split that has tags."""
    first = next((read[split] for split in _SPLITS if split in read and read[split].tags is not None), None)
    if first is None or first.tags is None:
        return Openings()
    return schemes.openings(first.tags, first.ends)


def _bare_splitter(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any] | None:
    """The settings of a byte-level splitter that puts no space before the first word, else None."""
    splitter = json.loads(tokenizer.backend_tokenizer.to_str()).get("pre_tokenizer") or {}
    bare = splitter.get("type") == "ByteLevel" and not splitter.get("add_prefix_space")
    return splitter if bare else None


def _commonest(tags: np.ndarray) -> int:
    return int(np.bincount(tags).argmax())


def _check_labelled(rows: Dataset, max_length: int) -> None:
    found = labels.arrow_column(rows, "labels")
    lengths = pc.list_value_length(found).to_numpy()
    counted = pc.list_flatten(found).to_numpy() != IGNORED
    owners = np.repeat(np.arange(len(lengths)), lengths)
    without = np.flatnonzero(np.bincount(owners[counted], minlength=len(lengths)) == 0)
    if len(without):
        raise DataError(
            f"the train data has no label left in {labels.rows_of(without)} after truncation to --max_length "
            f"{max_length} (or its words are of characters that the tokenizer drops); raise it, or remove "
            "the rows"
        )


def _count_lost(rows: Dataset, split: str, fallback: str) -> None:
    places = pc.list_flatten(labels.arrow_column(rows, "first"))
    lost = int(pc.sum(pc.equal(places, pa.scalar(NOWHERE, places.type))).as_py() or 0)
    if lost:
        logger.warning(
            "%s: %d of %d words are beyond --max_length or dropped by the tokenizer; they are predicted as "
            "%s",
            split,
            lost,
            len(places),
            fallback,
        )
