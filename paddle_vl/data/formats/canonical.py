"""The canonical form of a row: what every format becomes, and what a chat template takes.

    {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"},
                                               {"type": "text", "text": "Tide?"}]},
                  {"role": "assistant", "content": [], "loss": True, "tool_calls": [...]},
                  {"role": "tool", "content": [{"type": "text", "text": "1.2"}]}], "tools": [...]}

Text is literal, neighbouring texts are one but for those of the system, and consecutive messages of
the assistant are one turn.

Every message of the assistant has `loss`, and no other has. `loss` and `loss_scale` (ms-swift),
`weight` (OpenAI) and `label` (PaddleFormers; of a message, or of the row with one value per turn)
make a turn a training target, each true or false, 1 or 0.

A tag `<image>` or `<video>`, or a content part without a source, is a place, which takes the next
entry of `images` or `videos`. A source stays what the row gave: a path or an address, a list of
frames, bytes, or an object in memory; a data URI becomes its bytes.
"""

import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any, TypedDict

from paddle_vl.data.formats.keys import (
    SOURCE_KEYS,
    TARGET_KEYS,
    RowSettings,
    check_keys,
    from_text,
    is_empty,
    wrong,
)
from paddle_vl.data.jsonl import BadSampleError, check_unicode
from paddle_vl.data.media_file import brief
from paddle_vl.data.remote import data_uri_bytes
from paddle_vl.data.worker_pool import warn_once

ROLES = ("system", "user", "assistant", "tool")
MEDIA = ("image", "video")
# A text, an image or a video; without its source a medium is a place that is still open.
Part = dict[str, Any]
_LOGGER = logging.getLogger(__name__)
# Of a data URI; a line has far less by default.
_MOST_BYTES = 1 << 26
_TAG = re.compile(r"<(image|video)>")
_REFUSED_TAGS = {
    "<audio>": "which stands for a sound in other formats: audio is not supported",
    **dict.fromkeys(
        ("<bbox>", "<ref-object>"),
        "which ms-swift replaces by an entry of 'objects' and which would be learned literally "
        "here: write the coordinates or the name as text, or give the record 'objects'",
    ),
}
# Keys of a source that is an object.
_SOURCE_KEYS = ("bytes", "path", "url", "detail", "type")
_DETAIL_NOTE = "images have a 'detail', as for OpenAI's models: it has no effect here"


class _AnyMessage(TypedDict):
    role: str
    content: list[Part]


class Message(_AnyMessage, total=False):
    """One message; `loss`, `tool_calls` and `reasoning_content` are the assistant's alone."""

    reasoning_content: str
    tool_calls: list[dict[str, Any]]
    loss: bool


