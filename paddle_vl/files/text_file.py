"""Text and JSON files, read and written with errors that name the file."""

import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_MEBIBYTE = 1 << 20
# A tokenizer.json with a large vocabulary has 35 MB.
MAX_BYTES = 256 * _MEBIBYTE


def read_json_object(file: Path, what: str, remedy: str = "fetch or save it again") -> dict:
    """The object in a JSON file.

    Args:
        what: the kind of file, for the message: "a tokenizer file".
        remedy: what to do, for the message.

    Raises:
        RuntimeError: the file cannot be read, is not UTF-8 or not JSON, is nested too deeply, has a
            duplicate key, or is not an object.
    """
    return parse_json_object(read_text(file, what, remedy), file, what, remedy)


def read_text(file: Path, what: str, remedy: str = "fetch or save it again") -> str:
    """The text of a UTF-8 file.

    Raises:
        RuntimeError: the file cannot be read, is not UTF-8, or is larger than `MAX_BYTES`.
    """
    try:
        size = file.stat().st_size
        if size > MAX_BYTES:
            reason = f"it has {size:,} bytes, more than {MAX_BYTES // _MEBIBYTE} MiB"
            raise RuntimeError(_not_what(file, what, reason, remedy))
        return file.read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        raise RuntimeError(f"{file} cannot be read as {what}: {reason}; {remedy}") from error
    except UnicodeDecodeError as error:
        reason = f"byte {error.start} is not UTF-8 text"
        raise RuntimeError(_not_what(file, what, reason, remedy)) from error


def parse_json_object(text: str | bytes, file: Path, what: str, remedy: str) -> dict[str, Any]:
    """The object in a JSON text, with the errors of `read_json_object`.

    Args:
        file: source of the text, for the message.
    """
    try:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        values = json.loads(text, object_pairs_hook=_without_duplicates)
    except UnicodeDecodeError as error:
        reason = f"byte {error.start} is not UTF-8 text"
        raise RuntimeError(_not_what(file, what, reason, remedy)) from error
    except json.JSONDecodeError as error:
        raise RuntimeError(f"{file} is not valid JSON: {error}; {remedy}") from error
    except RecursionError as error:
        raise RuntimeError(_not_what(file, what, "nested too deeply", remedy)) from error
    except ValueError as error:
        # A duplicate key; an integer of thousands of digits.
        raise RuntimeError(_not_what(file, what, str(error), remedy)) from error
    if not isinstance(values, dict):
        reason = f"it holds {shown(values)}, not an object"
        raise RuntimeError(_not_what(file, what, reason, remedy))
    return values


def shown(value: Any) -> str:
    """A value for a message, in at most 80 characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        # An integer of thousands of digits.
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Add the file name to an `OSError` without one, e.g. of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name to write a file under, which gets its own when the block ends without an error: the
    file appears complete or not at all.

    Raises:
        OSError: always with the file's name.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with naming(path):
        try:
            yield partial
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock beside `path` that other processes wait for; it ends with its process.

    Some network file systems have no locks. Then several processes may do the same work; files
    appear at once all the same.
    """
    with path.with_name(path.name + ".lock").open("a") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file, which appears complete or not at all.

    Raises:
        OSError: always with the file's name.
    """
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {twice!r} is there twice")
    return values


def _not_what(file: Path, what: str, reason: str, remedy: str) -> str:
    return f"{file} is not {what}: {reason}; {remedy}"
