"""Conversations: rows in the canonical form whose images and videos can be opened.

`paddle_vl.data.formats` reads the formats of rows; here paths are joined to the folder of their
data file, and addresses to the cache of remote files.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from paddle_vl.data.formats.canonical import CanonicalRow, Message, check_targets
from paddle_vl.data.formats.keys import RowSettings
from paddle_vl.data.formats.reader import to_canonical
from paddle_vl.data.media_file import ImageSource, MediaFolder, media_source, upright_size
from paddle_vl.data.video_reader import FrameFiles, VideoFrames, VideoSource

# Sources in memory instead of file names.
_IN_MEMORY = (Image.Image, np.ndarray, VideoFrames, FrameFiles)


@dataclass(frozen=True)
class Conversation:
    """A validated conversation.

    Attributes:
        row: the canonical form, whose sources can be opened.
    """

    row: CanonicalRow

    @classmethod
    def of(
        cls, messages: list[Message], tools: Sequence[Any] = (), variables: Mapping[str, Any] = {}
    ) -> "Conversation":
        """A conversation of messages in the canonical form, not checked."""
        return cls(CanonicalRow(messages, "messages", [*tools], dict(variables)))

    @property
    def messages(self) -> list[Message]:
        """The messages; only the first may be of the system."""
        return self.row.messages

    @property
    def branches(self) -> "list[Conversation]":
        """The conversations of the row: itself, or those that are compared."""
        return [self]

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing but texts, images and videos of users and the assistant."""
        own = {"tool_calls", "reasoning_content"}
        return not (self.row.tools or self.row.chat_template_kwargs) and not any(
            own & each.keys() or each["role"] == "tool" for each in self.messages
        )

    @property
    def extra(self) -> Mapping[str, Any]:
        """Keys of the record that are not read, such as `task`."""
        return self.row.extras

    @property
    def columns(self) -> Mapping[str, Any]:
        """Values of the row that a metric may need."""
        return self.row.extras

    @property
    def all_text(self) -> str:
        """All texts and names that the row brings, one below the other."""
        row = self.row
        return "\n".join(strings_in([row.messages, row.tools, row.chat_template_kwargs]))

    @property
    def plain_text(self) -> str:
        """The texts of the contents, one below the other."""
        return "\n".join(map(self.text, range(len(self.messages))))

    @property
    def media(self) -> list[str]:
        """`image` or `video` for each of them, in reading order."""
        parts = (part for message in self.messages for part in message["content"])
        return [part["type"] for part in parts if part["type"] != "text"]

    @property
    def images(self) -> list[ImageSource]:
        """Sources of all images in reading order."""
        return list(self._sources("image"))

    @property
    def videos(self) -> list[VideoSource]:
        """Sources of all videos in reading order."""
        return list(self._sources("video"))

    def _sources(self, kind: str) -> Iterator[Any]:
        parts = (part for message in self.messages for part in message["content"])
        return (part[kind] for part in parts if part["type"] == kind)

    def text(self, number: int) -> str:
        """The text of a turn without images and videos."""
        parts = self.messages[number]["content"]
        return "".join(part["text"] for part in parts if part["type"] == "text")

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
        return Conversation(replace(self.row, messages=[*messages]))

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
            row: sources of images and videos may also be PIL images, arrays, `VideoFrames`,
                `FrameFiles` or the bytes of an image file.
            directory: folder that relative paths start from; None leaves paths as they are.

        Raises:
            BadSampleError: the row does not fit its format, or a path is unusable.
        """
        folder, settings = self.opening(directory)
        return self.opened(to_canonical(row, settings, format=self.format), folder)

    def opening(self, directory: Path | None) -> tuple[MediaFolder, RowSettings]:
        """The folder of a row's files, and the settings to read it with."""
        folder = MediaFolder(directory, self.allow_outside, self.remote)

        def size(source: Any) -> tuple[int, int]:
            return upright_size(_opened("image", source, folder))

        return folder, replace(self.settings, image_size=size)

    def opened(self, canonical: CanonicalRow, folder: MediaFolder) -> Conversation:
        """The conversation of a row in the canonical form."""
        messages = [_with_sources(message, folder) for message in canonical.messages]
        return Conversation(replace(canonical, messages=messages))


def parse_record(
    record: Mapping[str, Any], directory: Path | None = None, **settings: Any
) -> Conversation:
    """The conversation of a record of any format; see `RowReader`, and `RowSettings`."""
    return RowReader(RowSettings(**settings))(record, directory)


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
