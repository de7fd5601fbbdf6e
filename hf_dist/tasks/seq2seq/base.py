"""What summarization and translation share: a source text, a target text, and an encoder-decoder between.

Evaluation generates: its scores are those of texts that the model writes by itself, and not of the next
token after a given beginning. The loss is that of the given targets, as in training.
"""

from __future__ import annotations

import copy
import logging
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from datasets import Dataset, DatasetDict
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from hf_dist.config import DataConfig, ModelConfig, at_least, option
from hf_dist.data.builtin import seq2seq as builtin_seq2seq
from hf_dist.data.collate import IGNORED, round_up
from hf_dist.data.loading import sources
from hf_dist.data.tokenizing import count_true, encode_rows
from hf_dist.errors import ConfigError, DataError
from hf_dist.tasks.base import Task
from hf_dist.tasks.items import TokenItems
from hf_dist.tasks.pretrained import load_config
from hf_dist.tasks.seq2seq.encoding import EncodePairs, special_tokens

logger = logging.getLogger(__name__)


# What only sampling or only beam search reads; a config that says both warns at every call.
_OF_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "top_h",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
)
_OF_BEAMS = ("early_stopping", "length_penalty")
# Limits that would compete with ours.
_OF_LENGTH = ("max_length", "min_new_tokens", "max_time", "stop_strings")


@dataclass(frozen=True, kw_only=True)
class Seq2SeqSettings:
    """Flags that all encoder-decoder tasks have."""

    source_prefix: str | None = option(
        None, "Put before every source text, such as 'summarize: ' for T5 models."
    )
    max_target_length: int = option(
        128, "Longest target in tokens; longer ones are cut for training and counted."
    )
    val_max_target_length: int | None = option(
        None, "Most tokens that are generated for a text; default: max_target_length."
    )
    num_beams: int = option(1, "Beams of the search for the likeliest text; 1 takes the likeliest token.")

    def __post_init__(self) -> None:
        for name in ("max_target_length", "val_max_target_length", "num_beams"):
            at_least(self, name, 1)

    @property
    def most_generated(self) -> int:
        """Most tokens that are generated for a text."""
        return self.val_max_target_length or self.max_target_length


S = TypeVar("S", bound=Seq2SeqSettings)


