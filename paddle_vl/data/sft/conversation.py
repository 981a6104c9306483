"""Chat messages to turns: roles, text, and which image stands where.

Two spellings are read, the JSONL format of PaddleFormers and ms-swift and the message lists of HF:

    {"messages": [{"role": "user", "content": "<image>What is this?"},
                  {"role": "assistant", "content": "A cat."}], "images": ["cat.png"]}

    {"messages": [{"role": "user", "content": [{"type": "image", "image": "cat.png"},
                                               {"type": "text", "text": "What is this?"}]}, ...]}

In the first, tags take the images in order. In the second, text is literal (no tags), and an image
part without a source of its own takes the next entry of `images`.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from paddle_vl.data.bad_sample import BadSampleError
from paddle_vl.data.vision.image_file import ImageSource

ROLES = ("system", "user", "assistant")

_TAG = re.compile(r"<(image|video)>")
# Entries of a record that change what the model should see, and that nothing here renders.
_UNSUPPORTED_KEYS = ("tools", "audios", "objects")
_MEDIA_KEYS = ("messages", "images", "videos", *_UNSUPPORTED_KEYS)
# Keys of an image part that hold its source; HF and OpenAI spell it in these ways.
_SOURCE_KEYS = ("image", "path", "url", "image_url")


class ImagePart(NamedTuple):
    """An image within a turn."""

    source: ImageSource


Part = str | ImagePart

# A place that the next entry of `images` fills.
_NEXT_IMAGE = ImagePart(None)


@dataclass(frozen=True)
class Turn:
    """One message: who speaks, and text and images in reading order."""

    role: str
    parts: tuple[Part, ...]

    @property
    def text(self) -> str:
        """The text without the images."""
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
        return [part.source for turn in self.turns for part in turn.parts if _is_image(part)]

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
        directory: where relative image paths start; the file's own directory.

    Raises:
        BadSampleError: naming the fault.
    """
    try:
        record = json.loads(line)
    except ValueError as error:
        reason = f"broken JSON: {error}; each line must be one whole JSON object"
        raise BadSampleError("broken_json", reason) from error
    if not isinstance(record, dict):
        raise BadSampleError(
            "broken_json",
            f"the line holds a JSON {type(record).__name__}; an object with 'messages' is needed",
        )
    return parse_record(record, directory)


def parse_record(record: Mapping[str, Any], directory: Path | None = None) -> Conversation:
    """Parse a record of messages and media.

    Args:
        record: `messages`, and optionally `images`; sources may also be PIL images or arrays.
        directory: where relative image paths start; None leaves them as they are.

    Raises:
        BadSampleError: a missing or mistyped entry, an unknown role, media that cannot be read
            yet, or a number of image tags that differs from the number of images.
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
    if record.get("videos"):
        raise _video_error(record["videos"])
    images = record.get("images") or []
    if isinstance(images, str) or not isinstance(images, Sequence):
        raise BadSampleError("missing_key", "'images' must be a list of paths")

    turns = [_parse_message(message, number) for number, message in enumerate(messages, start=1)]
    open_places = sum(_is_open(part) for turn in turns for part in turn.parts)
    if open_places != len(images):
        raise BadSampleError(
            "tag_count",
            f"{open_places} image place(s) (<image> tags, or image parts without a source) but "
            f"{len(images)} entries in 'images'; they are matched in order, so the numbers must "
            "be equal",
        )
    next_image = iter(images)
    filled = [
        replace(turn, parts=tuple(_fill(part, next_image, directory) for part in turn.parts))
        for turn in turns
    ]
    extra = {key: value for key, value in record.items() if key not in _MEDIA_KEYS}
    return Conversation(tuple(filled), extra)


def _parse_message(message: Any, number: int) -> Turn:
    """A turn whose image parts have their own source, or None for the next of `images`."""
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
    if role == "assistant" and any(_is_image(part) for part in parts):
        raise BadSampleError(
            "tag_count",
            f"{where} is an assistant's and holds an image (or an <image> tag); the model answers "
            "in text only, so images belong to user or system messages",
        )
    return Turn(role, parts)


def _split_tags(content: str) -> Iterator[Part]:
    """Text and image places of a tagged string, without empty text."""
    for index, piece in enumerate(_TAG.split(content)):
        if index % 2 == 0:
            if piece:
                yield piece
        elif piece == "video":
            raise _video_error("a <video> tag")
        else:
            yield _NEXT_IMAGE


def _parse_part(part: Any, where: str) -> Part:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return part["text"]
    if kind in ("image", "image_url"):
        return ImagePart(next((part[key] for key in _SOURCE_KEYS if key in part), None))
    if kind == "video":
        raise _video_error(part.get("video", "a video part"))
    raise BadSampleError(
        "missing_key",
        f"{where} has the part {str(part)[:80]}; use {{'type': 'text', 'text': ...}} or "
        "{'type': 'image', ...}",
    )


def _fill(part: Part, next_image: Iterator[Any], directory: Path | None) -> Part:
    if not _is_image(part):
        return part
    source = next(next_image) if _is_open(part) else part.source
    if isinstance(source, Image.Image | np.ndarray):
        return ImagePart(source)
    if not isinstance(source, str | os.PathLike) or not os.fspath(source):
        raise BadSampleError(
            "missing_key", f"image source {str(source)[:80]!r} is not a path; write a file name"
        )
    text = os.fspath(source).removeprefix("file://")
    if text.startswith(("http://", "https://", "data:")):
        raise BadSampleError(
            "unsupported",
            f"image {text[:80]!r} is not a file; save it as one and write its path",
        )
    return ImagePart(str(directory / text) if directory else text)


def _video_error(video: Any) -> BadSampleError:
    return BadSampleError(
        "unsupported",
        f"the sample has a video ({str(video)[:80]}); video files cannot be read yet, only images",
    )


def _is_image(part: Part) -> bool:
    return isinstance(part, ImagePart)


def _is_open(part: Part) -> bool:
    return _is_image(part) and part.source is None
