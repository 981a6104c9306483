"""Rows as chat templates take them, and the texts of a row that a template may lose.

Templates differ in whether `content` is a string or a list of parts, and many leave out what they
do not know, without an error: tools, reasoning, roles, whole contents. So a rendered text is
searched for every text of its row.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paddle_vl.data.jsonl import BadSampleError

Message = dict[str, Any]
MEDIA = ("image", "video")
# In the order in which HF reads them.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_THINK_END = "</think>"
_NOT_RENDERED = ("loss",)


@dataclass(frozen=True)
class Chat:
    """What a template renders.

    Attributes:
        messages: messages with `role` and `content`, as in a data file.
        tools: definitions of tools in OpenAI's form, or None.
        variables: template variables of this row (`chat_template_kwargs`).
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None
    variables: Mapping[str, Any]

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "Chat":
        """The chat of a row in the canonical form."""
        messages = [
            {key: value for key, value in message.items() if value is not None}
            for message in row["messages"]
        ]
        return cls(messages, row.get("tools") or None, row.get("chat_template_kwargs") or {})

    def with_content(self, *, lists: bool) -> "Chat":
        """The same messages as a template takes them, plain JSON values only.

        A message without media has a string, unless `lists`; one with media has a list. The source
        of an image or video becomes a word.
        """
        return replace(self, messages=[_for_template(each, lists) for each in self.messages])

    def without_earlier_reasoning(self) -> "Chat":
        """The chat without the reasoning of answers before the last question."""
        last = self.last_question
        messages = [
            _without_reasoning(message) if i < last else message
            for i, message in enumerate(self.messages)
        ]
        return replace(self, messages=messages)

    @property
    def last_question(self) -> int:
        """Index of the last user message; 0 if there is none."""
        users = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        return users[-1] if users else 0

    def media(self) -> dict[str, int]:
        """Number of images and videos."""
        kinds = [part["type"] for message in self.messages for part in _parts(message)]
        return {kind: kinds.count(kind) for kind in MEDIA}

    def texts(self) -> list[str]:
        """What must be in the rendered text, without white space at the ends, by message.

        Of tools the names, of their calls the names and the strings in their arguments.
        """
        texts = [text for message in self.messages for text in message_texts(message)]
        texts += [tool.get("function", tool)["name"] for tool in self.tools or ()]
        return [text for text in map(str.strip, texts) if text]

    def all_text(self) -> str:
        """All that the row brings into the text, names and descriptions included."""
        values = [self.messages, self.tools, self.variables]
        return "\n".join(_strings(values))


def lost_texts(chat: Chat, text: str) -> list[str]:
    """Texts of the row that the rendered text lacks, or has less often than the row.

    A text may be there as it is, or as a JSON string.
    """
    texts = chat.texts()
    lost = []
    for wanted in texts:
        found = text.count(wanted)
        if (escaped := json.dumps(wanted, ensure_ascii=False)[1:-1]) != wanted:
            found += text.count(escaped)
        if not found or found < sum(each.count(wanted) for each in texts):
            lost.append(wanted)
    return lost


def check_variables(variables: Mapping[str, Any], where: str) -> None:
    """Refuse template variables that would replace the conversation.

    Raises:
        BadSampleError: a reserved name.
    """
    reserved = {"messages", "tools", "documents", "add_generation_prompt"} & variables.keys()
    if reserved:
        raise BadSampleError(
            "unknown_key",
            f"{where} sets {', '.join(sorted(reserved))}, which the row itself gives to the chat "
            "template; leave it out",
        )


def message_texts(message: Message) -> Iterator[str]:
    """Texts of one message: content, reasoning, calls."""
    content = message.get("content")
    if isinstance(content, str):
        yield content
    else:
        yield from (part["text"] for part in _parts(message) if part["type"] == "text")
    yield reasoning(message) or ""
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        yield function["name"]
        if isinstance(function["arguments"], Mapping):
            yield from _strings(list(function["arguments"].values()), keys=False)


def reasoning(message: Message) -> str | None:
    """The reasoning under one of its keys; None if there is none."""
    return next((message[key] for key in _REASONING if message.get(key) is not None), None)


def has_reasoning(message: Message) -> bool:
    """Whether a message brings reasoning, under a key or in its text."""
    return bool(reasoning(message)) or any(_THINK_END in text for text in message_texts(message))


def _for_template(message: Message, lists: bool) -> Message:
    message = {key: value for key, value in message.items() if key not in _NOT_RENDERED}
    if (thought := reasoning(message)) is not None:
        message = {"thinking": thought, **message, "reasoning_content": thought}
    parts, content = _parts(message), message.get("content")
    if lists and isinstance(content, str):
        message["content"] = [{"type": "text", "text": content}]
    elif any(part["type"] in MEDIA for part in parts):
        message["content"] = [
            {"type": part["type"], part["type"]: part["type"]} if part["type"] in MEDIA else part
            for part in parts
        ]
    elif content is not None and not lists:
        message["content"] = content if isinstance(content, str) else _joined(parts)
    return message


def _without_reasoning(message: Message) -> Message:
    if message["role"] != "assistant":
        return message
    kept = {key: value for key, value in message.items() if key not in _REASONING}
    text = kept.get("content")
    text = text if isinstance(text, str) else _joined(_parts(message))
    if text.lstrip().startswith("<think>") and _THINK_END in text:
        answer = text.split(_THINK_END, 1)[1].lstrip("\n")
        kept["content"] = [{"type": "text", "text": answer}] if answer else []
    return kept


def _parts(message: Message) -> Sequence[Mapping[str, Any]]:
    content = message.get("content")
    return () if content is None or isinstance(content, str) else content


def _joined(parts: Sequence[Mapping[str, Any]]) -> str:
    return "".join(part["text"] for part in parts)


def _strings(value: Any, keys: bool = True) -> Iterator[str]:
    """All strings in a JSON value, with the keys of objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            if keys:
                yield key
            yield from _strings(each, keys)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _strings(each, keys)
