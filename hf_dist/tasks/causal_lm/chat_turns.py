"""Conversations as files have them -> turns, tools and what is learned, as chat templates take them.

The forms: role and content (OpenAI, transformers), from and value (ShareGPT); content as a string or as a
list of parts; calls of tools under `tool_calls`, under the older `function_call`, or as ShareGPT's turns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from hf_dist.errors import DataError

_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
_CALLS = ("function_call", "tool_call")
_WEIGHTS = ("weight", "loss_weight", "train", "trainable")
# Other names for the same; transformers fills in those that a template may read.
REASONING = ("reasoning_content", "thinking", "reasoning")
_TEXT_PARTS = (None, "text", "input_text", "output_text")
_REASONING_PARTS = ("reasoning", "thinking")
_READ = ("role", "from", "content", "value", "tool_calls", "function_call", *_WEIGHTS)

Turn = dict[str, Any]


class Conversation(TypedDict):
    """What one row holds.

    Attributes:
        turns: as `apply_chat_template` takes them; no key is null.
        tools: JSON schemas of functions, or None.
        learned: of each turn, whether it is trained on; true for no other turns than the assistant's.
        row: names the row in messages.
    """

    turns: list[Turn]
    tools: list[Any] | None
    learned: list[bool]
    row: str


def read_conversation(value: Any, tools: Any, *, column: str, tools_column: str, row: str) -> Conversation:
    """Reads one row.

    Args:
        value: a list of turns.
        tools: their tools: a list, JSON text of one, or None.
        column: name of the column of `value`, for messages.
        tools_column: name of that of `tools`.
        row: names the row.

    Raises:
        DataError: something is missing, of another kind, or no text.
    """
    where = f"column {column} of {row}"
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: found {value!r:.60}; expected a list of turns with role and content")
    found = [_parsed(turn, where) if isinstance(turn, str) else turn for turn in value]
    turns = [_turn(turn, where) for turn in found]
    learned = [
        _weight(raw, where) and turn["role"] == "assistant" for raw, turn in zip(found, turns, strict=True)
    ]
    return Conversation(
        turns=turns, tools=_tools(tools, f"column {tools_column} of {row}"), learned=learned, row=row
    )


def has_answer(turn: Turn) -> bool:
    """Whether a turn is an answer of the assistant: text, reasoning or the call of a tool."""
    if turn["role"] != "assistant":
        return False
    return bool(turn.get("content", "").strip() or turn.get("tool_calls") or reasoning_of(turn))


def reasoning_of(turn: Turn) -> str:
    """A turn's reasoning, empty where there is none."""
    return next((turn[name] for name in REASONING if turn.get(name)), "")


def without_last_answer(turns: list[Turn]) -> list[Turn]:
    """The turns that the last answer is given to."""
    return turns[:-1] if turns[-1]["role"] == "assistant" else turns


# ---- Turns ----


def _turn(given: Any, where: str) -> Turn:
    # A table gives each turn the keys of all: those that it has not are null.
    raw = {key: value for key, value in given.items() if value is not None} if isinstance(given, dict) else {}
    name = raw.get("role", raw.get("from"))
    content = raw.get("content", raw.get("value"))
    if not isinstance(name, str):
        raise _no_turn(given, where)
    turn: Turn = {"role": _ROLES.get(name, name)}
    found = raw.get("tool_calls")
    if name in _CALLS:
        found, content = content if found is None else found, None
    calls = _list_of(found, "tool_calls", where) if found else []
    if not calls and raw.get("function_call"):
        calls = _list_of(raw["function_call"], "function_call", where)
    text, reasoning = _content(content, turn["role"], where)
    others = {key: value for key, value in raw.items() if key not in _READ}
    _add_reasoning(others, reasoning, where)
    if calls:
        if turn["role"] != "assistant":
            raise DataError(f"{where}: a turn of {name} has tool_calls; only the assistant calls tools")
        others["tool_calls"] = [_call(call, where) for call in calls]
    if text is None and turn["role"] == "tool":
        text = ""  # a tool that gave nothing back
    if text is not None:
        turn["content"] = text
    elif not calls and not (turn["role"] == "assistant" and reasoning_of(others)):
        raise _no_turn(given, where)
    return {**turn, **others}


def _no_turn(given: Any, where: str) -> DataError:
    return DataError(f"{where}: found the turn {given!r:.60}; expected text under role and content")


