"""Builders of rows, and what the tests of formats compare."""

from itertools import pairwise
from typing import Any

from paddle_vl.data.formats.canonical import ROLES
from paddle_vl.data.formats.keys import RowSettings
from paddle_vl.data.formats.reader import to_canonical

CALL = {"type": "function", "function": {"name": "tide", "arguments": {"harbour": "Kiel"}}}


def chat(question: Any = "What?", answer: Any = "A cat.", **entries: Any) -> dict[str, Any]:
    """A row of one question and its answer."""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, **entries}


def said(*turns: tuple[str, Any], **entries: Any) -> dict[str, Any]:
    """A row of messages of these roles and contents."""
    return {"messages": [{"role": role, "content": text} for role, text in turns], **entries}


def shared(*turns: tuple[str, Any], **entries: Any) -> dict[str, Any]:
    """A row of conversations with these roles and values."""
    return {"conversations": [{"from": role, "value": text} for role, text in turns], **entries}


def flat(row: Any, format: str | None = None, **settings: Any) -> list[tuple[Any, ...]]:
    """Role and content of each message of the canonical form, texts and sources as they are."""
    messages = to_canonical(row, RowSettings(**settings), format=format).messages
    return [(m["role"], *(part[part["type"]] for part in m["content"])) for m in messages]


def losses(row: Any, **settings: Any) -> list[bool]:
    """`loss` of each message of the assistant."""
    messages = to_canonical(row, RowSettings(**settings)).messages
    return [message["loss"] for message in messages if "loss" in message]


def assert_canonical(form: dict) -> None:
    """The form that docs/data.md describes."""
    for message in form["messages"]:
        is_answer = message["role"] == "assistant"
        own = {"loss", "tool_calls", "reasoning_content"} if is_answer else set()
        assert message["role"] in ROLES
        assert {"role", "content"} <= message.keys() <= {"role", "content", *own}
        assert not is_answer or isinstance(message["loss"], bool)
        kinds = [part["type"] for part in message["content"]]
        assert {*kinds} <= ({"text"} if is_answer else {"text", "image", "video"})
        assert ("text", "text") not in pairwise(kinds)
        for part, kind in zip(message["content"], kinds, strict=True):
            assert part.keys() == {"type", kind}
            assert part[kind] not in (None, "")
        for call in message.get("tool_calls", []):
            assert isinstance(call["function"]["arguments"], dict)
