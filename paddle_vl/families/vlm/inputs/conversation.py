"""Conversations: rows in the canonical form whose images and videos can be opened.

`paddle_vl.data.formats` reads the formats of rows; here paths are joined to the folder of their
data file, and addresses to the cache of remote files.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from paddle_vl.data.formats.canonical import CanonicalRow, Message, check_targets
from paddle_vl.data.formats.reader import to_canonical
from paddle_vl.data.formats.row_settings import RowSettings
from paddle_vl.data.media_file import ImageSource, MediaFolder, media_source, upright_size
from paddle_vl.data.video_reader import FrameFiles, VideoFrames, VideoSource

# Sources in memory instead of file names.
_IN_MEMORY = (Image.Image, np.ndarray, VideoFrames)


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

    def text(self, number: int) -> str:
        """The text of a turn without images and videos."""
        parts = self.row.messages[number]["content"]
        return "".join(part["text"] for part in parts if part["type"] == "text")

    @property
    def targets(self) -> list[int]:
        """Numbers of the turns that are training targets."""
        return [i for i, message in enumerate(self.row.messages) if message.get("loss")]

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


def parse_record(record: Mapping[str, Any], directory: Path | None = None) -> Conversation:
    """The conversation of a record of any format; see `RowReader`."""
    return RowReader()(record, directory)


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