@dataclass(frozen=True)
class Conversation:
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
    format: str = "messages"
    tools: list[dict[str, Any]] = field(default_factory=list)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)
    train_on_prompt: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The canonical form as a plain dict, without extras."""
        optional = {"tools": self.tools, "chat_template_kwargs": self.chat_template_kwargs}
        return {"messages": self.messages, **{key: each for key, each in optional.items() if each}}

    @property
    def branches(self) -> "list[Conversation]":
        """The conversations of the row: itself, or those that are compared."""
        return [self]

    @property
    def columns(self) -> Mapping[str, Any]:
        """Values of the row that a metric may need."""
        return self.extras

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing but texts, images and videos of users and the assistant."""
        own = {"tool_calls", "reasoning_content"}
        return not (self.tools or self.chat_template_kwargs) and not any(
            own & each.keys() or each["role"] == "tool" for each in self.messages
        )

    @property
    def all_text(self) -> str:
        """All texts and names that the row brings, one below the other."""
        return "\n".join(strings_in([self.messages, self.tools, self.chat_template_kwargs]))

    @property
    def plain_text(self) -> str:
        """The texts of the contents, one below the other."""
        return "\n".join(map(self.text, range(len(self.messages))))

    def text(self, number: int) -> str:
        """The text of a turn without images and videos."""
        return _text_of(self.messages[number]["content"])

    @property
    def media(self) -> list[str]:
        """`image` or `video` for each of them, in reading order."""
        return [part["type"] for part in self._parts() if part["type"] != "text"]

    @property
    def images(self) -> list[Any]:
        """Sources of all images in reading order."""
        return [part["image"] for part in self._parts() if part["type"] == "image"]

    @property
    def videos(self) -> list[Any]:
        """Sources of all videos in reading order."""
        return [part["video"] for part in self._parts() if part["type"] == "video"]

    def _parts(self) -> Iterator[Part]:
        return (part for message in self.messages for part in message["content"])

    @property
    def targets(self) -> list[int]:
        """Numbers of the turns that are training targets."""
        return [i for i, message in enumerate(self.messages) if message.get("loss")]

    @property
    def losses(self) -> list[bool]:
        """Of each answer whether it is a training target."""
        return [bool(each.get("loss")) for each in self.messages if each["role"] == "assistant"]

    def with_messages(self, messages: Sequence[Any]) -> "Conversation":
        """The conversation with other messages, in the canonical form."""
        return Conversation(
            [*messages], self.format, self.tools, self.chat_template_kwargs, self.extras,
            self.train_on_prompt,
        )  # fmt: skip

    def with_sources(self, opened: Callable[[str, Any], Any]) -> "Conversation":
        """The conversation with what a function makes of the kind and source of each image and
        video."""

        def part_of(part: Part) -> Part:
            kind = part["type"]
            return part if kind == "text" else {**part, kind: opened(kind, part[kind])}

        return self.with_messages(
            [{**each, "content": [*map(part_of, each["content"])]} for each in self.messages]
        )

    def check_targets(self) -> None:
        """Check that there is a training target.

        Raises:
            BadSampleError: no message of the assistant, no target among them, or an empty target.
        """
        answers = len(self.losses)
        if not answers:
            raise BadSampleError(
                "no_assistant",
                "the conversation has no assistant turn, so no training target: add an answer",
            )
        if not self.targets:
            raise BadSampleError(
                "no_target",
                f"none of the {answers} assistant turn(s) is a training target (by 'loss', "
                "'weight' or 'label'): leave the sample out, or set one to true",
            )
        for i in self.targets:
            if not self.messages[i].keys() & {"tool_calls", "reasoning_content"} and (
                not self.messages[i]["content"]
            ):
                raise BadSampleError(
                    "empty_answer",
                    f"the answer in turn {i + 1} is empty, so that only the end token would be "
                    "learned: write an answer, set its 'loss' to false, or leave the turn out",
                )


def strings_in(value: Any, keys: bool = True) -> Iterator[str]:
    """All strings in a JSON value, with the keys of objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from value if keys else ()
        for each in value.values():
            yield from strings_in(each, keys)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from strings_in(each, keys)


def _text_of(parts: Iterable[Part]) -> str:
    return "".join(part["text"] for part in parts if part["type"] == "text")


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
        return _text_of(self.parts)


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
    # Templates may write the texts of the system apart.
    parts = [[part] for part in turn.parts] if turn.role == "system" else [turn.parts]
    message = Message(role=turn.role, content=[*chain.from_iterable(map(joined_parts, parts))])
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        message["tool_calls"] = turn.calls
    if turn.role == "assistant":
        message["loss"] = turn.is_target
    return message


def check_turns(row: Conversation, places: Sequence[str]) -> None:
    """Check the order of the messages and their texts.

    Args:
        places: of the messages, for the error.

    Raises:
        BadSampleError: a message of the system that is not the first, or a text is no Unicode.
    """
    for message, where in zip(row.messages[1:], places[1:], strict=True):
        if message["role"] == "system":
            reason = f"{where} has role 'system'; only the first message may have it"
            raise BadSampleError("unknown_role", f"{reason}: move its text there")
    for text in texts_of(row.to_dict()):
        check_unicode(text)


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


def read_targets(message: Mapping[str, Any], role: str, where: str) -> dict[str, bool]:
    """What a message's own keys say about whether it is a training target."""
    keys = [key for key in TARGET_KEYS if key in message]
    given = {repr(key): _truth(message[key], f"{where} has {key!r}") for key in keys}
    if role != "assistant" and any(given.values()):
        raise BadSampleError(
            "bad_target",
            f"{where} has role {message['role']!r} and {', '.join(given)} true: only an "
            "assistant's message can be a training target; remove it",
        )
    return given


