"""OSErrors that name their file, and writing text with them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Add the file name to an `OSError` without one, e.g. of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file.

    Raises:
        OSError: always with the file's name.
    """
    with naming(path):
        path.write_text(text, encoding="utf-8")