class Seq2Seq(Task[S]):
    """The common part of the encoder-decoder tasks. `load` goes first.

    `load` gives every split the columns `source` and `target` (strings; a test split may have no targets).
    `encode` adds `input_ids` and `labels` (lists of different lengths), and keeps the texts of evaluation
    splits, which scores are made of.

    Attributes:
        decoding: fields of the model's generation config that the task sets, beside the lengths and beams.
    """

    auto_class = AutoModelForSeq2SeqLM
    items = TokenItems()

    def __init__(self, settings: S | None = None, *, pad_to_multiple_of: int = 1) -> None:
        super().__init__(settings, pad_to_multiple_of=pad_to_multiple_of)
        self.decoding: dict[str, Any] = {}
        self._max_length: int | None = None
        self._decoder: PreTrainedTokenizerBase | None = None

    # ---- What a task decides ----

    @abstractmethod
    def builtin_splits(self) -> DatasetDict:
        """The splits that are used where no data is named."""

    @abstractmethod
    def pairs(self, splits: DatasetDict, *, builtin: bool) -> DatasetDict:
        """The splits with the columns `source` and `target`, checked by `take_texts`."""

    @abstractmethod
    def measure(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        """The scores of generated texts; `best_metric` is one of them."""

    @abstractmethod
    def baseline(self, dataset: Dataset) -> list[str]:
        """What an answer without any model would be for each row: `best_metric` of it is reported beside."""

    # ---- Data ----

    def load(self, data: DataConfig, model: ModelConfig) -> DatasetDict:
        """Loads and checks the splits.

        Raises:
            DataError: something is wrong with a file, a column or a text.
            ConfigError: the named model is no encoder-decoder, or has no readable config.
        """
        self._max_length = data.max_length
        if model.model_name_or_path is not None:
            # Before its tokenizer, which for a decoder often lacks what one would then mend in vain.
            _require_encoder_decoder(load_config(model), model.model_name_or_path)
        named = (data.dataset_name, data.train_file, data.validation_file, data.test_file)
        loaded = self.pairs(
            sources.load_splits(data, self.builtin_splits),
            builtin=not any(name is not None for name in named),
        )
        if "train" in loaded:
            loaded = sources.hold_out(loaded, data)
        return sources.first_rows(loaded, data)

    def encode(
        self, raw: DatasetDict, tokenizer: PreTrainedTokenizerBase, data: DataConfig
    ) -> tuple[DatasetDict, dict[str, int]]:
        """Tokenises what `load` returned, once on a machine.

        A training row whose source or target has no tokens is left out and counted; in other splits it
        stays, so that every row has a prediction.

        Returns:
            The splits with `input_ids`, `labels` (token ids; absent where a test split has no targets), and
            `source` and `target` outside of train; and how many sources of each were truncated.

        Raises:
            ConfigError: the limits leave no room for a text.
            DataError: no training row is left.
        """
        self.pads_with(tokenizer)
        self._decoder = tokenizer
        prefix = self.settings.source_prefix or ""
        self._check_room(tokenizer, data.max_length, prefix)
        encoded, truncated = DatasetDict(), {}
        for split, rows in raw.items():
            function = EncodePairs(
                tokenizer=tokenizer,
                prefix=prefix,
                max_length=data.max_length,
                max_target_length=self.settings.max_target_length,
                with_target="target" in rows.column_names,
                trains=split == "train",
            )
            result = encode_rows(
                rows, function, split=split, tokenizer=tokenizer, data=data, key=function.key()
            )
            if blank := count_true(result, "blank"):
                result = self._without_blank(split, result, blank)
            truncated[split] = count_true(result, "source_cut")
            self._report_cut_targets(split, result)
            encoded[split] = result.remove_columns(["source_cut", "target_cut", "blank"])
        return encoded, truncated

    def _without_blank(self, split: str, rows: Dataset, blank: int) -> Dataset:
        """Leaves rows without tokens out of the training data; elsewhere every row needs a prediction."""
        what = f"{split}: {blank} of {len(rows)} rows have a source or a target without tokens"
        if split != "train":
            logger.warning("%s; they are scored as they are", what)
            return rows
        if blank == len(rows):
            raise DataError(
                f"all {blank} rows of the train data have a source or a target without tokens; expected text "
                "in both columns"
            )
        logger.warning("%s and are left out", what)
        flags = rows.select_columns(["blank"]).with_format("numpy")[:]["blank"]
        return rows.select(np.flatnonzero(~flags))

    def _report_cut_targets(self, split: str, rows: Dataset) -> None:
        if cut := count_true(rows, "target_cut"):
            logger.info(
                "%s: %d of %d targets cut to --max_target_length %d tokens for the loss",
                split,
                cut,
                len(rows),
                self.settings.max_target_length,
            )

    def _check_room(self, tokenizer: PreTrainedTokenizerBase, max_length: int, prefix: str) -> None:
        """Checks that a cut source and a cut target keep at least one token of their text."""
        own = special_tokens(tokenizer, target=True)
        if self.settings.max_target_length <= own:
            raise ConfigError(
                f"--max_target_length {self.settings.max_target_length} leaves no token of a target: the "
                f"tokenizer adds {own} of its own; give at least {own + 1}"
            )
        own = len(tokenizer(prefix, verbose=False)["input_ids"])
        if max_length <= own:
            raise ConfigError(
                f"--max_length {max_length} leaves no token of a source: the tokenizer's own and "
                f"--source_prefix take {own}; give at least {own + 1}"
            )

    # ---- Model ----

    def builtin_config(self, tokenizer: PreTrainedTokenizerBase, **head: Any) -> PretrainedConfig:
        """A small T5."""
        return builtin_seq2seq.small_t5(tokenizer, **head)

    def model_config(self, tokenizer: PreTrainedTokenizerBase, model: ModelConfig) -> PretrainedConfig:
        """The config of the named model, or of the built-in one.

        Raises:
            ConfigError: it can't be loaded, or tokenizer, lengths and model don't fit together.
        """
        if self._max_length is None:
            raise RuntimeError(f"{type(self).__name__}.load must be called before model_config")
        config = self.config_with_head(tokenizer, model, max_length=self._max_length)
        longest = max(self.settings.max_target_length, self.settings.most_generated)
        # The decoder reads the target shifted by one token, so it has as many positions.
        limits = [
            getattr(config.get_text_config(decoder=True), name, None)
            for name in ("max_position_embeddings", "max_decoder_position_embeddings")
        ]
        limit = min((limit for limit in limits if limit is not None), default=None)
        if limit is not None and round_up(longest, self.pad_to_multiple_of) > limit:
            raise ConfigError(
                f"--max_target_length or --val_max_target_length is {longest}, and the model's decoder has "
                f"{limit} positions; give at most {limit - limit % self.pad_to_multiple_of}"
            )
        if model.model_name_or_path is not None and config.model_type == "t5" and not self._has_prefix:
            known = (getattr(config, "task_specific_params", None) or {}).values()
            usual = sorted({params["prefix"] for params in known if params.get("prefix")})
            logger.warning(
                "a T5 model without --source_prefix: the original ones were trained with a prefix that names "
                "the task, such as %r",
                usual or ["summarize: ", "translate English to German: "],
            )
        return config

    @property
    def _has_prefix(self) -> bool:
        return bool(self.settings.source_prefix)

    def prepare_for(self, model: Any) -> None:
        """Makes the model's generation config say what evaluation does, so that it is saved with it."""
        model.generation_config = self.generation_config(model.generation_config)

    def generation_config(self, inherited: GenerationConfig) -> GenerationConfig:
        """A model's generation config with our lengths and beams; repetition penalties and the like stay.

        Sampling is off, so that scores are reproducible. What only sampling or beam search reads is taken out
        where it has no effect, and a minimal length where it is above the maximal one.
        """
        config = copy.deepcopy(inherited)
        unused = (*_OF_SAMPLING, *_OF_LENGTH, *(_OF_BEAMS if self.settings.num_beams == 1 else ()))
        for name in unused:
            setattr(config, name, None)
        # Else `generate` would take its fields from the model's config again.
        config._from_model_config = False
        config.do_sample = False
        config.use_cache = True
        config.num_beams = self.settings.num_beams
        config.num_return_sequences = 1
        config.max_new_tokens = self.settings.most_generated
        if config.min_length is not None and config.min_length > config.max_new_tokens:
            config.min_length = None
        for name, value in self.decoding.items():
            setattr(config, name, value)
        return config

    # ---- Batches ----

    def collate(self, examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Pads a batch: `input_ids`, `attention_mask` (rows, source length), `labels` (rows, target length).

        Added labels are -100. The model makes its decoder's input of the labels by itself.
        """
        batch = self.known(self.padding(examples))
        if "labels" in examples[0]:
            longest = max(len(example["labels"]) for example in examples)
            labels = np.full((len(examples), round_up(longest, self.pad_to_multiple_of)), IGNORED, np.int64)
            for row, example in enumerate(examples):
                labels[row, : len(example["labels"])] = example["labels"]
            batch["labels"] = torch.from_numpy(labels)
        return batch

    # ---- Predictions ----

    def generates(self, batch: Mapping[str, Any]) -> bool:
        """Always."""
        return True

    def generate(self, model: Any, batch: Mapping[str, Any], *, synced: bool) -> list[str]:
        """The text that the model writes for each row.

        Args:
            model: the model itself, without its wrapper.
            batch: as collated.
            synced: whether all ranks must run the same number of forward passes.
        """
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        tokens = model.generate(
            **inputs,
            generation_config=self.generation_config(model.generation_config),
            synced_gpus=synced,
        )
        return self.texts(tokens)

    def predict(self, outputs: Any, batch: Mapping[str, Any]) -> list[str]:
        """The likeliest token at each position of the given targets, as text: what a loss can see."""
        tokens = outputs["logits"].argmax(dim=-1)
        if "labels" in batch:
            tokens = tokens.masked_fill(batch["labels"] == IGNORED, self.pad_token_id)
        return self.texts(tokens)

    def texts(self, tokens: Tensor) -> list[str]:
        """Rows of token ids as texts, without special tokens."""
        # A tokenizer would fetch row by row from the device.
        texts = self._known_tokenizer.batch_decode(tokens.cpu(), skip_special_tokens=True)
        return [text.strip() for text in texts]

    @property
    def pad_token_id(self) -> int:
        """The tokenizer's."""
        return self._known_tokenizer.pad_token_id

    @property
    def _known_tokenizer(self) -> PreTrainedTokenizerBase:
        if self._decoder is None:
            raise RuntimeError(f"{type(self).__name__}.encode must be called before generate")
        return self._decoder

    def score(self, predictions: Sequence[str], dataset: Dataset) -> dict[str, float]:
        """The task's scores, the best metric of a baseline, and the mean number of words of a prediction."""
        references = list(dataset["target"])
        scores = self.measure(list(predictions), references)
        best = self.best_metric
        baseline = self.measure(self.baseline(dataset), references)[best]
        words = float(np.mean([len(text.split()) for text in predictions]))
        return {**scores, f"{best}_baseline": baseline, "generated_words": words}

    def records(self, predictions: Sequence[str], dataset: Dataset) -> Iterable[dict[str, Any]]:
        """The generated text of each row, and the given one where there is one."""
        targets = dataset["target"] if "target" in dataset.column_names else [None] * len(dataset)
        for prediction, target in zip(predictions, targets, strict=True):
            yield (
                {"prediction": prediction} if target is None else {"prediction": prediction, "target": target}
            )

    def usage(self) -> str:
        """AutoModel and generate: transformers 5 has no pipeline for these tasks."""
        prefix = f"{self.settings.source_prefix!r} + " if self._has_prefix else ""
        languages = "".join(f"tokenizer.{name} = {value!r}\n" for name, value in self.languages().items())
        return (
            "from transformers import AutoModelForSeq2SeqLM, AutoTokenizer\n\n"
            f"text = {self.example!r}\n"
            "tokenizer = AutoTokenizer.from_pretrained(FOLDER)\n"
            f"{languages}"
            "model = AutoModelForSeq2SeqLM.from_pretrained(FOLDER)\n"
            f"inputs = tokenizer({prefix}text, truncation=True, max_length={self._max_length}, "
            'return_tensors="pt")\n'
            "tokens = model.generate(**inputs)\n"
            "print(tokenizer.batch_decode(tokens, skip_special_tokens=True)[0].strip())\n"
        )

    example = "A text."

    def languages(self) -> dict[str, str]:
        """Attributes of the tokenizer that say the languages, where it has them."""
        return {}


def _require_encoder_decoder(config: PretrainedConfig, name: str) -> None:
    if not config.is_encoder_decoder:
        raise ConfigError(
            f"--model_name_or_path {name} is a {config.model_type} model without a separate decoder; "
            "expected an encoder-decoder such as T5, BART, mBART, M2M100, Marian or Pegasus; decoders alone "
            "are fine-tuned on prompts and answers by recipes/causal_lm.py"
        )
