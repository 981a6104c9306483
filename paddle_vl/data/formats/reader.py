"""A row of any format to its canonical form, and which format it has, from its keys."""

from collections.abc import Callable, Mapping
from typing import Any

from paddle_vl.data.formats.canonical import CanonicalRow
from paddle_vl.data.formats.erniekit import read_erniekit
from paddle_vl.data.formats.instruction import read_alpaca, read_query_response
from paddle_vl.data.formats.keys import (
    LIST_KEYS,
    PAIR_KEYS,
    QUERY_KEYS,
    RESPONSE_KEYS,
    check_preference,
    from_text,
    is_empty,
    read_messages,
)
from paddle_vl.data.formats.messages import canonical_row
from paddle_vl.data.formats.prompt_completion import read_prompt_completion
from paddle_vl.data.formats.row_settings import RowSettings, renamed
from paddle_vl.data.formats.sharegpt import read_llava, read_sharegpt
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.media_file import brief

FORMATS = (
    "messages", "sharegpt", "llava", "erniekit", "prompt_completion", "alpaca", "query_response",
)  # fmt: skip
# Each gives the row in the form of `messages`.
_READERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "messages": read_messages,
    "sharegpt": read_sharegpt,
    "llava": read_llava,
    "erniekit": read_erniekit,
    "prompt_completion": read_prompt_completion,
    "alpaca": read_alpaca,
    "query_response": read_query_response,
}
# Formats whose tools refuse media without a tag.
_NEEDS_TAGS = ("sharegpt", "llava")
_DEFAULT = RowSettings()


# Formats whose readers also take rows that look like another.
_READ_TOO = {"llava": "sharegpt", "query_response": "alpaca"}
# Formats that plain texts in `prompt` and `completion` may have.
_AMBIGUOUS = ("query_response", "prompt_completion")
_SET = "set data.format to what the rows are"


def to_canonical(
    row: Mapping[str, Any], settings: RowSettings = _DEFAULT, *, format: str | None = None
) -> CanonicalRow:
    """The canonical form of a row; whether it has a target is for `check_targets`.

    Args:
        row: JSON types, and for media also bytes and objects in memory.
        format: name from `FORMATS`, which every row of a source has; None recognises the row's own.

    Raises:
        BadSampleError: the row has another format, or a value that is unusable or means something
            that is not supported; says the format, what is wrong and what to do.
        ValueError: there is no such format.
    """
    name = format
    try:
        row = renamed(row, settings) if isinstance(row, Mapping) else row
        name = fitting_format(row, format)
        return canonical_row(_READERS[name](row), settings, name, name in _NEEDS_TAGS)
    except BadSampleError as error:
        read_as = f"a row of format {name}: " if name else ""
        raise BadSampleError(error.kind, read_as + error.reason) from error


def recognised(row: Any) -> str:
    """The format of a row.

    Args:
        row: after the renaming of its columns.

    Raises:
        BadSampleError: no format fits, several do, or it is one that is not trained on here.
    """
    if not isinstance(row, Mapping):
        raise BadSampleError(
            "unsupported",
            f"the row is {brief(row)!r}; an object is needed (a list of rows is packed data of "
            "Qwen's pack_data.py: give the rows one by one, the run packs them)",
        )
    check_preference(row)
    given = {key for key, value in row.items() if value is not None}
    if name := next((key for key in LIST_KEYS if key in given), None):
        return _format_of_list(row, name)
    if {"src", "tgt"} <= given or "text_info" in given:
        return "erniekit"
    if {"prompt", "completion"} <= given:
        lists = [isinstance(row[key], list | tuple) for key in ("prompt", "completion")]
        if any(lists):
            return "prompt_completion"
        raise BadSampleError(
            "ambiguous",
            "'prompt' and 'completion' are plain texts, which TRL continues without a chat "
            "template and ms-swift makes a conversation of: set data.format to query_response for "
            "a conversation, or write the file as a source of documents, {path: ..., format: text}",
        )
    if "instruction" in given and given & {"input", "output"}:
        return "alpaca"
    names = {str(key).lower() for key in given}
    is_question, is_answer = bool(names & {*QUERY_KEYS}), bool(names & {*RESPONSE_KEYS})
    if is_question and is_answer:
        return "query_response"
    if "text" in given:
        raise BadSampleError(
            "corpus",
            "the row has a 'text' and no question: it is a document, which is pretrained on; write "
            "the file as a source of documents, {path: ..., format: text}",
        )
    lacking = "a question and no answer" if is_question else "no 'messages'"
    raise BadSampleError(
        "missing_key",
        f"the record has {lacking}; its keys are {sorted(map(str, row))[:40]}, which fit none of "
        f"the formats {', '.join(FORMATS)}: rename them with data.columns, or {_SET}",
    )


def fitting_format(row: Any, format: str | None) -> str:
    """The format to read a row in.

    Args:
        row: after the renaming of its columns.
        format: name from `FORMATS` that the run or the rows before it have; None recognises it.

    Raises:
        BadSampleError: as `recognised`, or the row has another format.
        ValueError: there is no such format.
    """
    if format is None:
        return recognised(row)
    if format not in FORMATS:
        raise ValueError(f"format is {format!r}; use one of {', '.join(FORMATS)}")
    try:
        found = recognised(row)
    except BadSampleError as error:
        if error.kind != "ambiguous" or format not in _AMBIGUOUS:
            raise
        return format
    if found not in (format, _READ_TOO.get(format)):
        raise BadSampleError(
            "other_format",
            f"the row has the format {found}, and its source the format {format} (by data.format "
            f"or its first row): {_SET}, or put other rows into a source of their own",
        )
    return format


def _format_of_list(row: Mapping[str, Any], name: str) -> str:
    """The format of a row with a list of turns, by its first turn."""
    messages = from_text(row[name], literal=True)
    first = messages[0] if isinstance(messages, list | tuple) and messages else None
    if not isinstance(first, Mapping) or first.get("role") is not None:
        return "messages"
    if first.get("from") is not None:
        has_media = not (is_empty(row.get("image")) and is_empty(row.get("video")))
        return "llava" if has_media else "sharegpt"
    keys = {key for key, value in first.items() if value is not None}
    is_pair = all(keys & {*side} for side in PAIR_KEYS.values())
    return "sharegpt" if is_pair else "messages"
