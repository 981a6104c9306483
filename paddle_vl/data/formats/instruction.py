"""Rows of one question and its answer: Alpaca, and the query and response of ms-swift.

{"instruction": "Translate.", "input": "sea", "output": "Meer", "history": [["a", "b"]]}

{"query": "Where?", "response": "Here."}
"""

from collections.abc import Mapping
from typing import Any

from paddle_vl.data.formats.keys import QUERY_KEYS, RESPONSE_KEYS, ROW_KEYS, from_text, is_empty
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.media_file import brief


def read_alpaca(row: dict[str, Any]) -> dict[str, Any]:
    """An Alpaca row as one of `messages`: `instruction`, and `input` on a line of its own.

    Args:
        row: without null values.

    Raises:
        BadSampleError: a value is missing or no text.
    """
    asked = [_text(row.get(key, ""), key) for key in ("instruction", "input")]
    query = "\n".join(text for text in asked if text)
    answer = _text(row.get("output"), "output")
    return _conversation(row, query, answer, ("instruction", "input", "output", "history"))


def read_query_response(row: dict[str, Any]) -> dict[str, Any]:
    """A row of a query and a response as one of `messages`.

    Args:
        row: without null values; keys may be in capitals.

    Raises:
        BadSampleError: a value is missing or no text, or several keys mean the same.
    """
    names = (*QUERY_KEYS, *RESPONSE_KEYS, *ROW_KEYS, "history")
    lower: dict[str, Any] = {}
    for key, value in row.items():
        name = key.lower() if isinstance(key, str) and key.lower() in names else key
        if name in lower and lower[name] != value:
            raise BadSampleError("ambiguous", f"the record has {name!r} twice: keep one of them")
        lower[name] = value
    query, response = (_one_of(lower, keys) for keys in (QUERY_KEYS, RESPONSE_KEYS))
    return _conversation(lower, query, response, (*QUERY_KEYS, *RESPONSE_KEYS, "history"))


def _one_of(row: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    """The text of the one key among them that the row has."""
    given = {key: row[key] for key in keys if key in row}
    if not given:
        reason = f"the record has none of {', '.join(keys)}: add it, or name it with data.columns"
        raise BadSampleError("missing_key", reason)
    first, value = next(iter(given.items()))
    if any(other != value for other in given.values()):
        raise BadSampleError(
            "ambiguous",
            f"{' and '.join(given)} all mean the {keys[0]}, with different values: hide all "
            f"but one with data.columns ({{{list(given)[-1]}: _}})",
        )
    return _text(value, first)


def _conversation(
    row: Mapping[str, Any], query: str, response: str, read: tuple[str, ...]
) -> dict[str, Any]:
    if not query:
        raise BadSampleError("missing_key", "the question is empty: write it, or leave the row out")
    pairs = [*_history(row.get("history")), (query, response)]
    messages = [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    rest = {key: value for key, value in row.items() if key not in read}
    return {"messages": messages, **rest}


def _history(value: Any) -> list[tuple[str, str]]:
    pairs = [] if is_empty(value) else from_text(value, literal=True)
    if not isinstance(pairs, list | tuple) or any(
        not isinstance(pair, list | tuple) or len(pair) != 2 for pair in pairs
    ):
        reason = f"'history' is {brief(value)!r}; a list of [question, answer] is needed"
        raise BadSampleError("missing_key", reason)
    return [(_text(query, "history"), _text(answer, "history")) for query, answer in pairs]


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str):
        what = f"is of type {type(value).__name__}" if value is not None else "is missing"
        remedy = " (several answers to choose from are not: keep one)" if key != "history" else ""
        raise BadSampleError("missing_key", f"{key!r} {what}; a string is needed{remedy}")
    return value
