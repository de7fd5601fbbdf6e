"""Masked language models: some tokens of a text are hidden, and the model names them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from datasets import Dataset, DatasetDict
from numpy.typing import NDArray
from transformers import AutoModelForMaskedLM, PretrainedConfig, PreTrainedTokenizerBase

from hf_dist.config import DataConfig, ModelConfig, at_least, option
from hf_dist.data.builtin.language_models import docstring_texts
from hf_dist.data.collate import IGNORED
from hf_dist.data.loading import sources
from hf_dist.data.loading.named import is_builtin
from hf_dist.data.tokenizing import encode_rows
from hf_dist.errors import ConfigError, DataError
from hf_dist.tasks.base import Task
from hf_dist.tasks.items import TokenItems
from hf_dist.tasks.language_scores import RowSums, record_of, row_sums, score_sums, unigram_nll
from hf_dist.tasks.plain_text import TEXT_COLUMNS, texts_of

logger = logging.getLogger(__name__)

# Shares of the chosen tokens that become the mask, another token, or stay (Devlin et al. 2019, section 3.1).
_MASKED, _REPLACED = 0.8, 0.1
# The share of Devlin et al. (2019); and that of Wettig et al. (2023, "Should You Mask 15% in Masked Language
# Modeling?"), which gives a model that starts from nothing more to learn from in the same few minutes.
_SHARE, _BUILTIN_SHARE = 0.15, 0.4


@dataclass(frozen=True, kw_only=True)
class MaskedLMSettings:
    """The flags of masked language modelling."""

    text_column: str | None = option(None, "Column with the text; default: found by the usual names.")
    mlm_probability: float | None = option(
        None, "Share of the tokens that are to be named; default: 0.15, on the built-in data 0.4."
    )
    whole_word_mask: bool = option(False, "Choose whole words and not single tokens.")

    def __post_init__(self) -> None:
        at_least(self, "mlm_probability", 0.0)
        if self.mlm_probability is not None and not 0 < self.mlm_probability < 1:
            raise ConfigError(f"--mlm_probability is {self.mlm_probability}; it must lie between 0 and 1")


class MaskedLM(Task[MaskedLMSettings]):
    """The task as the Trainer and a recipe see it.

    Which tokens of a row are chosen depends on the seed, the epoch and the row's number only: so it is the
    same on any number of ranks and in a resumed run. Evaluation always sees the masks of epoch 0.
    """

    name = "masked_lm"
    auto_class = AutoModelForMaskedLM
    settings_class: ClassVar[type] = MaskedLMSettings
    items = TokenItems(shift=False)
    best_metric = "loss"
    extra_columns: ClassVar[tuple[str, ...]] = ("words",)

    def __init__(self, settings: MaskedLMSettings | None = None, *, pad_to_multiple_of: int = 1) -> None:
        super().__init__(settings, pad_to_multiple_of=pad_to_multiple_of)
        self._max_length = 0
        self._share = self.settings.mlm_probability or _SHARE
        self._mask_token_id = 0
        self._ordinary: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._mask_token = ""
        self._unigram: torch.Tensor | None = None

    def load(self, data: DataConfig, model: ModelConfig) -> DatasetDict:
        """Loads and checks the splits; each gets the column `text`, without blank rows.

        Raises:
            DataError: something is wrong with a file or a column.
        """
        self._max_length = data.max_length
        if self.settings.mlm_probability is None and is_builtin(data):
            self._share = _BUILTIN_SHARE
        splits = sources.load_splits(data, self.builtin_splits)
        found = DatasetDict({split: self.convert(rows, split) for split, rows in splits.items()})
        if "train" in found:
            found = sources.hold_out(found, data)
        return sources.first_rows(found, data)

    def builtin_splits(self) -> DatasetDict:
        """The documentation of the Python that runs."""
        return docstring_texts()

    def convert(self, rows: Dataset, split: str) -> Dataset:
        """The texts of raw rows that are not blank.

        Raises:
            DataError: there is no text column, or a text is missing.
        """
        column = sources.find_column(
            rows.column_names, self.settings.text_column, (*TEXT_COLUMNS, "sentence"), flag="text_column"
        )
        return texts_of(rows, column, split=split)

    def model_config(self, tokenizer: PreTrainedTokenizerBase, model: ModelConfig) -> PretrainedConfig:
        """The config of the named model, or of the built-in one.

        Raises:
            ConfigError: it can't be loaded, the tokenizer has no mask token or can't tell words apart, or
                tokenizer, length and model don't fit together.
        """
        if tokenizer.mask_token_id is None:
            raise ConfigError(
                "the tokenizer has no mask token; name one that has (of a BERT, a RoBERTa ...) with "
                "--tokenizer_name, or train this model with recipes/causal_lm.py"
            )
        if self.settings.whole_word_mask and not tokenizer.is_fast:
            raise ConfigError(
                f"--whole_word_mask: {type(tokenizer).__name__} can't tell which tokens form a word; use a "
                "tokenizer with a tokenizer.json, or drop the flag"
            )
        return self.config_with_head(tokenizer, model, max_length=self._max_length)

    def encode(
        self, raw: DatasetDict, tokenizer: PreTrainedTokenizerBase, data: DataConfig
    ) -> tuple[DatasetDict, dict[str, int]]:
        """Tokenises what `load` returned; a long text gives several rows, so nothing is cut off.

        Returns:
            The splits with `input_ids` and `words` (the number of the word that a token is of, -1 for
            special tokens), and zeros.
        """
        self.pads_with(tokenizer)
        self._mask_token_id, self._mask_token = tokenizer.mask_token_id, tokenizer.mask_token
        special = set(tokenizer.all_special_ids)
        self._ordinary = np.array([token for token in range(len(tokenizer)) if token not in special])
        whole = self.settings.whole_word_mask
        pieces = _Pieces(tokenizer=tokenizer, max_length=data.max_length, whole_words=whole)
        encoded = DatasetDict(
            {
                split: encode_rows(
                    rows, pieces, split=split, tokenizer=tokenizer, data=data, key=[data.max_length, whole]
                )
                for split, rows in raw.items()
            }
        )
        for split, rows in encoded.items():
            if len(rows) == 0:
                raise DataError(f"no text of the {split} data has a token; give longer texts")
        if "train" in encoded:
            nll = unigram_nll(encoded["train"], "input_ids", len(tokenizer))
            self._unigram = _without(nll, sorted(special))
        return encoded, dict.fromkeys(encoded, 0)

    # ---- Batches and scores ----

    def collate(self, examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """As `collate_rows`, for epoch 0 and rows numbered from 0."""
        return self.collate_rows(examples, epoch=0, rows=range(len(examples)))

    def collate_rows(
        self, examples: list[dict[str, Any]], *, epoch: int, rows: Sequence[int]
    ) -> dict[str, torch.Tensor]:
        """Pads and masks a batch: `input_ids`, `labels`, ... of shape (rows, tokens)."""
        masked, wanted = [], []
        for example, row in zip(examples, rows, strict=True):
            ids, targets = self._mask(example, np.random.default_rng([self.seed, epoch, int(row)]))
            masked.append({**example, "input_ids": ids})
            wanted.append(targets)
        batch = self.padding(masked)
        labels = torch.full_like(batch["input_ids"], IGNORED)
        for place, values in enumerate(wanted):
            labels[place, batch["attention_mask"][place].bool()] = torch.from_numpy(values)
        batch = self.known(batch)
        batch["labels"] = labels
        return batch

    def _mask(
        self, example: Mapping[str, Any], draw: np.random.Generator
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Ids with some hidden, and the targets; at least one token is a target."""
        ids = np.array(example["input_ids"], dtype=np.int64)
        words = np.asarray(example["words"])
        candidates = np.flatnonzero(words >= 0)
        wanted = max(1, round(self._share * len(candidates)))
        if self.settings.whole_word_mask:
            names = draw.permutation(np.unique(words[candidates]))
            sizes = np.array([int((words == name).sum()) for name in names])
            # As many words as come to the share, and not one more.
            taken = names[: max(1, int(np.searchsorted(np.cumsum(sizes), wanted, side="right")))]
            chosen = candidates[np.isin(words[candidates], taken)]
        else:
            chosen = draw.permutation(candidates)[:wanted]
        targets = np.full(len(ids), IGNORED, dtype=np.int64)
        targets[chosen] = ids[chosen]
        fate = draw.random(len(chosen))
        ids[chosen[fate < _MASKED]] = self._mask_token_id
        replaced = chosen[(fate >= _MASKED) & (fate < _MASKED + _REPLACED)]
        ids[replaced] = draw.choice(self._ordinary, len(replaced))
        return ids, targets

    def predict(self, outputs: Any, batch: Mapping[str, Any]) -> list[RowSums]:
        """Sums over the hidden tokens of each row."""
        return row_sums(outputs["logits"], batch["labels"], shift=False, unigram=self._unigram)

    def score(self, predictions: Sequence[RowSums], dataset: Dataset) -> dict[str, float]:
        """Perplexity and accuracy; the baseline is the perplexity under the training tokens' counts."""
        return score_sums(predictions, with_baseline=self._unigram is not None)

    def records(self, predictions: Sequence[RowSums], dataset: Any) -> Iterable[dict[str, Any]]:
        """The perplexity of each row's hidden tokens."""
        return map(record_of, predictions)

    def usage(self) -> str:
        """A pipeline."""
        return (
            "from transformers import pipeline\n\n"
            f'text = "Return the {self._mask_token} of the object."\n'
            'fill = pipeline("fill-mask", model=FOLDER)\n'
            "print(fill(text)[0])\n"
        )