def set_targets(drafts: Sequence[Draft], label: Any, settings: RowSettings) -> None:
    """Add what the row's `label` and the run say about targets.

    Raises:
        BadSampleError: `label` is no list of 0 and 1, one for each turn of the assistant, or it or
            the keys of a message contradict each other.
    """
    is_turn = [(is_answer, list(each)) for is_answer, each in groupby(drafts, _is_answer)]
    turns = [each for is_answer, each in is_turn if is_answer]
    if not is_empty(label):
        for targets, value in zip(_labelled(turns, label), label, strict=True):
            for draft in targets:
                truth = _truth(value, "the record has 'label' with")
                draft.targets = {"the record's 'label'": truth, **draft.targets}
    for draft in drafts:
        if len(set(draft.targets.values())) > 1:
            said = ", ".join(f"{name} {value}" for name, value in draft.targets.items())
            raise BadSampleError(
                "bad_target", f"{draft.where} has contradicting keys: {said}; keep one of them"
            )
    for turn in turns[:-1] if settings.mask_history else ():
        for draft in turn:
            draft.targets["mask_history"] = False


def _is_answer(draft: Draft) -> bool:
    return draft.role == "assistant"


def _labelled(turns: Sequence[list[Draft]], label: Any) -> list[list[Draft]]:
    """The drafts for each value of `label`: of a turn, or of a single message of one."""
    if not isinstance(label, list | tuple):
        needed = (
            "of a record it must be a list of 0 and 1, one for each assistant message: rename the "
            "key if it means something else"
        )
        raise wrong("'label'", label, needed, "bad_target")
    written = [[draft for draft in turn if draft.text or draft.calls] for turn in turns]
    by_turn = [turn for turn, own in zip(turns, written, strict=True) if own]
    by_message = [[draft] for own in written for draft in own]
    for found in (by_turn, by_message):
        if len(found) == len(label):
            return found
    raise BadSampleError(
        "bad_target",
        f"'label' has {len(label)} values for {len(by_message)} assistant messages; give one for "
        "each that is not empty",
    )


def _truth(value: Any, what: str) -> bool:
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    raise BadSampleError(
        "bad_target",
        f"{what} {brief(value)!r}; true or false (1 or 0) is needed: other weights are not "
        "supported",
    )


def split_tags(text: str, where: str, has_objects: bool = False) -> list[Part]:
    """The texts of a string with tags, and a place for each tag.

    Args:
        has_objects: whether the row has entries for the tags of boxes and names.

    Raises:
        BadSampleError: a tag that nothing would replace.
    """
    for tag, why in _REFUSED_TAGS.items():
        if tag in text and (tag == "<audio>" or not has_objects):
            raise BadSampleError("unsupported", f"{where} has the tag {tag}, {why}")
    pieces = enumerate(_TAG.split(text))
    return [{"type": piece} if i % 2 else {"type": "text", "text": piece} for i, piece in pieces]


def media_part(part: Mapping[str, Any], kind: str, where: str) -> Part:
    """An image or a video of a content part; a place if it has no source.

    Raises:
        BadSampleError: an unusable source, or two.
    """
    found = [_read(part[key], kind) for key in SOURCE_KEYS[kind] if part.get(key) is not None]
    if any(other is not found[0] and not _same(other, found[0]) for other in found[1:]):
        raise BadSampleError(
            "ambiguous", f"{where} has a part of type {kind} with several sources: keep one of them"
        )
    return {"type": kind, kind: found[0]} if found else {"type": kind}


