"""Text and prompts -> token ids and labels of a causal language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_dist.data.collate import IGNORED

Columns = dict[str, list[Any]]


@dataclass(frozen=True, kw_only=True)
class TextPieces:
    """Documents -> pieces of at most `block` tokens, each document ended by the end-of-text token.

    Neighbouring pieces share one token: it is predicted at the end of the first and starts the second, so
    that every token but a document's first is predicted exactly once.
    """

    tokenizer: PreTrainedTokenizerBase
    block: int

    def __call__(self, batch: Columns) -> Columns:
        """Cuts a batch of `text`."""
        pieces = []
        for ids in self.tokenizer(batch["text"], return_attention_mask=False, verbose=False)["input_ids"]:
            end = self.tokenizer.eos_token_id
            tokens = [*ids, end] if end is not None and (not ids or ids[-1] != end) else ids
            step = self.block - 1
            pieces += [tokens[at : at + self.block] for at in range(0, len(tokens) - 1, step)]
        return {"input_ids": pieces}


@dataclass(frozen=True, kw_only=True)
class PromptAnswers:
    """`prompt` and `completion` -> one sequence, of which only the answer and the end token are learned.

    The two are tokenised apart, as they are when the model is used.

    Attributes:
        prompts: encode only the prompts, to be answered.
    """

    tokenizer: PreTrainedTokenizerBase
    max_length: int
    prompts: bool

    def __call__(self, batch: Columns) -> Columns:
        """Encodes a batch; rows that the cut leaves without a label are dropped."""
        prompts = [self._prompt(text) for text in batch["prompt"]]
        if self.prompts:
            return prompts_only(prompts, self.max_length)
        answers = self.tokenizer(
            batch["completion"], add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]
        end = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        rows = [
            (prompt + answer + end, [IGNORED] * len(prompt) + answer + end)
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        return cut_rows(rows, self.max_length)

    def _prompt(self, text: str) -> list[int]:
        ids = list(self.tokenizer(text, return_attention_mask=False, verbose=False)["input_ids"])
        ends = (self.tokenizer.eos_token_id, self.tokenizer.sep_token_id)
        while ids and ids[-1] in ends:
            ids.pop()
        return ids


def prompts_only(prompts: list[list[int]], max_length: int) -> Columns:
    """The rows of prompts to be answered, cut at their beginning."""
    # The end of a prompt is what the answer follows.
    return {"input_ids": [prompt[-max_length:] for prompt in prompts]}


def cut_rows(rows: list[tuple[list[int], list[int]]], max_length: int) -> Columns:
    """Cuts rows; the label of a row's first token predicts nothing, so it doesn't count."""
    found: Columns = {"input_ids": [], "labels": [], "truncated": []}
    for ids, labels in rows:
        kept = labels[:max_length]
        if any(label != IGNORED for label in kept[1:]):
            found["input_ids"].append(ids[:max_length])
            found["labels"].append(kept)
            found["truncated"].append(len(ids) > max_length)
    return found
