"""Builders of rows, and what the tests of formats compare."""

from typing import Any

from paddle_vl.data.formats.reader import to_canonical
from paddle_vl.data.formats.row_settings import RowSettings

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
