"""Errors of the system with the name of the file that they are about."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Give an `OSError` the file's name where the system gives none: a disk that is full, say."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file.

    Raises:
        OSError: with the file's name, whatever it is.
    """
    with naming(path):
        path.write_text(text, encoding="utf-8")
