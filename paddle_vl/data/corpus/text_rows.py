"""The text of a row."""

from collections.abc import Mapping, Sequence
from typing import Any

from paddle_vl.data.jsonl import BadSampleError


def needed(row: Mapping[str, Any], key: str, kind: str) -> Any:
    """An entry of a row.

    Args:
        kind: the source's format, for the message.

    Raises:
        BadSampleError: the row does not have it.
    """
    if row.get(key) is None:
        raise BadSampleError(
            "missing_key",
            f"the row has no {key!r}, which format {kind} needs; its entries are {sorted(row)} "
            "(other names can be given with the source's columns, another kind with its format)",
        )
    return row[key]


def text_of(row: Mapping[str, Any], kind: str = "text") -> str:
    """The entry `text`: a string, or a list of strings, which are joined by line breaks.

    Raises:
        BadSampleError: it is missing or of another type.
    """
    text = needed(row, "text", kind)
    if isinstance(text, str):
        return text
    if isinstance(text, Sequence) and all(isinstance(each, str) for each in text):
        return "\n".join(text)
    raise BadSampleError(
        "missing_key",
        f"'text' is of type {type(text).__name__}; a string or a list of strings is needed",
    )


def refuse_empty(has_text: bool) -> None:
    """Raise a BadSampleError for a document without text."""
    if not has_text:
        raise BadSampleError(
            "empty_text", "the document has no text, so that nothing is learned: leave it out"
        )
