"""Conversations: turns of text, images and videos, parsed from chat messages.

Two dialects are read, the JSONL format of PaddleFormers and ms-swift and the message lists of HF:

    {"messages": [{"role": "user", "content": "<image>What is this?"},
                  {"role": "assistant", "content": "A cat."}], "images": ["cat.png"]}

    {"messages": [{"role": "user", "content": [{"type": "image", "image": "cat.png"},
                                               {"type": "text", "text": "What is this?"}]}, ...]}

In the first, `<image>` and `<video>` tags take the entries of `images` and `videos` in order. In
the second, text is literal (no tags), and an image or video without a source takes the next entry.
In tables and archives an image may also be bytes, or `{"bytes": ..., "path": ...}`.
`record_keys` defines which further keys are read and which are refused.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from paddle_vl.data.jsonl import BadSampleError, parse_object
from paddle_vl.data.media_file import ImageSource, MediaFolder, brief, media_source
from paddle_vl.data.video_reader import VideoFrames, VideoSource
from paddle_vl.families.vlm.inputs.record_keys import (
    OTHER_ROLES,
    RECORD_KEYS,
    SOURCE_KEYS,
    check_box_tags,
    check_message_keys,
    check_part_keys,
    check_record_keys,
    is_target,
    listed_targets,
)


class ImagePart(NamedTuple):
    """An image within a turn."""

    source: ImageSource
    kind = "image"


class VideoPart(NamedTuple):
    """A video within a turn."""

    source: VideoSource
    kind = "video"


Part = str | ImagePart | VideoPart


@dataclass(frozen=True)
class Turn:
    """One message: its role, and text, images and videos in reading order.

    Attributes:
        is_target: whether an assistant's turn is a training target.
    """

    role: str
    parts: tuple[Part, ...]
    is_target: bool = True

    @property
    def text(self) -> str:
        """The text without images and videos."""
        return "".join(part for part in self.parts if isinstance(part, str))


@dataclass(frozen=True)
class Conversation:
    """A validated conversation.

    Attributes:
        turns: only the first may be a system turn.
        extra: keys of the record that are neither messages nor media, such as `task`.
    """

    turns: tuple[Turn, ...]
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def images(self) -> list[ImageSource]:
        """Sources of all images in reading order."""
        return self._sources(ImagePart)

    @property
    def videos(self) -> list[VideoSource]:
        """Sources of all videos in reading order."""
        return self._sources(VideoPart)

    def _sources(self, kind: type[ImagePart] | type[VideoPart]) -> list[Any]:
        return [part.source for turn in self.turns for part in turn.parts if isinstance(part, kind)]

    @property
    def targets(self) -> list[int]:
        """Numbers of the turns that are training targets."""
        turns = enumerate(self.turns)
        return [i for i, turn in turns if turn.role == "assistant" and turn.is_target]

    def check_targets(self) -> None:
        """Check that there is a training target.

        Raises:
            BadSampleError: no assistant turn, no target among them, or an empty target.
        """
        answers = [i for i, turn in enumerate(self.turns) if turn.role == "assistant"]
        if not answers:
            raise BadSampleError(
                "no_assistant",
                "the conversation has no assistant turn, so no training target: add an answer",
            )
        if not self.targets:
            raise BadSampleError(
                "no_target",
                f"none of the {len(answers)} assistant turn(s) is a training target (by 'loss', "
                "'weight' or 'label'): leave the sample out, or set one to true",
            )
        for i in self.targets:
            if not self.turns[i].text:
                raise BadSampleError(
                    "empty_answer",
                    f"the answer in turn {i + 1} is empty, so that only the end token would be "
                    "learned: write an answer, set its 'loss' to false, or leave the turn out",
                )


ROLES = ("system", "user", "assistant")

_TAG = re.compile(r"<(image|video)>")
_PART_TYPES: dict[str, Any] = {"image": ImagePart, "video": VideoPart}
# Sources in memory instead of file names.
_IN_MEMORY = (Image.Image, np.ndarray, VideoFrames)


def parse_line(line: bytes, directory: Path, allow_outside: bool = True) -> Conversation:
    """Parse one line of a JSONL file.

    Args:
        directory: folder that relative paths start from; the data file's own.
        allow_outside: whether paths may lead out of it.

    Raises:
        BadSampleError: as `parse_record`, or broken JSON.
    """
    return parse_record(parse_object(line, "'messages'"), directory, allow_outside)


def parse_record(
    record: Mapping[str, Any], directory: Path | None = None, allow_outside: bool = True
) -> Conversation:
    """Parse a record of messages and media.

    Args:
        record: `messages`, and optionally `images`, `videos`, `system` and `label`; sources may
            also be PIL images, arrays, `VideoFrames` or the bytes of an image file.
        directory: folder that relative paths start from; None leaves paths as they are.
        allow_outside: whether paths may lead out of it.

    Raises:
        BadSampleError: a missing or mistyped key, an unknown role, a refused key, a number of tags
            that differs from the number of images or videos, or an unusable path.
    """
    if "messages" not in record:
        raise BadSampleError(
            "missing_key", f"the record has no 'messages'; its keys are {sorted(record)}"
        )
    messages = record["messages"]
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise BadSampleError("missing_key", "'messages' must be a list with at least one message")
    check_record_keys(record)
    roles = [message.get("role") if isinstance(message, Mapping) else None for message in messages]
    labels = listed_targets(record, roles)
    turns = [
        _parse_message(message, number, label)
        for number, (message, label) in enumerate(zip(messages, labels, strict=True), start=1)
    ]
    turns = _with_system(turns, record.get("system"))
    listed = {kind: _listed(record, kind, turns) for kind in _PART_TYPES}
    folder = MediaFolder(directory, allow_outside)
    filled = [
        replace(turn, parts=tuple(_fill(part, listed, folder) for part in turn.parts))
        for turn in turns
    ]
    extra = {key: value for key, value in record.items() if key not in RECORD_KEYS}
    return Conversation(tuple(filled), extra)


def _with_system(turns: list[Turn], text: Any) -> list[Turn]:
    """The turns, with the record's `system` text as first turn."""
    if text is None or text == "":
        return turns
    if not isinstance(text, str):
        raise BadSampleError(
            "missing_key", f"'system' is of type {type(text).__name__}; a string is needed"
        )
    check_box_tags(text, "'system'")
    system = Turn("system", tuple(_split_tags(text)), is_target=False)
    if turns[0].role != "system":
        return [system, *turns]
    if turns[0] != system:
        raise BadSampleError(
            "two_systems",
            "the record has 'system' and a system message with another text: keep one of them",
        )
    return turns


