"""Conversations -> token ids, and labels for what the assistant writes."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from hf_dist.data.collate import IGNORED
from hf_dist.errors import ConfigError, DataError
from hf_dist.tasks.causal_lm.chat_turns import (
    REASONING,
    Conversation,
    Turn,
    reasoning_of,
    without_last_answer,
)
from hf_dist.tasks.causal_lm.encoding import Columns, cut_rows, prompts_only

# Stands behind a turn's text to find its place; no template writes it.
_MARK = "\u2039end-of-turn\u203a"


@dataclass(frozen=True, kw_only=True)
class Conversations:
    """`conversation` -> the chat template's text, of which only the assistant's turns are learned.

    A turn is learned with its reasoning, its calls of tools and its end-of-turn token, from behind what the
    template writes to ask for an answer. Where it begins and ends is found by rendering the conversation up
    to it. To be answered (`prompts`), a conversation ends before its last turn where that is the assistant's.
    """

    tokenizer: PreTrainedTokenizerBase
    max_length: int
    prompts: bool

    def __call__(self, batch: Columns) -> Columns:
        """Encodes a batch; rows that the cut leaves without a label are dropped.

        Raises:
            ConfigError: the template has no place for something that a conversation holds, or changes earlier
                turns.
            DataError: the template refuses a conversation.
        """
        chats: list[Conversation] = [json.loads(text) for text in batch["conversation"]]
        for chat in chats:
            self._check_template(chat)
        if self.prompts:
            texts = [
                self._render(chat, without_last_answer(chat["turns"]), add_generation_prompt=True)
                for chat in chats
            ]
            encoded = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
            return prompts_only(encoded, self.max_length)
        return cut_rows([self._labelled(chat) for chat in chats], self.max_length)

    def _labelled(self, chat: Conversation) -> tuple[list[int], list[int]]:
        text = self._render(chat, chat["turns"])
        spans = [self._span(chat, at, text) for at, learned in enumerate(chat["learned"]) if learned]
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        learned = [
            any(begin < end and start < end and begin >= start and begin < stop for start, stop in spans)
            for begin, end in encoded["offset_mapping"]
        ]
        ids = encoded["input_ids"]
        return ids, [token if keep else IGNORED for token, keep in zip(ids, learned, strict=True)]

    # ---- Where a turn is ----

    def _span(self, chat: Conversation, at: int, text: str) -> tuple[int, int]:
        """Where the turn at `at` begins and ends in the rendered conversation."""
        turns = chat["turns"]
        before = self._render(chat, turns[:at], add_generation_prompt=True) if at else self._opening(chat)
        # White space behind the end-of-turn token is layout.
        through = self._render(chat, turns[: at + 1]).rstrip()
        end = len(through) if text.startswith(through) else self._marked_end(chat, at, text)
        if end is None or end < len(before) or not text.startswith(before):
            raise ConfigError(
                f"{chat['row']}: the chat template renders earlier turns otherwise once later ones follow, "
                "so the answers can't be told apart; give a template that does not with --chat_template, "
                "weight 0 to earlier answers, or conversations of one answer each"
            )
        return len(before), end

    def _opening(self, chat: Conversation) -> str:
        """What comes before the text of an assistant who speaks first."""
        return self._render(chat, [{"role": "assistant", "content": _MARK}]).partition(_MARK)[0]

    def _marked_end(self, chat: Conversation, at: int, text: str) -> int | None:
        """The end of a turn in a template that writes the last turn in another way than earlier ones.

        Found by a mark behind the turn's content; None where what the turn holds is not all there.
        """
        turn = chat["turns"][at]
        marked = [*chat["turns"]]
        marked[at] = {**turn, "content": turn.get("content", "") + _MARK}
        whole = self._render(chat, marked).split(_MARK)
        alone = self._render(chat, marked[: at + 1]).rstrip().split(_MARK)
        if len(whole) != 2 or len(alone) != 2 or reasoning_of(turn):
            return None
        behind, closing = whole[1], alone[1]
        if not behind.startswith(closing) or not text.endswith(behind):
            return None
        end = len(text) - len(behind) + len(closing)
        content = turn.get("content", "").strip()
        return end if text[:end].removesuffix(closing).rstrip().endswith(content) else None

    # ---- The template ----

    def _render(self, chat: Conversation, turns: list[Turn], *, add_generation_prompt: bool = False) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    turns,
                    tools=chat["tools"],
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                )
            )
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template is no valid Jinja (line {error.lineno}: {error.message}); mend it, or "
                "give another one with --chat_template"
            ) from error
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise DataError(
                f"{chat['row']}: the chat template can't render the conversation ({error}); change it, or "
                "give another template with --chat_template"
            ) from error

    def _check_template(self, chat: Conversation) -> None:
        """Refuses a template that would leave out tools, their calls or reasoning without a word.

        Raises:
            ConfigError: it is one.
        """
        try:
            template = self.tokenizer.get_chat_template(tools=chat["tools"])
        except ValueError as error:
            raise ConfigError(f"{error}; give one template with --chat_template") from error
        # transformers gives each reasoning the first two names, whichever it had.
        reasoning = {"reasoning_content", "thinking", *(name for turn in chat["turns"] for name in turn)}
        needs: list[tuple[str, Any, tuple[str, ...]]] = [
            ("tools", chat["tools"], ("tools",)),
            ("tool_calls", any(turn.get("tool_calls") for turn in chat["turns"]), ("tool_calls",)),
            (
                "reasoning",
                any(map(reasoning_of, chat["turns"])),
                tuple(name for name in REASONING if name in reasoning),
            ),
        ]
        for what, there, names in needs:
            if there and not _mentions(template, names):
                raise ConfigError(
                    f"{chat['row']} has {what}, and the chat template never mentions {' or '.join(names)}: "
                    "they would be lost; give a template that writes them with --chat_template, or leave "
                    "them out of the data"
                )


@lru_cache(maxsize=64)
def _mentions(template: str, names: tuple[str, ...]) -> bool:
    code = re.sub(r"\{#.*?#\}", "", template, flags=re.DOTALL)
    return any(re.search(rf"\b{name}\b", code) for name in names)