def _weight(raw: Mapping[str, Any], where: str) -> bool:
    found = {key: raw[key] for key in _WEIGHTS if raw.get(key) is not None}
    for key, value in found.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            raise DataError(
                f"{where}: a turn has {key} {value!r:.40}; expected 0 (not trained on) or 1 (trained on)"
            )
    if len(set(map(bool, found.values()))) > 1:
        shown = " and ".join(f"{key} {value!r}" for key, value in found.items())
        raise DataError(f"{where}: a turn has {shown}, which contradict each other; leave one of them")
    return all(found.values())


def _content(content: Any, role: str, where: str) -> tuple[str | None, str]:
    """The text of a turn (None where it has none), and the reasoning among its parts."""
    if content is None or isinstance(content, str):
        return content, ""
    parts = content
    if isinstance(content, dict) and "type" in content:
        parts = [content]
    if isinstance(parts, list) and (
        role != "tool" or all(isinstance(part, dict) and "type" in part for part in parts)
    ):
        return _parts(parts, where)
    if role == "tool":
        # What a tool gave back, as most templates want it: text.
        return json.dumps(content, ensure_ascii=False), ""
    raise DataError(
        f"{where}: a turn's content is {content!r:.60}; expected text, or a list of parts such as "
        '{"type": "text", "text": "..."}'
    )


def _parts(parts: Sequence[Any], where: str) -> tuple[str | None, str]:
    texts: list[str] = []
    reasoning: list[str] = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if not isinstance(part, dict) or kind not in (*_TEXT_PARTS, *_REASONING_PARTS):
            raise DataError(
                f"{where}: a turn's content has a part of type {kind}; only text can be trained on: remove "
                "the part, or the row"
            )
        names = ("text", "value", "content", *(_REASONING_PARTS if kind in _REASONING_PARTS else ()))
        text = next((part[name] for name in names if part.get(name) is not None), None)
        if not isinstance(text, str):
            raise DataError(f"{where}: found the part {part!r:.60}; expected text under text")
        (reasoning if kind in _REASONING_PARTS else texts).append(text)
    return "".join(texts) if texts else None, "".join(reasoning)


def _add_reasoning(turn: Turn, parts: str, where: str) -> None:
    if parts:
        if any(turn.get(name) for name in REASONING):
            raise DataError(f"{where}: a turn has reasoning twice, as a part and beside; leave one of them")
        turn["reasoning_content"] = parts
    found = [turn[name] for name in REASONING if name in turn]
    wrong = [value for value in found if not isinstance(value, str)]
    if wrong:
        raise DataError(f"{where}: a turn's reasoning is {wrong[0]!r:.60}; expected text")
    if len(set(filter(None, found))) > 1:
        names = " and ".join(name for name in REASONING if name in turn)
        raise DataError(f"{where}: a turn has different reasoning under {names}; leave one of them")


# ---- Tools ----


def _call(given: Any, where: str) -> dict[str, Any]:
    """A call in the form that transformers documents, with its arguments as an object."""
    call = _parsed(given, where) if isinstance(given, str) else given
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(
            f"{where}: found the tool call {given!r:.60}; expected a function with a name and arguments"
        )
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        arguments = _parsed(arguments, where) if arguments.strip() else {}
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise DataError(
            f"{where}: the arguments of {function['name']} are {arguments!r:.60}; expected an object, or "
            "JSON text of one"
        )
    others = {key: value for key, value in call.items() if value is not None} if call is not function else {}
    return {**others, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _tools(value: Any, where: str) -> list[dict[str, Any]] | None:
    if value is None or value == "":
        return None
    found = []
    for given in _list_of(value, "tools", where):
        tool = _parsed(given, where) if isinstance(given, str) else given
        if isinstance(tool, dict) and "function" not in tool:
            # The bare description of a function.
            tool = {"function": {key: cell for key, cell in tool.items() if key != "type"}}
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(
                f"{where}: found the tool {given!r:.60}; expected a JSON schema of a function with a name"
            )
        if isinstance(function.get("parameters"), str):
            function = {**function, "parameters": _parsed(function["parameters"], where)}
        found.append({**tool, "type": "function", "function": function})
    return found or None


def _list_of(value: Any, name: str, where: str) -> list[Any]:
    if isinstance(value, str):
        value = _parsed(value, where)
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise DataError(f"{where}: {name} is {value!r:.60}; expected a list of objects, or JSON text of one")
    return value


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"{where}: {text!r:.60} is no JSON ({error}); expected JSON text") from error