def _listed(record: Mapping[str, Any], kind: str, turns: Sequence[Turn]) -> Iterator[Any]:
    """The entries of `images` or `videos`, one for each place without a source."""
    sources = record.get(f"{kind}s")
    sources = [] if sources is None else sources
    if kind == "image" and isinstance(sources, Mapping | bytes):
        # A table's column of one image.
        sources = [sources]
    if isinstance(sources, str | bytes) or not isinstance(sources, Sequence):
        reason = f"'{kind}s' must be a list of {kind}s; it is {brief(sources)}"
        raise BadSampleError("missing_key", reason)
    places = sum(_is_open(part, kind) for turn in turns for part in turn.parts)
    if places != len(sources):
        raise BadSampleError(
            "tag_count",
            f"{places} {kind} place(s) (<{kind}> tags, or {kind} parts without a source) but "
            f"{len(sources)} entries in '{kind}s'; they are matched in order and must be equal in "
            "number",
        )
    return iter(sources)


def _parse_message(message: Any, number: int, label: bool | None) -> Turn:
    """A turn; images and videos without a source of their own get None, see `_fill`.

    Args:
        number: place of the message, from 1.
        label: the record's `label` for this message, None without.
    """
    where = f"message {number}"
    if not isinstance(message, Mapping):
        raise BadSampleError(
            "missing_key", f"{where} is a {type(message).__name__}; a JSON object is needed"
        )
    check_message_keys(message, where)
    for key in ("role", "content"):
        if message.get(key) is None:
            reason = f"{where} has no {key!r}; its keys are {sorted(message)}"
            raise BadSampleError("missing_key", reason)
    role, content = message["role"], message["content"]
    if role not in ROLES:
        raise BadSampleError(
            "unknown_role",
            f"{where} has role {brief(role)!r}; use one of {', '.join(ROLES)}"
            + (OTHER_ROLES.get(role, "") if isinstance(role, str) else ""),
        )
    if role == "system" and number > 1:
        raise BadSampleError(
            "unknown_role", f"{where} has role 'system'; only the first message may have it"
        )
    if isinstance(content, str):
        check_box_tags(content, where)
        parts = tuple(_split_tags(content))
    elif isinstance(content, Sequence) and not isinstance(content, bytes):
        parts = tuple(_parse_part(part, where) for part in content)
    else:
        raise BadSampleError(
            "missing_key",
            f"{where} has content of type {type(content).__name__}; a string or list is needed",
        )
    kinds = [part.kind for part in parts if not isinstance(part, str)]
    if role == "assistant" and kinds:
        raise BadSampleError(
            "tag_count",
            f"{where} has role 'assistant' and a part of type {kinds[0]} (or an <{kinds[0]}> tag); "
            "the model answers in text only: move it to a user or system message",
        )
    return Turn(role, parts, is_target(message, where, label))


def _split_tags(content: str) -> Iterator[Part]:
    """Non-empty text and media places of a string with tags."""
    for index, piece in enumerate(_TAG.split(content)):
        if index % 2:
            yield _PART_TYPES[piece](None)
        elif piece:
            yield piece


def _parse_part(part: Any, where: str) -> Part:
    kind = part.get("type") if isinstance(part, Mapping) else None
    kind = "image" if kind == "image_url" else kind
    if kind == "text" and isinstance(part.get("text"), str):
        check_part_keys(part, kind, where)
        return part["text"]
    if isinstance(kind, str) and kind in _PART_TYPES:
        check_part_keys(part, kind, where)
        sources = (part[key] for key in SOURCE_KEYS[kind] if part.get(key) is not None)
        return _PART_TYPES[kind](next(sources, None))
    raise BadSampleError(
        "missing_key",
        f"{where} has the part {brief(part)}; use {{'type': 'text', 'text': ...}}, "
        "{'type': 'image', ...} or {'type': 'video', ...}",
    )


def _fill(part: Part, listed: Mapping[str, Iterator[Any]], folder: MediaFolder) -> Part:
    if isinstance(part, str):
        return part
    kind = part.kind
    source = next(listed[kind]) if _is_open(part, kind) else part.source
    if isinstance(source, _IN_MEMORY):
        return part._replace(source=source)
    return part._replace(source=media_source(source, kind, f"{kind} source", folder))


def _is_open(part: Part, kind: str) -> bool:
    return not isinstance(part, str) and part.kind == kind and part.source is None