@dataclass(frozen=True, kw_only=True)
class _Pieces:
    """Texts -> rows of at most `max_length` tokens, special tokens included."""

    tokenizer: PreTrainedTokenizerBase
    max_length: int
    whole_words: bool

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        if not self.tokenizer.is_fast:
            return self._slowly(batch["text"])
        encoded = self.tokenizer(
            batch["text"],
            truncation=True,
            max_length=self.max_length,
            return_overflowing_tokens=True,
            return_special_tokens_mask=True,
            return_attention_mask=False,
        )
        names = [name for name in ("input_ids", "token_type_ids") if name in encoded]
        found: dict[str, list[Any]] = {name: [] for name in (*names, "words")}
        for row, special in enumerate(encoded["special_tokens_mask"]):
            numbers = encoded.word_ids(row) if self.whole_words else range(len(special))
            words = [
                -1 if is_special or number is None else number
                for number, is_special in zip(numbers, special, strict=True)
            ]
            if max(words, default=-1) >= 0:
                for name in names:
                    found[name].append(encoded[name][row])
                found["words"].append(words)
        return found

    def _slowly(self, texts: list[str]) -> dict[str, list[Any]]:
        """A tokenizer in Python gives no overflow: its tokens are cut here."""
        room = self.max_length - self.tokenizer.num_special_tokens_to_add()
        found: dict[str, list[Any]] = {"input_ids": [], "words": []}
        for text in texts:
            ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            for at in range(0, len(ids), room):
                piece = self.tokenizer.build_inputs_with_special_tokens(ids[at : at + room])
                special = self.tokenizer.get_special_tokens_mask(piece, already_has_special_tokens=True)
                found["input_ids"].append(piece)
                found["words"].append([-1 if mark else at for at, mark in enumerate(special)])
        return found


def _without(nll: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """The frequencies of all other tokens, adding up to 1 again; special tokens are never hidden."""
    shares = torch.exp(-nll)
    shares[list(tokens)] = 0
    return -torch.log(shares / shares.sum())
