"""The built-in model: a small BERT and a byte-level BPE tokenizer trained on the built-in text.

They stand in where a recipe is given no model name: small enough to train from nothing on two CPU cores
in a few minutes, and real in all else (a saved tokenizer, a config, special tokens, pairs).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import BertConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hf_dist.data.builtin.docstrings import builtin_folder, docstrings, split_of
from hf_dist.data.cache import build_once, key_of

MAX_POSITIONS = 512
VOCABULARY = 4096
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_CAUSAL_SPECIAL = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def bpe_tokenizer(vocabulary: int = VOCABULARY) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer of `vocabulary` pieces with BERT's special tokens.

    It is trained once and then cached. It sees only texts of the training split, so that nothing of an
    evaluation row leaks into the pieces.
    """

    def build(folder: Path) -> None:
        _train(vocabulary).save_pretrained(folder)

    name = f"bpe-{key_of(tokenizers.__version__, vocabulary, _SPECIAL, MAX_POSITIONS)}"
    return PreTrainedTokenizerFast.from_pretrained(build_once(builtin_folder() / name, build))


def causal_tokenizer(vocabulary: int = VOCABULARY) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer for causal models: an end-of-text token, a pad token, a chat template."""

    def build(folder: Path) -> None:
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=_trained(vocabulary, _CAUSAL_SPECIAL),
            pad_token="<|pad|>",
            bos_token="<|end|>",
            eos_token="<|end|>",
            additional_special_tokens=["<|user|>", "<|assistant|>", "<|system|>"],
            model_max_length=MAX_POSITIONS,
            model_input_names=["input_ids", "attention_mask"],
            clean_up_tokenization_spaces=False,
        )
        tokenizer.chat_template = _CHAT_TEMPLATE
        tokenizer.save_pretrained(folder)

    key = key_of(tokenizers.__version__, vocabulary, _CAUSAL_SPECIAL, _CHAT_TEMPLATE, MAX_POSITIONS)
    return PreTrainedTokenizerFast.from_pretrained(build_once(builtin_folder() / f"causal-bpe-{key}", build))


def small_bert(tokenizer: PreTrainedTokenizerBase, **head: Any) -> BertConfig:
    """The config of a BERT of about a million weights for `tokenizer`'s vocabulary.

    Args:
        tokenizer: gives the size of the vocabulary and the pad token.
        head: fields of the task's head, such as `num_labels` and `id2label`.
    """
    return BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=MAX_POSITIONS,
        pad_token_id=tokenizer.pad_token_id,
        **head,
    )


def _trained(vocabulary: int, special: list[str]) -> Tokenizer:
    # Not WordPiece: tokenizers 0.23 numbers its "##x" pieces in the order of a hash map with a random seed,
    # so that two trainings on the same text differ. Byte-level BPE is reproducible, and loses no character.
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (row.text for row in docstrings() if split_of(row.text) == "train")
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _train(vocabulary: int) -> PreTrainedTokenizerFast:
    tokenizer = _trained(vocabulary, _SPECIAL)
    ids = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ids
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=MAX_POSITIONS,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )
