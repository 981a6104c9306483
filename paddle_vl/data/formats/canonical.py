"""The canonical form of a row: what every format becomes, and what a chat template takes.

    {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"},
                                               {"type": "text", "text": "Tide?"}]},
                  {"role": "assistant", "content": [], "loss": True, "tool_calls": [...]},
                  {"role": "tool", "content": [{"type": "text", "text": "1.2"}]}], "tools": [...]}

Text is literal, neighbouring texts are one, and consecutive messages of the assistant are one turn.
Every message of the assistant has `loss`, and no other has.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from paddle_vl.data.jsonl import BadSampleError, check_unicode
from paddle_vl.data.media_file import brief

ROLES = ("system", "user", "assistant", "tool")
MEDIA = ("image", "video")
# A text, an image or a video; without its source a medium is a place that is still open.
Part = dict[str, Any]


class _AnyMessage(TypedDict):
    role: str
    content: list[Part]


class Message(_AnyMessage, total=False):
    """One message; `loss`, `tool_calls` and `reasoning_content` are the assistant's alone."""

    reasoning_content: str
    tool_calls: list[dict[str, Any]]
    loss: bool


@dataclass(frozen=True)
class CanonicalRow:
    """A row in the canonical form.

    Attributes:
        messages: only the first may have the role `system`.
        format: name of the format that the row had.
        tools: definitions in OpenAI's wrapped form.
        chat_template_kwargs: variables of the chat template for this row.
        extras: keys of the row that are not read, such as `id`.
        train_on_prompt: whether all text is learned, not the answers alone.
    """

    messages: list[Message]
    format: str
    tools: list[dict[str, Any]] = field(default_factory=list)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)
    train_on_prompt: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The canonical form as a plain dict, without extras."""
        optional = {"tools": self.tools, "chat_template_kwargs": self.chat_template_kwargs}
        return {"messages": self.messages, **{key: each for key, each in optional.items() if each}}


@dataclass
class Draft:
    """A message on its way to the canonical form.

    Attributes:
        where: its place in the row, for messages.
        targets: what its keys and the row say about whether it is a training target, by key.
        call_ids: ids of its calls; of a tool's message the id of the call that it answers.
        name: of a tool's message, the tool.
    """

    role: str
    parts: list[Part]
    where: str
    targets: dict[str, bool] = field(default_factory=dict)
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    call_ids: list[str | None] = field(default_factory=list)
    name: str | None = None

    @property
    def is_target(self) -> bool:
        """Whether it is a training target."""
        return self.role == "assistant" and all(self.targets.values())

    @property
    def text(self) -> str:
        """The text without images and videos."""
        return "".join(part["text"] for part in self.parts if part["type"] == "text")


def joined_turns(drafts: Iterable[Draft]) -> list[Draft]:
    """The drafts with consecutive ones of the assistant as one turn: texts joined, calls appended.

    Raises:
        BadSampleError: their targets differ, or reasoning would move in front of an answer.
    """
    turns: list[Draft] = []
    for draft in drafts:
        if not turns or not draft.role == turns[-1].role == "assistant":
            turns.append(draft)
            continue
        last = turns[-1]
        both = f"{draft.where} and the one before it are one turn of the assistant"
        if last.is_target != draft.is_target:
            raise BadSampleError(
                "bad_target",
                f"{both}, and only one is a training target: give both the same 'loss'",
            )
        if draft.reasoning and (last.reasoning or last.parts or last.calls):
            raise BadSampleError(
                "bad_order",
                f"{both}, with reasoning behind an answer: write it into the content as "
                "<think>...</think>, or put a user's or tool's message between them",
            )
        last.parts += draft.parts
        last.calls += draft.calls
        last.call_ids += draft.call_ids
        last.reasoning = last.reasoning or draft.reasoning
    return turns


def joined_parts(parts: Iterable[Part]) -> list[Part]:
    """The parts with neighbouring texts as one, and without empty texts."""
    joined: list[Part] = []
    for part in parts:
        if part["type"] != "text":
            joined.append(part)
        elif joined and joined[-1]["type"] == "text":
            joined[-1]["text"] += part["text"]
        elif part["text"]:
            joined.append(dict(part))
    return joined


def as_message(turn: Draft) -> Message:
    """The message of a turn."""
    message = Message(role=turn.role, content=joined_parts(turn.parts))
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        message["tool_calls"] = turn.calls
    if turn.role == "assistant":
        message["loss"] = turn.is_target
    return message


def check_turns(row: CanonicalRow, places: Sequence[str]) -> None:
    """Check the order of the messages, their calls and texts.

    Args:
        places: of the messages, for the error.

    Raises:
        BadSampleError: messages are in an impossible order, a call names no tool of the row, or a
            text is no Unicode.
    """
    names = {tool["function"]["name"] for tool in row.tools}
    open_calls = 0
    for number, (message, where) in enumerate(zip(row.messages, places, strict=True)):
        role, calls = message["role"], message.get("tool_calls", [])
        if role == "system" and number:
            reason = f"{where} has role 'system'; only the first message may have it"
            raise BadSampleError("unknown_role", f"{reason}: move its text there")
        if role == "tool" and not open_calls:
            raise BadSampleError(
                "bad_order",
                f"{where} is a tool's answer without a call before it: put it behind the "
                "assistant's message with the call, or remove it",
            )
        open_calls = open_calls - 1 if role == "tool" else len(calls)
        for name in (call["function"]["name"] for call in calls):
            if names and name not in names:
                raise BadSampleError(
                    "bad_tool_call",
                    f"{where} calls {brief(name)!r}, which is not among the tools {sorted(names)}: "
                    "add its definition to 'tools', or correct the name",
                )
    for text in texts_of(row.to_dict()):
        check_unicode(text)


def check_targets(row: CanonicalRow) -> None:
    """Check that there is a training target.

    Raises:
        BadSampleError: no message of the assistant, no target among them, or an empty target.
    """
    answers = [(i, each) for i, each in enumerate(row.messages, 1) if each["role"] == "assistant"]
    if not answers:
        raise BadSampleError(
            "no_assistant",
            "the conversation has no assistant turn, so no training target: add an answer",
        )
    targets = [(i, message) for i, message in answers if message.get("loss")]
    if not targets:
        raise BadSampleError(
            "no_target",
            f"none of the {len(answers)} assistant turn(s) is a training target (by 'loss', "
            "'weight' or 'label'): leave the sample out, or set one to true",
        )
    for i, message in targets:
        if not (message["content"] or message.get("tool_calls") or "reasoning_content" in message):
            raise BadSampleError(
                "empty_answer",
                f"the answer in turn {i} is empty, so that only the end token would be learned: "
                "write an answer, set its 'loss' to false, or leave the turn out",
            )


def texts_of(row: Mapping[str, Any]) -> Iterator[str]:
    """Every text of a canonical row that a chat template can write: of messages, reasoning, calls,
    tools and template variables."""
    for message in row["messages"]:
        yield from (part["text"] for part in message["content"] if part["type"] == "text")
        yield message.get("reasoning_content", "")
        if calls := message.get("tool_calls"):
            yield json_text(calls, "a call", ensure_ascii=False)
    for key in ("tools", "chat_template_kwargs"):
        if values := row.get(key):
            yield json_text(values, repr(key), ensure_ascii=False)


def json_text(value: Any, what: str, ensure_ascii: bool = True) -> str:
    """The JSON text of a value of a row.

    Raises:
        BadSampleError: it has parts that are none of JSON, such as a table's bytes.
    """
    try:
        return json.dumps(value, ensure_ascii=ensure_ascii)
    except TypeError as error:
        reason = f"{what} is no JSON value ({error}): write texts, numbers, lists and objects"
        raise BadSampleError("missing_key", reason) from error
