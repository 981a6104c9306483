"""Lists and objects that a row holds as text: JSON, or a Python literal as ms-swift writes it."""

import ast
from typing import Any

from paddle_vl.data.jsonl import BadSampleError, parse_value
from paddle_vl.data.media_file import brief


def from_text(value: Any, *, literal: bool = False) -> Any:
    """The value of a text that holds JSON; any other value, and other text, as it is.

    Args:
        literal: whether the text may also be a Python literal.
    """
    if not isinstance(value, str):
        return value
    try:
        return parse_value(value)
    except ValueError:
        pass
    try:
        return ast.literal_eval(value.strip()) if literal else value
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return value


def list_of(value: Any, name: str) -> list[Any]:
    """A list that may be written as text.

    Raises:
        BadSampleError: it is no list, or an empty one.
    """
    found = from_text(value, literal=True)
    if not isinstance(found, list | tuple) or not found:
        raise BadSampleError(
            "missing_key",
            f"{name!r} must be a list with at least one message (or its JSON text); it is "
            f"{brief(value)!r}",
        )
    return list(found)
