"""Text, prompts and conversations -> token ids and labels of a causal language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_dist.data.collate import IGNORED
from hf_dist.errors import ConfigError

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
            return _prompts_only(prompts, self.max_length)
        answers = self.tokenizer(
            batch["completion"], add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]
        end = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        rows = [
            (prompt + answer + end, [IGNORED] * len(prompt) + answer + end)
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        return _cut(rows, self.max_length)

    def _prompt(self, text: str) -> list[int]:
        ids = list(self.tokenizer(text, return_attention_mask=False, verbose=False)["input_ids"])
        ends = (self.tokenizer.eos_token_id, self.tokenizer.sep_token_id)
        while ids and ids[-1] in ends:
            ids.pop()
        return ids


@dataclass(frozen=True, kw_only=True)
class Conversations:
    """`messages` -> the chat template's text, of which only the assistant's turns are learned.

    Where a turn begins and ends is found by rendering the conversation up to it; the end-of-turn token
    belongs to the turn. A conversation whose last turn is the user's is encoded as a prompt.
    """

    tokenizer: PreTrainedTokenizerBase
    max_length: int
    prompts: bool

    def __call__(self, batch: Columns) -> Columns:
        """Encodes a batch; rows that the cut leaves without a label are dropped."""
        if self.prompts:
            texts = [
                self._render(_without_last_answer(turns), add_generation_prompt=True)
                for turns in batch["messages"]
            ]
            encoded = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
            return _prompts_only(encoded, self.max_length)
        return _cut([self._labelled(turns) for turns in batch["messages"]], self.max_length)

    def _labelled(self, turns: list[dict[str, str]]) -> tuple[list[int], list[int]]:
        text = self._render(turns)
        spans = []
        for at, turn in enumerate(turns):
            if turn["role"] == "assistant":
                before = self._render(turns[:at], add_generation_prompt=True)
                through = self._render(turns[: at + 1])
                if not (text.startswith(before) and text.startswith(through.rstrip())):
                    raise ConfigError(
                        "the chat template renders earlier turns otherwise once later ones follow, so the "
                        "answers can't be told apart; give a template that does not with --chat_template, "
                        "or conversations of one answer each"
                    )
                # White space behind the end-of-turn token is layout.
                spans.append((len(before), len(through.rstrip())))
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        learned = [
            any(begin < end and start < end and begin >= start and begin < stop for start, stop in spans)
            for begin, end in encoded["offset_mapping"]
        ]
        ids = encoded["input_ids"]
        return ids, [token if keep else IGNORED for token, keep in zip(ids, learned, strict=True)]

    def _render(self, turns: list[dict[str, str]], *, add_generation_prompt: bool = False) -> str:
        if not turns:
            return ""
        return str(
            self.tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        )


def _without_last_answer(turns: list[dict[str, str]]) -> list[dict[str, str]]:
    return turns[:-1] if turns[-1]["role"] == "assistant" else turns


def _prompts_only(prompts: list[list[int]], max_length: int) -> Columns:
    # The end of a prompt is what the answer follows.
    return {"input_ids": [prompt[-max_length:] for prompt in prompts]}


def _cut(rows: list[tuple[list[int], list[int]]], max_length: int) -> Columns:
    """Cuts rows; the label of a row's first token predicts nothing, so it doesn't count."""
    found: Columns = {"input_ids": [], "labels": [], "truncated": []}
    for ids, labels in rows:
        kept = labels[:max_length]
        if any(label != IGNORED for label in kept[1:]):
            found["input_ids"].append(ids[:max_length])
            found["labels"].append(kept)
            found["truncated"].append(len(ids) > max_length)
    return found
