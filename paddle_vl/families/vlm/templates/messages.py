"""Rows as chat templates take them, and the texts of a row that a template may lose.

Templates differ in whether `content` is a string or a list of parts, and many leave out what they
do not know, without an error: tools, reasoning, roles, whole contents. So a rendered text is
searched for every text of its row.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paddle_vl.data.formats.canonical import Conversation, strings_in

Message = Mapping[str, Any]
# In the order in which HF reads them.
_REASONING = ("reasoning_content", "thinking", "reasoning")
THINK, THINK_END = "<think>", "</think>"


def without_earlier_reasoning(conversation: Conversation) -> Conversation:
    """The conversation without the reasoning of answers before the last question."""
    messages: Sequence[Any] = conversation.messages
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    last = users[-1] if users else 0
    return conversation.with_messages([*map(_without_reasoning, messages[:last]), *messages[last:]])


def for_template(message: Message, lists: bool | None = None) -> dict[str, Any]:
    """A message as HF hands it to a template: plain JSON values, without null.

    Args:
        lists: whether a content without media is a list or a string; None leaves contents as they
            are. The source of an image or video becomes a word.
    """
    kept = {key: value for key, value in message.items() if value is not None and key != "loss"}
    if (thought := reasoning(message)) is not None:
        kept = {"thinking": thought, **kept, "reasoning_content": thought}
    parts = kept.get("content")
    if lists is None or not isinstance(parts, list):
        return kept
    if any(part["type"] != "text" for part in parts):
        kinds = [(part, part["type"]) for part in parts]
        parts = [part if kind == "text" else {"type": kind, kind: kind} for part, kind in kinds]
    elif not lists:
        parts = "".join(part["text"] for part in parts)
    return {**kept, "content": parts}


def texts_of(conversation: Conversation) -> list[str]:
    """What must be in the rendered text, without white space at the ends, by message.

    Of tools the names, of their calls the names and the strings in their arguments.
    """
    texts = [text for message in conversation.messages for text in _texts(message)]
    texts += [tool["function"]["name"] for tool in conversation.tools]
    return [text for text in map(str.strip, texts) if text]


def lost_texts(conversation: Conversation, text: str) -> list[str]:
    """Texts of the conversation that the rendered text lacks, or has less often.

    A text may be there as it is, or as in a JSON string.
    """
    texts = texts_of(conversation)
    together = "\0".join(texts)
    return [each for each in texts if count_text(each, text) < together.count(each)]


def count_text(wanted: str, text: str) -> int:
    """How often a text occurs in another, as it is or as in a JSON string."""
    forms = {wanted, *(json.dumps(wanted, ensure_ascii=ascii)[1:-1] for ascii in (False, True))}
    return sum(map(text.count, forms))


def reasoning(message: Message) -> str | None:
    """The reasoning under one of its keys; None if there is none."""
    return next((message[key] for key in _REASONING if message.get(key) is not None), None)


def has_reasoning(message: Message) -> bool:
    """Whether a message brings reasoning, under a key or in its text."""
    return bool(reasoning(message)) or any(THINK_END in text for text in _texts(message))


def _texts(message: Message) -> Iterator[str]:
    """Texts of one message: content, reasoning, calls."""
    yield from (part["text"] for part in message.get("content") or () if part["type"] == "text")
    yield reasoning(message) or ""
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        yield function["name"]
        yield from strings_in(function["arguments"], keys=False)


def _without_reasoning(message: Message) -> Message:
    if message["role"] != "assistant":
        return message
    kept = {key: value for key, value in message.items() if key not in _REASONING}
    first, *more = kept.get("content") or [{}]
    thought, end, answer = first.get("text", "").partition(THINK_END)
    if end and thought.lstrip().startswith(THINK):
        kept["content"] = [{"type": "text", "text": answer.lstrip("\n")}, *more]
    return kept
