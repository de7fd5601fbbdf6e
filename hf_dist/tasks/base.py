"""What all tasks have in common: settings, tokenizer, config of the model, padding."""

from __future__ import annotations

import dataclasses
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
from datasets import DatasetDict
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from hf_dist.batching.lengths import lengths_of
from hf_dist.config import DataConfig, ModelConfig
from hf_dist.data import labels
from hf_dist.data.builtin import small_models
from hf_dist.data.collate import Padding
from hf_dist.data.readers.json_cells import JsonColumns
from hf_dist.errors import DataError
from hf_dist.tasks.pretrained import (
    align_padding,
    check_fit,
    forward_parameters,
    load_config,
    load_tokenizer,
)

logger = logging.getLogger(__name__)

S = TypeVar("S")


def refuse_empty(encoded: DatasetDict) -> None:
    """Checks that every row has a token; a tokenizer without special tokens makes none of a blank text.

    Raises:
        DataError: One has none.
    """
    for split, rows in encoded.items():
        empty = np.flatnonzero(lengths_of(rows) == 0)
        if len(empty):
            raise DataError(
                f"the {split} data has no token in {labels.rows_of(empty)}: blank texts, to which this "
                "tokenizer adds no special token; remove the rows"
            )


class Task(ABC, Generic[S]):
    """A task: its methods run in the order `load`, `tokenizer`, `model_config`, `encode`, `collate`.

    One that also has `convert(rows, split)`, which puts raw rows in the task's own columns once `load` has
    seen the first ones, can stream its training rows: they come there in chunks.

    Attributes:
        name: name of the recipe.
        auto_class: the transformers auto class of its models.
        settings_class: dataclass of the flags that only this task has.
        best_metric: the score that says which checkpoint is best (without `eval_`): "loss", or a score of
            which more is better.
        keeps_padding_side: whether a tokenizer that pads on the left is saved so (rows are padded on the
            right).
        extra_columns: columns that `collate` needs though the model's forward doesn't take them.
        settings: an instance of `settings_class`.
        seed: the run's seed, for what is drawn at random.
        pad_to_multiple_of: rows of a batch are padded to a multiple of this many tokens.
    """

    name: ClassVar[str]
    auto_class: ClassVar[Any]
    settings_class: ClassVar[type]
    best_metric = "loss"
    keeps_padding_side: ClassVar[bool] = False
    extra_columns: ClassVar[tuple[str, ...]] = ()

    def __init__(self, settings: S | None = None, *, pad_to_multiple_of: int = 1) -> None:
        self.settings: S = self.settings_class() if settings is None else settings
        self.pad_to_multiple_of = pad_to_multiple_of
        self.seed = 42
        self._padding: Padding | None = None
        self._side: Literal["left", "right"] | None = None
        self._forward_takes: frozenset[str] | None = None

    # ---- Data ----

    @property
    def json_columns(self) -> JsonColumns:
        """Columns (lower case) of local files whose cells have no common type and come as JSON text."""
        return frozenset()

    @abstractmethod
    def builtin_splits(self) -> DatasetDict:
        """The raw splits of a recipe that is given no data."""

    # ---- Tokenizer and model ----

    def builtin_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of a recipe that is given no model."""
        return small_models.bpe_tokenizer()

    def builtin_config(self, tokenizer: PreTrainedTokenizerBase, **head: Any) -> PretrainedConfig:
        """The config of a recipe's own small model."""
        return small_models.small_bert(tokenizer, **head)

    def tokenizer(self, data: DataConfig, model: ModelConfig) -> PreTrainedTokenizerBase:
        """The tokenizer of the named model, the named tokenizer, or the built-in one.

        Raises:
            ConfigError: it can't be loaded, or has neither a pad nor an end-of-sequence token.
        """
        if model.model_name_or_path is None and model.tokenizer_name is None:
            return self.builtin_tokenizer()
        tokenizer = load_tokenizer(model)
        if tokenizer.pad_token_id == tokenizer.eos_token_id:
            logger.info(
                "rows are padded with the end-of-sequence token %s: the tokenizer has no other pad token",
                tokenizer.eos_token,
            )
        return tokenizer

    def config_with_head(
        self, tokenizer: PreTrainedTokenizerBase, model: ModelConfig, *, max_length: int, **head: Any
    ) -> PretrainedConfig:
        """The config of the named model, or of the built-in one, with the fields of the task's head.

        Raises:
            ConfigError: it can't be loaded, or tokenizer, `max_length` and model don't fit together.
        """
        if model.model_name_or_path is None:
            config = self.builtin_config(tokenizer, **head)
        else:
            config = load_config(model, **head)
        self._side = align_padding(tokenizer, config, keeps_side=self.keeps_padding_side)
        check_fit(
            tokenizer,
            config,
            max_length=max_length,
            pad_to_multiple_of=self.pad_to_multiple_of,
            resizes=model.resize_embeddings,
        )
        self._forward_takes = forward_parameters(config, self.auto_class)
        return config

    @abstractmethod
    def encode(
        self, raw: DatasetDict, tokenizer: PreTrainedTokenizerBase, data: DataConfig
    ) -> tuple[DatasetDict, dict[str, int]]:
        """Tokenises what `load` returned; gives how many rows of each split were truncated, too."""

    # ---- Batches ----

    def pads_with(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Says how `padding` pads; `encode` calls it."""
        padding = Padding.of(tokenizer, pad_to_multiple_of=self.pad_to_multiple_of)
        self._padding = padding if self._side is None else dataclasses.replace(padding, side=self._side)

    def padding(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """`input_ids`, `attention_mask`, ... of a batch, each (rows, length).

        Raises:
            RuntimeError: `encode` hasn't run.
        """
        if self._padding is None:
            raise RuntimeError(f"{type(self).__name__}.encode must be called before collate")
        return self._padding([dict(example) for example in examples])

    def known(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The batch without what the model's forward doesn't take."""
        if self._forward_takes is None:
            return batch
        return {name: value for name, value in batch.items() if name in self._forward_takes}

    # ---- Results ----

    def generates(self, batch: Mapping[str, Any]) -> bool:
        """Whether predictions of this batch are generated, for a task that has `generate`."""
        return True

    @abstractmethod
    def records(self, predictions: Sequence[Any], dataset: Any) -> Iterable[dict[str, Any]]:
        """What predictions.jsonl holds: one record an input example, in the order of the input."""

    @abstractmethod
    def usage(self) -> str:
        """Lines of Python that load the saved model from the folder `FOLDER` and run it on an input."""
