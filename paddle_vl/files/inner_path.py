"""Paths that a file gives for others of its folder."""

import os
from pathlib import Path, PurePosixPath
from typing import Any

from paddle_vl.files.text_file import shown


def is_inner(name: Any) -> bool:
    """Whether it is a relative path that does not leave its folder; it may be a link."""
    if not isinstance(name, str) or not name or "\0" in name or "\\" in name:
        return False
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and path.name != ""


def inner_path(folder: Path, name: Any, file: Path) -> Path:
    """The path of a name in a folder.

    Args:
        file: where the name is written.

    Raises:
        RuntimeError: it leads out of the folder, or is no path.
    """
    if not is_inner(name):
        raise RuntimeError(
            f"{file} names {shown(name)}, which is no file of {folder}: correct it, or name the "
            "files themselves"
        )
    return folder / name
