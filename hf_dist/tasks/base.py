"""What all tasks have in common: settings, tokenizer, config of the model, padding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from datasets import DatasetDict
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from hf_dist.config import DataConfig, ModelConfig
from hf_dist.data import builtin_model
from hf_dist.data.collate import Padding
from hf_dist.data.json_cells import JsonColumns
from hf_dist.tasks.pretrained import check_fit, forward_parameters, load_config, load_tokenizer

S = TypeVar("S")


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
        pads_with_eos: whether a tokenizer without a pad token may pad with its end token; `collate` must then
            not take labels for padding by it.
        extra_columns: columns that `collate` needs though the model's forward doesn't take them.
        settings: an instance of `settings_class`.
        seed: the run's seed, for what is drawn at random.
        pad_to_multiple_of: rows of a batch are padded to a multiple of this many tokens.
    """

    name: ClassVar[str]
    auto_class: ClassVar[Any]
    settings_class: ClassVar[type]
    best_metric = "loss"
    pads_with_eos: ClassVar[bool] = False
    extra_columns: ClassVar[tuple[str, ...]] = ()

    def __init__(self, settings: S | None = None, *, pad_to_multiple_of: int = 1) -> None:
        self.settings: S = self.settings_class() if settings is None else settings
        self.pad_to_multiple_of = pad_to_multiple_of
        self.seed = 42
        self._padding: Padding | None = None
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
        return builtin_model.bpe_tokenizer()

    def builtin_config(self, tokenizer: PreTrainedTokenizerBase, **head: Any) -> PretrainedConfig:
        """The config of a recipe's own small model."""
        return builtin_model.small_bert(tokenizer, **head)

    def tokenizer(self, data: DataConfig, model: ModelConfig) -> PreTrainedTokenizerBase:
        """The tokenizer of the named model, the named tokenizer, or the built-in one.

        Raises:
            ConfigError: it can't be loaded, or has no pad token.
        """
        if model.model_name_or_path is None and model.tokenizer_name is None:
            return self.builtin_tokenizer()
        return load_tokenizer(model, pad_with_eos=self.pads_with_eos)

    def _config(
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
        if config.get_text_config().pad_token_id is None:
            # Decoder models read their answer at the last token that isn't padding.
            config.get_text_config().pad_token_id = tokenizer.pad_token_id
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
        self._padding = Padding.of(tokenizer, pad_to_multiple_of=self.pad_to_multiple_of)

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