def fill_places(drafts: Sequence[Draft], row: Mapping[str, Any], needs_tags: bool) -> None:
    """Give every place its source from the lists of the row.

    If there are sources and no places at all, all come before the first text of a user, videos
    before images, as ms-swift and TRL put them.

    Args:
        needs_tags: the format has no such default.

    Raises:
        BadSampleError: an unusable source, or another number of sources than of places.
    """
    listed = {kind: _listed(row, kind) for kind in MEDIA}
    users = [draft for draft in drafts if draft.role == "user"]
    if users and not needs_tags and not any(_media_of(drafts)):
        users[0].parts[:0] = [{"type": kind} for kind in reversed(MEDIA) for _ in listed[kind]]
    for kind, sources in listed.items():
        places = [part for part in _media_of(drafts) if part["type"] == kind and kind not in part]
        if len(places) != len(sources):
            raise BadSampleError(
                "tag_count",
                f"{len(places)} {kind} place(s) (<{kind}> tags, or {kind} parts without a source) "
                f"but {len(sources)} entries in '{kind}s'; they are matched in order and must be "
                "equal in number",
            )
        for place, source in zip(places, sources, strict=True):
            place[kind] = source


def _media_of(drafts: Sequence[Draft]) -> Iterator[Part]:
    return (part for draft in drafts for part in draft.parts if part["type"] in MEDIA)


def _listed(row: Mapping[str, Any], kind: str) -> list[Any]:
    """The sources of `images` or `image`, of `videos` or `video`."""
    names = [name for name in (f"{kind}s", kind) if not is_empty(row.get(name))]
    if len(names) == 2 and not _same(*(row[name] for name in names)):
        raise BadSampleError(
            "ambiguous", f"the record has '{kind}s' and {kind!r}: keep one of them"
        )
    given = row[names[0]] if names else []
    # A table's cell is text.
    given = from_text(given) if isinstance(given, str) and given.startswith(("[", "{")) else given
    if isinstance(given, str | bytes | Mapping | os.PathLike):
        given = [given]
    if not isinstance(given, list | tuple):
        raise wrong(f"'{kind}s'", given, f"a list of {kind}s is needed")
    return [_read(each, kind) for each in given]


def _read(value: Any, kind: str) -> Any:
    """A source in one of the forms that the module's docstring names."""
    where = f"{kind} source"
    if isinstance(value, Mapping):
        value = _unwrapped(value)
    if kind == "video" and isinstance(value, list | tuple) and value:
        return [_read(frame, "image") for frame in value]
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    is_nothing = is_empty(value) or (isinstance(value, bytes) and not value)
    if is_nothing or isinstance(value, int | float | list | tuple | Mapping):
        others = " or an image's bytes are" if kind == "image" else " or a list of frames is"
        raise BadSampleError(
            "missing_key", f"{where} {brief(value)!r} is not a path; a file name{others} needed"
        )
    if not isinstance(value, str):
        return value
    if not value.startswith("data:"):
        return value.removeprefix("file://")
    return data_uri_bytes(value, _MOST_BYTES)


def _unwrapped(value: Mapping[str, Any]) -> Any:
    """The source in an object: of HF (`bytes`, `path`), OpenAI (`url`) or Anthropic (`data`)."""
    if value.get("type") == "base64":
        return f"data:{value.get('media_type')};base64,{value.get('data')}"
    check_keys(value, "a source", _SOURCE_KEYS)
    if value.get("detail") is not None:
        warn_once(_LOGGER, "detail", _DETAIL_NOTE)
    return value.get("bytes") or value.get("path") or value.get("url")


def _same(first: Any, second: Any) -> bool:
    """Whether two sources are the same text, bytes or list; objects in memory never are."""
    plain = (str, bytes, list, tuple, Mapping)
    if not (isinstance(first, plain) and isinstance(second, plain)):
        return False
    return first == second or first == [second] or [first] == second
