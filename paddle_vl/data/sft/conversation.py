"""Chat messages to turns: roles, text, and which image or video stands where.

Two spellings are read, the JSONL format of PaddleFormers and ms-swift and the message lists of HF:

    {"messages": [{"role": "user", "content": "<image>What is this?"},
                  {"role": "assistant", "content": "A cat."}], "images": ["cat.png"]}

    {"messages": [{"role": "user", "content": [{"type": "image", "image": "cat.png"},
                                               {"type": "text", "text": "What is this?"}]}, ...]}

In the first, `<image>` and `<video>` tags take the entries of `images` and `videos` in order. In
the second, text is literal (no tags), and a part without a source of its own takes the next entry.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from paddle_vl.data.bad_sample import BadSampleError
from paddle_vl.data.line_index import parse_object
from paddle_vl.data.vision.image_file import ImageSource
from paddle_vl.data.vision.video_reader import VideoFrames, VideoSource

ROLES = ("system", "user", "assistant")

_TAG = re.compile(r"<(image|video)>")
# Entries of a record that change what the model should see, and that nothing here renders.
_UNSUPPORTED_KEYS = ("tools", "audios", "objects")
_MEDIA_KEYS = ("messages", "images", "videos", *_UNSUPPORTED_KEYS)
# Keys of a part that hold its source; HF and OpenAI spell it in these ways.
_SOURCE_KEYS = {
    "image": ("image", "path", "url", "image_url"),
    "video": ("video", "path", "url"),
}


class ImagePart(NamedTuple):
    """An image within a turn."""

    source: ImageSource


class VideoPart(NamedTuple):
    """A video within a turn."""

    source: VideoSource


Part = str | ImagePart | VideoPart

_PART_TYPES = {"image": ImagePart, "video": VideoPart}
# What other readers of messages set for one video. Left out silently, another number of frames
# would be trained on than its author meant.
_VIDEO_PART_SETTINGS = (
    "fps", "nframes", "num_frames", "min_frames", "max_frames", "min_pixels", "max_pixels",
    "total_pixels", "resized_height", "resized_width", "video_start", "video_end",
)  # fmt: skip
# Sources that are not file names.
_IN_MEMORY = (Image.Image, np.ndarray, VideoFrames)


@dataclass(frozen=True)
class Turn:
    """One message: who speaks, and text, images and videos in reading order."""

    role: str
    parts: tuple[Part, ...]

    @property
    def text(self) -> str:
        """The text without images and videos."""
        return "".join(part for part in self.parts if isinstance(part, str))


@dataclass(frozen=True)
class Conversation:
    """A validated conversation.

    Attributes:
        turns: in order; a system turn can only be the first.
        extra: entries of the record that are neither messages nor media, such as `task`.
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

    def _sources(self, kind: type) -> list[Any]:
        return [part.source for turn in self.turns for part in turn.parts if isinstance(part, kind)]

    def prompt_and_answer(self) -> tuple["Conversation", str]:
        """Everything before the last assistant turn, and the text of that turn.

        Raises:
            BadSampleError: there is no assistant turn.
        """
        last = max((i for i, t in enumerate(self.turns) if t.role == "assistant"), default=None)
        if last is None:
            raise BadSampleError("no_assistant", "the conversation has no assistant turn")
        return replace(self, turns=self.turns[:last]), self.turns[last].text


def parse_line(line: bytes, directory: Path) -> Conversation:
    """Parse one line of a JSONL file.

    Args:
        directory: where relative paths start; the file's own directory.

    Raises:
        BadSampleError: naming the fault.
    """
    return parse_record(parse_object(line, "'messages'"), directory)


def parse_record(record: Mapping[str, Any], directory: Path | None = None) -> Conversation:
    """Parse a record of messages and media.

    Args:
        record: `messages`, and optionally `images` and `videos`; sources may also be PIL images,
            arrays or `VideoFrames`.
        directory: where relative paths start; None leaves them as they are.

    Raises:
        BadSampleError: a missing or mistyped entry, an unknown role, an entry that nothing here
            renders, or a number of tags that differs from the number of images or videos.
    """
    if "messages" not in record:
        raise BadSampleError(
            "missing_key", f"the record has no 'messages'; it has {sorted(record)}"
        )
    messages = record["messages"]
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise BadSampleError("missing_key", "'messages' must be a list with at least one message")
    for key in _UNSUPPORTED_KEYS:
        if record.get(key):
            raise BadSampleError("unsupported", f"{key!r} cannot be used yet; remove the entry")

    turns = [_parse_message(message, number) for number, message in enumerate(messages, start=1)]
    listed = {kind: _listed(record, kind, turns) for kind in _PART_TYPES}
    filled = [
        replace(turn, parts=tuple(_fill(part, listed, directory) for part in turn.parts))
        for turn in turns
    ]
    extra = {key: value for key, value in record.items() if key not in _MEDIA_KEYS}
    return Conversation(tuple(filled), extra)


