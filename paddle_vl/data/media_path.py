"""Paths of images and videos as lines of data files name them."""

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from paddle_vl.data.bad_sample import BadSampleError

_SHOWN = 200


class MediaFolder(NamedTuple):
    """Where the paths of a data file start, and whether they may lead elsewhere.

    Attributes:
        directory: of the data file; None leaves paths as they are.
        allow_outside: whether absolute paths, `../` and links may lead out of it.
    """

    directory: Path | None = None
    allow_outside: bool = True

    def path(self, text: str, what: str) -> str:
        """A path as the line has it, from the folder on.

        Args:
            what: what it is, for messages: `image`, `video`.

        Raises:
            BadSampleError: it is no file name, or it leads outside and may not.
        """
        if "\0" in text:
            raise BadSampleError(
                "bad_path", f"{what} path {shown(text)!r} contains a NUL character"
            )
        if self.directory is None:
            return text
        joined = str(self.directory / text)
        if not self.allow_outside:
            self._check_inside(text, joined, what)
        return joined

    def _check_inside(self, text: str, joined: str, what: str) -> None:
        folder, found = os.path.realpath(self.directory), os.path.realpath(joined)
        if os.path.commonpath([folder, found]) != folder:
            raise BadSampleError(
                "outside_path",
                f"{what} path {shown(text)!r} leads to {shown(found)}, outside the folder of the "
                f"data file ({folder}), and data.allow_outside is false: move the file into the "
                "folder, or set data.allow_outside to true",
            )


def shown(path: str) -> str:
    """A path for a message: shortened where it is very long, without NUL characters."""
    text = path.replace("\0", "\\0")
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"


def file_size(path: str | os.PathLike, what: str) -> int:
    """Bytes of a file that must exist.

    Raises:
        BadSampleError: there is none, as `missing_image` or `missing_video`.
    """
    with suppress(OSError, ValueError):
        found = os.stat(path)
        if stat.S_ISREG(found.st_mode):
            return found.st_size
    raise BadSampleError(f"missing_{what}", f"{what} file {shown(os.fspath(path))} does not exist")
