"""Conversations: rows in the canonical form whose images and videos can be opened.

`paddle_vl.data.formats` reads the formats of rows; here paths are joined to the folder of their
data file, and addresses to the cache of remote files.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from paddle_vl.data.formats.canonical import CanonicalRow, Message, check_targets
from paddle_vl.data.formats.reader import to_canonical
from paddle_vl.data.formats.row_settings import RowSettings
from paddle_vl.data.jsonl import parse_object
from paddle_vl.data.media_file import ImageSource, MediaFolder, media_source, upright_size
from paddle_vl.data.video_reader import FrameFiles, VideoFrames, VideoSource

# Sources in memory instead of file names.
_IN_MEMORY = (Image.Image, np.ndarray, VideoFrames)


class ImagePart(NamedTuple):
    """An image within a turn."""

    source: ImageSource
    kind = "image"


class VideoPart(NamedTuple):
    """A video within a turn."""

    source: VideoSource
    kind = "video"


Part = str | ImagePart | VideoPart
_PARTS: dict[str, Any] = {"text": lambda text: text, "image": ImagePart, "video": VideoPart}


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
        row: the canonical form, whose sources can be opened.
    """

    row: CanonicalRow

    @property
    def extra(self) -> Mapping[str, Any]:
        """Keys of the record that are not read, such as `task`."""
        return self.row.extras

    @cached_property
    def turns(self) -> tuple[Turn, ...]:
        """The messages; only the first may be a system turn."""
        return tuple(map(_turn, self.row.messages))

    @property
    def images(self) -> list[ImageSource]:
        """Sources of all images in reading order."""
        return list(self._sources("image"))

    @property
    def videos(self) -> list[VideoSource]:
        """Sources of all videos in reading order."""
        return list(self._sources("video"))

    def _sources(self, kind: str) -> Iterator[Any]:
        parts = (part for message in self.row.messages for part in message["content"])
        return (part[kind] for part in parts if part["type"] == kind)

    @property
    def targets(self) -> list[int]:
        """Numbers of the turns that are training targets."""
        return [i for i, message in enumerate(self.row.messages) if message.get("loss")]

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing but texts, images and videos of users and the assistant."""
        row = self.row
        if row.tools or row.chat_template_kwargs:
            return False
        own = {"tool_calls", "reasoning_content"}
        return not any(own & each.keys() or each["role"] == "tool" for each in row.messages)

    def before(self, number: int) -> "Conversation":
        """The turns in front of one."""
        return Conversation(replace(self.row, messages=self.row.messages[:number]))

    def check_targets(self) -> None:
        """Check that there is a training target.

        Raises:
            BadSampleError: no assistant turn, no target among them, or an empty target.
        """
        check_targets(self.row)


@dataclass(frozen=True)
class RowReader:
    """Reads the rows of one source. It can be pickled.

    Attributes:
        settings: of the rows.
        format: see `paddle_vl.data.formats.reader.FORMATS`; None recognises each row's.
        allow_outside: whether paths may lead outside of the folder of the data file.
        remote: makes a file of an http(s) address; None refuses addresses.
    """

    settings: RowSettings = field(default_factory=RowSettings)
    format: str | None = None
    allow_outside: bool = True
    remote: Any = None

    def __call__(self, row: Mapping[str, Any], directory: Path | None = None) -> Conversation:
        """Read a row.

        Args:
            row: sources of images and videos may also be PIL images, arrays, `VideoFrames` or the
                bytes of an image file.
            directory: folder that relative paths start from; None leaves paths as they are.

        Raises:
            BadSampleError: the row does not fit its format, or a path is unusable.
        """
        folder = MediaFolder(directory, self.allow_outside, self.remote)

        def size(source: Any) -> tuple[int, int]:
            return upright_size(_opened("image", source, folder))

        settings = replace(self.settings, image_size=size)
        canonical = to_canonical(row, settings, format=self.format)
        messages = [_with_sources(message, folder) for message in canonical.messages]
        return Conversation(replace(canonical, messages=messages))


def parse_line(line: bytes, directory: Path, allow_outside: bool = True) -> Conversation:
    """The conversation of one line of a JSONL file; see `RowReader`.

    Raises:
        BadSampleError: as `RowReader`, or broken JSON.
    """
    return parse_record(parse_object(line, "'messages'"), directory, allow_outside)


def parse_record(
    record: Mapping[str, Any], directory: Path | None = None, allow_outside: bool = True
) -> Conversation:
    """The conversation of a record of any format; see `RowReader`."""
    return RowReader(allow_outside=allow_outside)(record, directory)


def _turn(message: Message) -> Turn:
    parts = tuple(_PARTS[part["type"]](part[part["type"]]) for part in message["content"])
    return Turn(message["role"], parts, message.get("loss", False))


def _with_sources(message: Message, folder: MediaFolder) -> Message:
    parts = []
    for part in message["content"]:
        kind = part["type"]
        parts.append(part if kind == "text" else {**part, kind: _opened(kind, part[kind], folder)})
    return {**message, "content": parts}


def _opened(kind: str, source: Any, folder: MediaFolder) -> Any:
    """A source that can be opened: a path, bytes, or an object in memory."""
    if isinstance(source, _IN_MEMORY):
        return source
    if isinstance(source, list):
        return FrameFiles(tuple(_opened("image", frame, folder) for frame in source))
    return media_source(source, kind, f"{kind} source", folder)