def _listed(record: Mapping[str, Any], kind: str, turns: Sequence[Turn]) -> Iterator[Any]:
    """The entries of `images` or `videos`, as many as there are places for them."""
    sources = record.get(f"{kind}s")
    sources = [] if sources is None else sources
    if isinstance(sources, str) or not isinstance(sources, Sequence):
        raise BadSampleError("missing_key", f"'{kind}s' must be a list of paths")
    places = sum(_is_open(part, kind) for turn in turns for part in turn.parts)
    if places != len(sources):
        raise BadSampleError(
            "tag_count",
            f"{places} {kind} place(s) (<{kind}> tags, or {kind} parts without a source) but "
            f"{len(sources)} entries in '{kind}s'; they are matched in order, so the numbers must "
            "be equal",
        )
    return iter(sources)


def _parse_message(message: Any, number: int) -> Turn:
    """A turn whose parts have their own source, or None for the next of `images` or `videos`."""
    where = f"message {number}"
    if not isinstance(message, Mapping):
        raise BadSampleError(
            "missing_key", f"{where} is a {type(message).__name__}; an object is needed"
        )
    for key in ("role", "content"):
        if message.get(key) is None:
            raise BadSampleError("missing_key", f"{where} has no {key!r}; it has {sorted(message)}")
    role, content = message["role"], message["content"]
    if role not in ROLES:
        raise BadSampleError(
            "unknown_role", f"{where} has role {role!r}; use one of {', '.join(ROLES)}"
        )
    if role == "system" and number > 1:
        raise BadSampleError(
            "unknown_role", f"{where} has role 'system', which only the first message may have"
        )
    if isinstance(content, str):
        parts = tuple(_split_tags(content))
    elif isinstance(content, Sequence):
        parts = tuple(_parse_part(part, where) for part in content)
    else:
        raise BadSampleError(
            "missing_key",
            f"{where} has content of type {type(content).__name__}; text or a list is needed",
        )
    kinds = [_kind(part) for part in parts if not isinstance(part, str)]
    if role == "assistant" and kinds:
        raise BadSampleError(
            "tag_count",
            f"{where} is an assistant's and has a part of kind {kinds[0]} (or an <{kinds[0]}> "
            "tag); the model answers in text only: put it into a user or system message",
        )
    return Turn(role, parts)


def _split_tags(content: str) -> Iterator[Part]:
    """Text and places of a tagged string, without empty text."""
    for index, piece in enumerate(_TAG.split(content)):
        if index % 2:
            yield _PART_TYPES[piece](None)
        elif piece:
            yield piece


def _parse_part(part: Any, where: str) -> Part:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return part["text"]
    if kind in ("image", "image_url"):
        return ImagePart(_own_source(part, "image"))
    if kind == "video":
        ignored = [key for key in _VIDEO_PART_SETTINGS if part.get(key) is not None]
        if ignored:
            raise BadSampleError(
                "unsupported",
                f"{where} has a video part with {', '.join(ignored)}, which cannot be set for one "
                "video; set data.video_fps, data.video_max_frames or data.video_max_pixels for all",
            )
        return VideoPart(_own_source(part, "video"))
    raise BadSampleError(
        "missing_key",
        f"{where} has the part {str(part)[:80]}; use {{'type': 'text', 'text': ...}}, "
        "{'type': 'image', ...} or {'type': 'video', ...}",
    )


def _own_source(part: Mapping[str, Any], kind: str) -> Any:
    return next((part[key] for key in _SOURCE_KEYS[kind] if key in part), None)


def _fill(part: Part, listed: Mapping[str, Iterator[Any]], directory: Path | None) -> Part:
    if isinstance(part, str):
        return part
    kind = _kind(part)
    source = next(listed[kind]) if _is_open(part, kind) else part.source
    if isinstance(source, _IN_MEMORY):
        return part._replace(source=source)
    if not isinstance(source, str | os.PathLike) or not os.fspath(source):
        raise BadSampleError(
            "missing_key", f"{kind} source {str(source)[:80]!r} is not a path; write a file name"
        )
    text = os.fspath(source).removeprefix("file://")
    if text.startswith(("http://", "https://", "data:")):
        raise BadSampleError(
            "unsupported",
            f"{kind} {text[:80]!r} is not a file; save it as one and write its path",
        )
    return part._replace(source=str(directory / text) if directory else text)


def _kind(part: ImagePart | VideoPart) -> str:
    return "image" if isinstance(part, ImagePart) else "video"


def _is_open(part: Part, kind: str) -> bool:
    return isinstance(part, _PART_TYPES[kind]) and part.source is None
