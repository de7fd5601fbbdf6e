"""Causal language models: continued pre-training on text, fine-tuning on prompts or conversations."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from datasets import Dataset, DatasetDict
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedTokenizerBase

from hf_dist.batching.lengths import lengths_of
from hf_dist.batching.packing import Packing
from hf_dist.config import BatchingConfig, DataConfig, ModelConfig, at_least, option
from hf_dist.data.builtin import small_models
from hf_dist.data.builtin.language_models import docstring_texts
from hf_dist.data.collate import IGNORED, round_up
from hf_dist.data.loading import sources
from hf_dist.data.packing.packs import Pack, PackedCollator, PackedDataset
from hf_dist.data.packing.probe import packed_collator
from hf_dist.data.readers.json_cells import JsonColumns
from hf_dist.data.tokenizing import count_true, encode_rows, is_in_memory
from hf_dist.errors import ConfigError, DataError
from hf_dist.tasks.base import Task
from hf_dist.tasks.causal_lm.chat_encoding import Conversations
from hf_dist.tasks.causal_lm.encoding import PromptAnswers, TextPieces
from hf_dist.tasks.causal_lm.forms import CausalColumns, Form, find_form, json_columns, read_form
from hf_dist.tasks.items import TokenItems
from hf_dist.tasks.language_scores import RowSums, record_of, row_sums, score_sums, unigram_nll

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CausalLMSettings:
    """The flags of causal language modelling."""

    text_column: str | None = option(None, "Column with plain text; default: found by the usual names.")
    prompt_column: str | None = option(
        None, "Column with the prompt, or a path into one, such as instances.0.input."
    )
    input_column: str | None = option(None, "Column with what follows the prompt, where there is something.")
    completion_column: str | None = option(None, "Column with the answer, or a path into one.")
    messages_column: str | None = option(None, "Column with conversations: lists of role and content.")
    tools_column: str | None = option(
        None, "Column with the tools that a conversation may call: a list, or JSON text; default: tools."
    )
    chat_template: str | None = option(
        None, "File with a Jinja chat template, where the tokenizer has none or a better one is wanted."
    )
    block_size: int | None = option(
        None, "Text is cut into pieces of at most so many tokens; default: max_length."
    )
    packing: bool = option(
        False, "Fill training rows with several documents, each of which sees only itself."
    )
    max_new_tokens: int = option(128, "Most tokens of an answer that --do_predict generates.")

    def __post_init__(self) -> None:
        at_least(self, "block_size", 2)
        at_least(self, "max_new_tokens", 1)


class CausalLM(Task[CausalLMSettings]):
    """The task as the Trainer and a recipe see it.

    Attributes:
        form: what the data holds: text, prompts with answers, or conversations. Known once `load` has run.
    """

    name = "causal_lm"
    auto_class = AutoModelForCausalLM
    settings_class: ClassVar[type] = CausalLMSettings
    items = TokenItems(shift=True)
    best_metric = "loss"
    keeps_padding_side: ClassVar[bool] = True

    def __init__(self, settings: CausalLMSettings | None = None, *, pad_to_multiple_of: int = 1) -> None:
        super().__init__(settings, pad_to_multiple_of=pad_to_multiple_of)
        self.form: Form = "text"
        self._columns: CausalColumns | None = None
        self._block = 0
        self._pad_token_id = 0
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._unigram: torch.Tensor | None = None
        self._longest_document = 0
        self._packed: PackedCollator | None = None

    # ---- Data ----

    def load(self, data: DataConfig, model: ModelConfig) -> DatasetDict:
        """Loads and checks the splits: text, prompts with answers, or conversations.

        Raises:
            DataError: something is wrong with a file, a column or a row.
        """
        splits = sources.load_splits(data, self.builtin_splits, json_columns=self.json_columns)
        self._columns = find_form(splits, self.settings)
        self.form = self._columns.form
        if self.settings.block_size and self.form != "text":
            raise ConfigError("--block_size cuts plain text; for prompts and conversations give --max_length")
        if self.settings.tools_column and self.form != "chat":
            raise ConfigError("--tools_column goes with conversations, and the data holds none; drop it")
        self._block = self.settings.block_size or data.max_length
        found = DatasetDict({split: self.convert(rows, split) for split, rows in splits.items()})
        for split, rows in found.items():
            if len(rows) == 0:
                raise DataError(
                    f"every answer of the {split} data has weight 0, so there is nothing to learn or to "
                    "score; give some of them weight 1"
                )
        if "train" in found:
            found = sources.hold_out(found, data)
        return sources.first_rows(found, data)

    @property
    def json_columns(self) -> JsonColumns:
        """The columns that hold conversations and tools."""
        return json_columns(self.settings)

    def builtin_splits(self) -> DatasetDict:
        """The documentation of the Python that runs."""
        return docstring_texts()

    def convert(self, rows: Dataset, split: str) -> Dataset:
        """Raw rows as texts, prompts or conversations.

        Raises:
            DataError: something is missing in a row, or of another kind.
        """
        assert self._columns is not None
        return read_form(rows, self._columns, split=split)

    def builtin_tokenizer(self) -> PreTrainedTokenizerBase:
        """Byte-level BPE with an end-of-text token and a chat template."""
        return small_models.causal_tokenizer()

    def builtin_config(self, tokenizer: PreTrainedTokenizerBase, **head: Any) -> PretrainedConfig:
        """A Llama of about a million weights."""
        return LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=small_models.MAX_POSITIONS,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            **head,
        )

    def tokenizer(self, data: DataConfig, model: ModelConfig) -> PreTrainedTokenizerBase:
        """The tokenizer; one without a pad token pads with its end token, which stays learned.

        Raises:
            ConfigError: it can't be loaded, or conversations have no template.
        """
        tokenizer = super().tokenizer(data, model)
        if self.settings.chat_template is not None:
            path = Path(self.settings.chat_template)
            try:
                tokenizer.chat_template = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"--chat_template {path} can't be read ({error}); name a text file"
                ) from error
        if self.form == "chat" and not tokenizer.chat_template:
            raise ConfigError(
                "the data holds conversations and the tokenizer has no chat template; give a Jinja file with "
                "--chat_template, or the tokenizer of a chat model with --tokenizer_name"
            )
        if self.form == "chat" and not tokenizer.is_fast:
            raise ConfigError(
                f"{type(tokenizer).__name__} can't tell where in the text its tokens are; conversations need "
                "a tokenizer with a tokenizer.json"
            )
        return tokenizer

    def model_config(self, tokenizer: PreTrainedTokenizerBase, model: ModelConfig) -> PretrainedConfig:
        """The config of the named model, or of the built-in one.

        Raises:
            ConfigError: it can't be loaded, or tokenizer, length and model don't fit together.
        """
        return self.config_with_head(tokenizer, model, max_length=self._block)

    def encode(
        self, raw: DatasetDict, tokenizer: PreTrainedTokenizerBase, data: DataConfig
    ) -> tuple[DatasetDict, dict[str, int]]:
        """Tokenises what `load` returned.

        Returns:
            The splits with `input_ids`, and `labels` where they differ from them, and how many rows of each
            were truncated. Rows that the cut leaves without a label are dropped with a word in the log.

        Raises:
            DataError: no row of a split has a label left (a chunk of a stream may be without).
        """
        self.pads_with(tokenizer)
        self._tokenizer = tokenizer
        self._pad_token_id = tokenizer.pad_token_id
        encoded, truncated = DatasetDict(), {}
        for split, rows in raw.items():
            function = self._function(tokenizer, split)
            key = [self._block, tokenizer.chat_template, tokenizer.eos_token, split == "test"]
            encoded[split] = encode_rows(rows, function, split=split, tokenizer=tokenizer, data=data, key=key)
            truncated[split] = 0
            if "truncated" in encoded[split].column_names:
                truncated[split] = count_true(encoded[split], "truncated")
                encoded[split] = encoded[split].remove_columns(["truncated"])
                self._say_dropped(len(rows) - len(encoded[split]), len(rows), split, data)
            if len(encoded[split]) == 0 and not is_in_memory():
                raise DataError(
                    f"no row of the {split} data has a token to learn within --max_length {self._block}; "
                    "raise it, or give longer texts"
                )
        if "train" in encoded:
            column = "labels" if "labels" in encoded["train"].column_names else "input_ids"
            self._unigram = unigram_nll(encoded["train"], column, len(tokenizer))
        return encoded, truncated

    def _function(self, tokenizer: PreTrainedTokenizerBase, split: str) -> Any:
        if self.form == "text":
            return TextPieces(tokenizer=tokenizer, block=self._block)
        if self.form == "prompt":
            return PromptAnswers(tokenizer=tokenizer, max_length=self._block, prompts=split == "test")
        return Conversations(tokenizer=tokenizer, max_length=self._block, prompts=split == "test")

    def _say_dropped(self, dropped: int, rows: int, split: str, data: DataConfig) -> None:
        if dropped:
            logger.warning(
                "%s: %d of %d examples have no answer left within --max_length %d and are dropped",
                split,
                dropped,
                rows,
                data.max_length,
            )

    # ---- Packing ----

    def pack(self, rows: Dataset, batching: BatchingConfig, *, seed: int) -> PackedDataset | None:
        """The training rows as packs, or None where `packing` is off.

        A pack holds a whole fraction of the cap, so that a micro-batch holds full rows.
        """
        if not self.settings.packing:
            return None
        lengths = lengths_of(rows)
        self._longest_document = int(lengths.max())
        multiple = batching.pad_to_multiple_of or 1
        cap = batching.max_tokens_per_device
        share = cap // max(1, cap // round_up(max(self._block, self._longest_document), multiple))
        packing = Packing.build(
            lengths, max(1, share // multiple) * multiple, too_long=batching.too_long, seed=seed
        )
        logger.info("\n".join(packing.lines()))
        return PackedDataset(rows, packing)

    def prepare_for(self, model: nn.Module) -> None:
        """Finds how the model keeps packed documents apart, once its engine is up; all ranks together.

        Raises:
            ConfigError: it can't.
        """
        if self.settings.packing and self._longest_document:
            self._packed = packed_collator(
                model,
                longest_document=self._longest_document,
                pad_token_id=self._pad_token_id,
                pad_to_multiple_of=self.pad_to_multiple_of,
                engine_is_up=True,
            )
            logger.info("packed documents are kept apart by %s", self._packed.attention.name.lower())

    # ---- Batches and scores ----

    def collate(self, examples: list[Any]) -> dict[str, torch.Tensor]:
        """Pads rows (or packs): `input_ids`, `attention_mask`, `labels`, each (rows, tokens)."""
        if isinstance(examples[0], Pack):
            if self._packed is None:
                raise RuntimeError("CausalLM.prepare_for must be called before packs are collated")
            return self._packed(examples)
        if self._is_prompt(examples[0]):
            assert self._padding is not None
            # What is generated follows the last token.
            return self.known(dataclasses.replace(self._padding, side="left")(examples))
        batch = self.known(self.padding(examples))
        labels = torch.full_like(batch["input_ids"], IGNORED)
        for row, example in enumerate(examples):
            wanted = torch.as_tensor(example.get("labels", example["input_ids"]))
            # By the number of tokens and not by the pad token, which may be the end token.
            place = batch["attention_mask"][row].bool() if "attention_mask" in batch else slice(len(wanted))
            labels[row, place] = wanted
        batch["labels"] = labels
        return batch

    def _is_prompt(self, example: Mapping[str, Any]) -> bool:
        return self.form != "text" and "labels" not in example

    def predict(self, outputs: Any, batch: Mapping[str, Any]) -> list[RowSums]:
        """Sums over the target tokens of each row."""
        return row_sums(outputs["logits"], batch["labels"], shift=True, unigram=self._unigram)

    def generates(self, batch: Mapping[str, Any]) -> bool:
        """Prompts to predict are answered."""
        return "labels" not in batch

    def generate(self, model: Any, batch: Mapping[str, Any], *, synced: bool) -> list[str]:
        """Greedy answers to a batch of prompts, padded on the left."""
        assert self._tokenizer is not None
        tokens = model.generate(
            **batch,
            max_new_tokens=self.settings.max_new_tokens,
            do_sample=False,
            num_beams=1,
            pad_token_id=self._pad_token_id,
            eos_token_id=self._tokenizer.eos_token_id,
            synced_gpus=synced,
            use_cache=True,
        )
        answers = tokens[:, batch["input_ids"].shape[1] :].cpu()
        return [text.strip() for text in self._tokenizer.batch_decode(answers, skip_special_tokens=True)]

    def score(self, predictions: Sequence[RowSums], dataset: Dataset) -> dict[str, float]:
        """Perplexity and token accuracy; the baseline is the perplexity under the training tokens' counts."""
        return score_sums(predictions, with_baseline=self._unigram is not None)

    def records(self, predictions: Sequence[Any], dataset: Any) -> Iterable[dict[str, Any]]:
        """The answer to each prompt, or the perplexity of each piece of text."""
        return ({"prediction": one} if isinstance(one, str) else record_of(one) for one in predictions)

    def usage(self) -> str:
        """A pipeline."""
        if self.form == "chat":
            given = 'messages = [{"role": "user", "content": "What does abs do?"}]'
            shown = 'write(messages, max_new_tokens=40)[0]["generated_text"][-1]["content"]'
        else:
            given, shown = 'text = "Return the"', 'write(text, max_new_tokens=40)[0]["generated_text"]'
        return (
            "from transformers import pipeline\n\n"
            f'{given}\nwrite = pipeline("text-generation", model=FOLDER)\nprint({shown})\n'
        )
