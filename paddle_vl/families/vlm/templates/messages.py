"""Rows as chat templates take them, and the texts of a row that a template may lose.

Templates differ in whether `content` is a string or a list of parts, and many leave out what they
do not know, without an error: tools, reasoning, roles, whole contents. So a rendered text is
searched for every text of its row.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Message = Mapping[str, Any]
# In the order in which HF reads them.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_THINK_END = "</think>"


@dataclass(frozen=True)
class Chat:
    """What a template renders of a row in the canonical form.

    Contents are lists of parts, tools in OpenAI's form, variables the `chat_template_kwargs`.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None
    variables: Mapping[str, Any]

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "Chat":
        """The chat of a row; keys without a meaning for templates are left out."""
        return cls(row["messages"], row.get("tools"), row.get("chat_template_kwargs") or {})

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing but texts, images and videos of users and the assistant."""
        own = {"tool_calls", "reasoning_content"}
        return not (self.tools or self.variables) and not any(
            own & each.keys() or each["role"] == "tool" for each in self.messages
        )

    def without_earlier_reasoning(self) -> "Chat":
        """The chat without the reasoning of answers before the last question."""
        users = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        last = users[-1] if users else 0
        earlier = map(_without_reasoning, self.messages[:last])
        return replace(self, messages=[*earlier, *self.messages[last:]])

    def media(self) -> list[str]:
        """`image` or `video` for each of them, in reading order."""
        parts = (part for message in self.messages for part in message.get("content") or ())
        return [part["type"] for part in parts if part["type"] != "text"]

    def texts(self) -> list[str]:
        """What must be in the rendered text, without white space at the ends, by message.

        Of tools the names, of their calls the names and the strings in their arguments.
        """
        texts = [text for message in self.messages for text in _texts(message)]
        texts += [tool.get("function", tool)["name"] for tool in self.tools or ()]
        return [text for text in map(str.strip, texts) if text]

    def all_text(self) -> str:
        """All texts and names that the row brings, one below the other."""
        return "\n".join(_strings([self.messages, self.tools, self.variables]))


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


def lost_texts(chat: Chat, text: str) -> list[str]:
    """Texts of the row that the rendered text lacks, or has less often than the row.

    A text may be there as it is, or as in a JSON string.
    """
    texts = chat.texts()
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
    return bool(reasoning(message)) or any(_THINK_END in text for text in _texts(message))


def _texts(message: Message) -> Iterator[str]:
    """Texts of one message: content, reasoning, calls."""
    yield from (part["text"] for part in message.get("content") or () if part["type"] == "text")
    yield reasoning(message) or ""
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        yield function["name"]
        yield from _strings(function["arguments"], keys=False)


def _without_reasoning(message: Message) -> Message:
    if message["role"] != "assistant":
        return message
    kept = {key: value for key, value in message.items() if key not in _REASONING}
    first, *more = kept.get("content") or [{}]
    thought, end, answer = first.get("text", "").partition(_THINK_END)
    if end and thought.lstrip().startswith("<think>"):
        kept["content"] = [{"type": "text", "text": answer.lstrip("\n")}, *more]
    return kept


def _strings(value: Any, keys: bool = True) -> Iterator[str]:
    """All strings in a JSON value, with the keys of objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from value if keys else ()
        for each in value.values():
            yield from _strings(each, keys)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _strings(each, keys)
