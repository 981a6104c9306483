"""What checking a JSONL file found, kept so that an unchanged file is not read at every start.

It lies in `.paddle_vl/` beside the data, or where `paddle_vl.data.corpus.cache` says. It counts as
long as the data file and all images and videos that its lines name have the same size and times of
change, and the package and the settings of the checks are the same. Files with a bad line, whose
errors are told again, and short ones are always read.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paddle_vl.data.corpus.cache import Cache
from paddle_vl.data.jsonl import FileContent, FileLines
from paddle_vl.files.array_file import read_arrays, write_arrays

logger = logging.getLogger(__name__)
_PACKAGE = Path(__file__).parents[1]
_SUFFIX = ".checked"
# Lines of a file that is kept; fewer are checked in a tenth of a second.
_FEWEST = 1000

# Size in bytes, and times of the last change of content and of the file in nanoseconds; zeros of a
# file that is gone.
FileState = tuple[int, int, int]


def state_of(path: str | Path) -> FileState:
    """The state of a file."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return 0, 0, 0
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


class CheckedFile(NamedTuple):
    """What is kept of a file: its lines, the format of its rows, keys that are not read."""

    lines: FileLines
    format: str | None
    unread: list[str]


class CheckedLines:
    """What was found in files that were checked in the same way.

    Args:
        settings: gives all that decides on a check beside the line and the files that it names;
            JSON values.
    """

    def __init__(self, cache: Cache, settings: Callable[[], list[Any]]):
        self._cache, self._settings = cache, settings

    @cached_property
    def _key(self) -> str:
        sources = [(str(file), *state_of(file)) for file in sorted(_PACKAGE.rglob("*.py"))]
        return hashlib.sha256(json.dumps([sources, self._settings()]).encode()).hexdigest()

    def of(self, file: Path) -> CheckedFile | None:
        """What was found in a file; None if it was not kept, or something has changed since."""
        for path in self._cache.existing(file, _SUFFIX):
            stored = read_arrays(path, f"{file} is checked again")
            if stored is None:
                continue
            kept = json.loads(str(stored["kept"]))
            media = zip(kept["media"], stored["states"].tolist(), strict=True)
            if (kept["key"], kept["state"]) != (self._key, [*state_of(file)]):
                continue
            if any([*state_of(each)] != state for each, state in media):
                continue
            content = FileContent(str(file), *kept["content"])
            lines = FileLines(stored["steps"].cumsum(axis=0), content)
            return CheckedFile(lines, kept["format"], kept["unread"])
        return None

    def keep(
        self, found: CheckedFile, file: Path, state: FileState, media: Mapping[str, FileState]
    ) -> None:
        """Keep what was found in a file.

        Args:
            state: of the file before it was read.
            media: states of the images and videos that its lines name.
        """
        (places, content, bad), format, unread = found
        if bad or len(places) < _FEWEST or state_of(file) != state:
            return
        kept = {
            "key": self._key,
            "state": state,
            "content": content[1:],
            "format": format,
            "unread": unread,
            "media": [*media],
        }
        states = np.array([*media.values()], dtype=np.int64).reshape([-1, 3])
        steps = np.diff(places, axis=0, prepend=0)
        try:
            path = self._cache.writable(file, _SUFFIX)
            write_arrays(path, steps=steps, states=states, kept=json.dumps(kept))
        except (RuntimeError, OSError) as error:
            logger.warning(
                "what was found in %s cannot be kept (%s): every start checks it again", file, error
            )
