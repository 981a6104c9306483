"""Rows of prompts, whose answers a model samples and rewards score.

| by | keys |
| --- | --- |
| ms-swift | `messages`, `solution`; an answer behind them is left out |
| TRL | `prompt`, messages or a text, and `images` |
| verl, EasyR1 | `prompt` or `problem`, and `reward_model.ground_truth` or `answer` |

All further keys are columns of the row, for rewards. A plain text is one user's message.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from paddle_vl.data.formats.canonical import Conversation
from paddle_vl.data.formats.dialects import Messages, read_messages, read_sharegpt, role_of
from paddle_vl.data.formats.keys import (
    LIST_KEYS,
    QUERY_KEYS,
    ROW_KEYS,
    RowSettings,
    from_text,
    is_empty,
    list_of,
    renamed,
    wrong,
)
from paddle_vl.data.formats.reader import to_canonical
from paddle_vl.data.jsonl import BadSampleError

# Keys of right answers, the first that a row has, and of objects that hold one.
_RIGHT = ("solution", "ground_truth", "answer", "answers", "references")
_HOLDERS = ("reward_model",)
_ASKED = ("user", "tool", "tool_response", "observation")


class PromptRow(NamedTuple):
    """A prompt in the canonical form.

    Attributes:
        columns: the row's other values.
        references: right answers, of the columns.
        answer: the text that the row ends with, where it does.
    """

    prompt: Conversation
    columns: dict[str, Any]
    references: list[str]
    answer: str | None


def to_prompt(row: Mapping[str, Any], settings: RowSettings) -> PromptRow:
    """The prompt of a row; its keys tell its form.

    Raises:
        BadSampleError: no form fits, or nobody is asked at its end.
    """
    if not isinstance(row, Mapping):
        raise wrong("the row", row, "an object is needed", "unsupported")
    given = {key: value for key, value in renamed(row, settings).items() if not is_empty(value)}
    messages, used = _messages_of(given)
    of_prompt = {key: given[key] for key in ROW_KEYS if key in given and key != "label"}
    columns = {key: given[key] for key in given if key not in {*used, *of_prompt}}
    end = len(messages)
    while end and role_of(messages[end - 1]) == "assistant":
        end -= 1
    if not end or role_of(messages[end - 1]) not in _ASKED:
        needed = "one of the user or of a tool is needed, which is answered"
        last = role_of(messages[end - 1]) if end else "missing"
        raise wrong("the role of the last message of the prompt", last, needed, "bad_order")
    # What the answers of other formats are read with too; the answer itself is taken off again.
    plain = replace(settings, columns={}, only_columns=False, tags={}, mask_history=False)
    made = {"prompt": messages[:end], "completion": [{"role": "assistant", "content": "?"}]}
    found = to_canonical({**of_prompt, **made}, plain, format="prompt_completion")
    prompt = found.with_messages(found.messages[:-1])
    answer = None
    if end < len(messages):
        content = messages[end].get("content")
        answer = content if isinstance(content, str) else ""
    return PromptRow(prompt, columns, references_of(columns), answer)


def references_of(columns: Mapping[str, Any]) -> list[str]:
    """The right answers that a row gives."""
    held = [from_text(columns.get(key)) for key in _HOLDERS]
    for values in (columns, *(each for each in held if isinstance(each, Mapping))):
        for key in _RIGHT:
            value = values.get(key)
            if is_empty(value):
                continue
            several = value if isinstance(value, list | tuple) else [value]
            if all(isinstance(each, str | int | float) for each in several):
                return [str(each) for each in several]
    return []


def _messages_of(row: Mapping[str, Any]) -> tuple[Messages, tuple[str, ...]]:
    """The messages of a row, and the keys that were read."""
    if name := next((key for key in LIST_KEYS if key in row), None):
        messages = list_of(row[name], name)
        if messages and isinstance(messages[0], Mapping) and "from" in messages[0]:
            asks = messages[-1].get("from") in ("human", "user")
            messages = [*messages, {"from": "gpt", "value": "?"}] if asks else messages
            found = read_sharegpt({"conversations": messages})["messages"]
            return found[:-1] if asks else found, LIST_KEYS
        return read_messages({name: messages})["messages"], LIST_KEYS
    keys = [key for key in QUERY_KEYS if key in row]
    if len(keys) != 1:
        what = f"{' and '.join(keys)} beside each other" if keys else "no 'messages' or 'prompt'"
        raise BadSampleError(
            "ambiguous" if keys else "missing_key",
            f"a row of a prompt has {what}; its keys are {sorted(map(str, row))[:40]}: name the "
            "prompt with data.columns",
        )
    value = row[keys[0]]
    if isinstance(value, str) and not value.lstrip().startswith("[{"):
        return [{"role": "user", "content": value}], (keys[0],)
    return list_of(value, keys[0]), (keys[0],)
