"""Which format a row has, from its keys."""

from collections.abc import Mapping
from typing import Any

from paddle_vl.data.formats.keys import LIST_KEYS, check_preference, is_empty
from paddle_vl.data.formats.text_values import from_text
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.media_file import brief

FORMATS = (
    "messages", "sharegpt", "llava", "erniekit", "prompt_completion", "alpaca", "query_response",
)  # fmt: skip
# Names of a question and of an answer (ms-swift), compared without case.
QUERY_KEYS = ("query", "prompt", "input", "instruction", "question", "problem")
RESPONSE_KEYS = (
    "response", "answer", "output", "targets", "target", "answer_key", "answers", "solution",
    "text", "completion", "content",
)  # fmt: skip
# Keys of the two sides of a pair in a list of turns.
PAIR_KEYS = {"user": ("human", "user"), "assistant": ("assistant", "gpt", "bot")}
# Formats whose readers also take rows that look like another.
_READ_TOO = {"llava": "sharegpt", "query_response": "alpaca"}
# Formats that plain texts in `prompt` and `completion` may have.
_AMBIGUOUS = ("query_response", "prompt_completion")
_SET = "set data.format to what the rows are"


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
