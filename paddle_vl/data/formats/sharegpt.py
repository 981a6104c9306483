"""Rows of `conversations` with `from` and `value`: ShareGPT (LLaMA-Factory, ms-swift) and LLaVA.

    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]}

ShareGPT has roles of tools and alternates; its turns may also be pairs, `{"human", "assistant"}`.
LLaVA (and Qwen's finetune script) has `image` or `video`, and loses white space around the texts of
a question.
"""

from collections.abc import Mapping
from typing import Any

from paddle_vl.data.formats.canonical import MEDIA, split_tags
from paddle_vl.data.formats.keys import PAIR_KEYS, is_empty, read_messages
from paddle_vl.data.formats.tool_calls import ANSWER_ROLES, CALL_ROLES
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.media_file import brief

_ROLES = {
    "system": "system",
    **{name: role for role, names in PAIR_KEYS.items() for name in names},
    **dict.fromkeys(ANSWER_ROLES, "tool"),
    **dict.fromkeys(CALL_ROLES, "tool_call"),
}
_LLAVA_ROLES = {"human": "user", "gpt": "assistant"}


def read_sharegpt(row: dict[str, Any]) -> dict[str, Any]:
    """A ShareGPT row as one of `messages`.

    Args:
        row: without null values.

    Raises:
        BadSampleError: an unknown role, or roles that do not alternate.
    """
    row = read_messages(row)
    turns = [turn for message in row["messages"] for turn in _of_pair(message)]
    messages = [_message(turn, number, _ROLES) for number, turn in enumerate(turns, start=1)]
    _check_order([message["role"] for message in messages])
    return {**row, "messages": messages}


def read_llava(row: dict[str, Any]) -> dict[str, Any]:
    """A LLaVA row as one of `messages`.

    Args:
        row: without null values.

    Raises:
        BadSampleError: another role than human and gpt.
    """
    row = read_messages(row)
    messages = []
    for number, turn in enumerate(row["messages"], start=1):
        message = _message(turn, number, _LLAVA_ROLES)
        if message["role"] == "user" and isinstance(message.get("content"), str):
            has_objects = not is_empty(row.get("objects"))
            parts = split_tags(message["content"], f"message {number}", has_objects)
            message["content"] = [
                part if part["type"] in MEDIA else {**part, "text": part["text"].strip()}
                for part in parts
            ]
        messages.append(message)
    return {**row, "messages": messages}


def _of_pair(message: Any) -> list[Any]:
    """The two turns of a pair; any other message alone."""
    if not isinstance(message, Mapping) or not is_empty(message.get("from")):
        return [message]
    names = [key for key in message if not is_empty(message[key])]
    sides = [[name for name in names if name in side] for side in PAIR_KEYS.values()]
    if len(names) == 2 and all(len(side) == 1 for side in sides):
        return [{"from": name, "value": message[name]} for (name,) in sides]
    return [message]


def _message(turn: Any, number: int, roles: Mapping[str, str]) -> dict[str, Any]:
    if not isinstance(turn, Mapping):
        raise BadSampleError(
            "missing_key",
            f"message {number} is a {type(turn).__name__}; a JSON object is needed",
        )
    name = turn.get("from")
    if not isinstance(name, str) or name not in roles:
        what = f"has the role {brief(name)!r}" if name is not None else "has no 'from'"
        raise BadSampleError(
            "unknown_role", f"message {number} {what}; use 'from' with one of {', '.join(roles)}"
        )
    rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
    if clash := [key for key in ("role", "content") if not is_empty(rest.pop(key, None))]:
        reason = f"message {number} has {', '.join(clash)} beside 'from' and 'value'"
        raise BadSampleError("ambiguous", f"{reason}: keep one of the spellings")
    return {"role": roles[name], "content": turn.get("value"), **rest}


def _check_order(roles: list[str]) -> None:
    """Raise a BadSampleError unless questions and answers alternate, as in LLaMA-Factory."""
    first = 1 if roles[0] == "system" else 0
    sides = (("user", "tool"), ("assistant", "tool_call"))
    for place, role in enumerate(roles[first:]):
        if role not in sides[place % 2]:
            raise BadSampleError(
                "bad_order",
                f"message {first + place + 1} has the role {role} where one of "
                f"{', '.join(sides[place % 2])} is needed: after the system message questions and "
                "answers alternate (parallel calls are one list in one message)",
            )
    if not roles[first:] or (len(roles) - first) % 2:
        raise BadSampleError(
            "no_target", "the conversation does not end with an answer: add it, or leave the last "
            "question out"
        )  # fmt: skip
