"""Rows of preference training: pairs of answers, and single answers with a rating.

| by | keys |
| --- | --- |
| TRL | `prompt`, `chosen`, `rejected`; or whole conversations in `chosen` and `rejected`; `completion` with `label` |
| ms-swift | `messages` with `rejected_response`, `rejected_messages` or `rejected_images`; with `label` |
| LLaMA-Factory | `instruction`, `input`, `chosen`, `rejected`; `conversations`, `chosen`, `rejected`; `kto_tag` |
| PaddleFormers | `messages`, `chosen_response`, `rejected_response` |
| ERNIEKit | `src`, `tgt`, two answers in `response`, `sort`: the larger is chosen |

Each becomes one or two rows of a prompt and a completion, which are read as rows of fine-tuning
are, so that all of their rules hold. Plain texts are one user's message and one answer.
"""  # noqa: E501

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from paddle_vl.data.formats.canonical import CanonicalRow, check_targets
from paddle_vl.data.formats.instruction import read_alpaca
from paddle_vl.data.formats.keys import (
    LIST_KEYS,
    RowSettings,
    is_empty,
    list_of,
    read_messages,
    renamed,
)
from paddle_vl.data.formats.reader import to_canonical
from paddle_vl.data.formats.sharegpt import read_sharegpt
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.media_file import brief

_MEDIA = ("images", "image", "videos", "video", "tools")
_RATINGS = ("label", "kto_tag")
_SWIFT = ("rejected_response", "rejected_messages", *(f"rejected_{key}" for key in _MEDIA))
# An empty text in one of these is an empty answer; elsewhere it asks for nothing.
_ANSWERS = ("chosen", "rejected", "chosen_response", "rejected_response", "completion")
_ERNIEKIT = ("src", "tgt", "response", "sort")
Messages = list[Any]


class _Branch(NamedTuple):
    """A prompt, a completion, and keys of the row that are this branch's own."""

    prompt: Messages
    completion: Messages
    own: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class PreferenceRow:
    """A pair of rows in the canonical form, in which the completion alone is learned, or one.

    Attributes:
        rejected: None of a rated answer.
        is_chosen: whether the answer is wanted.
    """

    chosen: CanonicalRow
    rejected: CanonicalRow | None
    is_chosen: bool


def to_preference(row: Mapping[str, Any], settings: RowSettings) -> PreferenceRow:
    """The answers of a row; its keys tell its form.

    Raises:
        BadSampleError: no form fits, a branch is no row of fine-tuning, both are equal, or an
            answer is empty.
    """
    if not isinstance(row, Mapping):
        raise BadSampleError("unsupported", f"the row is {brief(row)!r}; an object is needed")
    given = {
        key: value
        for key, value in renamed(row, settings).items()
        if not is_empty(value) or key in _ANSWERS
    }
    form, read = _form_of(given)
    try:
        branches, used = read(given)
        rest = {key: value for key, value in given.items() if key not in used}
        plain = replace(settings, columns={}, only_columns=False, tags={}, mask_history=False)
        rows = [_canonical(branch, rest, plain) for branch in branches]
    except BadSampleError as error:
        raise BadSampleError(error.kind, f"a row of {form}: {error.reason}") from error
    if len(rows) == 2 and rows[0].messages == rows[1].messages:
        raise BadSampleError(
            "equal_answers",
            "the chosen and the rejected answer are equal, from which nothing can be learned: "
            "leave the row out",
        )
    is_chosen = len(rows) == 2 or _rating(given)
    return PreferenceRow(rows[0], rows[1] if len(rows) == 2 else None, is_chosen)


_Read = Callable[[dict[str, Any]], tuple[list[_Branch], tuple[str, ...]]]


def _form_of(row: Mapping[str, Any]) -> tuple[str, _Read]:
    if "chosen_response" in row or {"response", "sort"} <= row.keys():
        return ("PaddleFormers", _paddle) if "chosen_response" in row else ("ERNIEKit", _erniekit)
    if "chosen" in row and "rejected" in row:
        has_list = any(key in row for key in LIST_KEYS)
        return ("LLaMA-Factory", _llama) if has_list or "instruction" in row else ("TRL", _trl)
    if any(key in row for key in _SWIFT):
        return "ms-swift", _swift
    if any(isinstance(row.get(key), bool | int | float) for key in _RATINGS):
        return "rated answers", _rated
    raise BadSampleError(
        "no_preference",
        f"the row compares no answers; its keys are {sorted(map(str, row))[:40]}: it needs "
        "'chosen' and 'rejected', 'rejected_response' or 'rejected_images' beside 'messages', "
        "'chosen_response' and 'rejected_response', 'response' and 'sort', or for rated answers "
        "'label' or 'kto_tag' (true or false); rename them with data.columns",
    )


def _canonical(branch: _Branch, rest: Mapping[str, Any], settings: RowSettings) -> CanonicalRow:
    roles = [each.get("role") if isinstance(each, Mapping) else None for each in branch.prompt]
    if not branch.completion:
        reason = "an answer is empty: write it, or leave the row out"
        raise BadSampleError("empty_answer", reason)
    if not roles or roles[-1] not in ("user", "tool", "tool_response", "observation"):
        last = brief(roles[-1]) if roles else "missing"
        raise BadSampleError(
            "bad_order",
            f"the last message of the prompt is of role {last!r}; one of the user or of a tool is "
            "needed, which the answers are to",
        )
    row = {**rest, **branch.own, "prompt": branch.prompt, "completion": branch.completion}
    found = to_canonical(row, settings, format="prompt_completion")
    check_targets(found)
    return found


def _messages(value: Any, role: str, key: str) -> Messages:
    """A list of messages, or a plain text as one of a role."""
    if isinstance(value, str) and not value.lstrip().startswith("["):
        return [{"role": role, "content": value}]
    if isinstance(value, Mapping):
        return [value]
    return list_of(value, key)


def _trl(row: dict[str, Any]) -> tuple[list[_Branch], tuple[str, ...]]:
    sides = [_messages(row[key], "assistant", key) for key in ("chosen", "rejected")]
    if "prompt" in row:
        prompt = _messages(row["prompt"], "user", "prompt")
        return [_Branch(prompt, side) for side in sides], ("prompt", "chosen", "rejected")
    number = 0
    for one, other in zip(*sides, strict=False):
        if one != other:
            break
        number += 1
    # Equal answers have no message of their own; they are refused as such.
    number = min(number, *(len(side) - 1 for side in sides))
    branches = [_Branch(side[:number], side[number:]) for side in sides]
    return branches, ("chosen", "rejected")


def _swift(row: dict[str, Any]) -> tuple[list[_Branch], tuple[str, ...]]:
    prompt, completion = _split(read_messages({k: row[k] for k in LIST_KEYS if k in row}))
    own = {key: row[key] for key in _MEDIA if key in row}
    theirs = {key.removeprefix("rejected_"): row[key] for key in _SWIFT if key in row}
    if "messages" in theirs and "response" in theirs:
        reason = "has 'rejected_response' and 'rejected_messages': keep one of them"
        raise BadSampleError("ambiguous", reason)
    response, messages = theirs.pop("response", None), theirs.pop("messages", None)
    if messages is not None:
        rejected = _split({"messages": list_of(messages, "rejected_messages")})
        other = _Branch(*rejected, theirs)
    else:
        same = completion
        if response is not None:
            same = _messages(response, "assistant", "rejected_response")
        other = _Branch(prompt, same, {**own, **theirs})
    return [_Branch(prompt, completion, own), other], (*LIST_KEYS, *_SWIFT, *_MEDIA)


def _split(row: Mapping[str, Any]) -> tuple[Messages, Messages]:
    """The messages up to the last one of a user, and those behind it."""
    messages = row["messages"]
    users = [
        number
        for number, each in enumerate(messages)
        if isinstance(each, Mapping) and each.get("role") == "user"
    ]
    number = users[-1] + 1 if users else 0
    return messages[:number], messages[number:]


def _llama(row: dict[str, Any]) -> tuple[list[_Branch], tuple[str, ...]]:
    if "instruction" in row:
        branches = []
        for key in ("chosen", "rejected"):
            alpaca = {k: row[k] for k in ("instruction", "input", "history") if k in row}
            messages = read_alpaca({**alpaca, "output": row[key]})["messages"]
            branches.append(_Branch(messages[:-1], messages[-1:]))
        return branches, ("instruction", "input", "history", "chosen", "rejected")
    prompt = list_of(next(row[key] for key in LIST_KEYS if key in row), "conversations")
    branches = []
    for key in ("chosen", "rejected"):
        text = isinstance(row[key], str)
        answer = {"from": "gpt", "value": row[key]} if text else row[key]
        answer = answer if isinstance(answer, list) else [answer]
        messages = read_sharegpt({"conversations": [*prompt, *answer]})["messages"]
        branches.append(_Branch(messages[: len(prompt)], messages[len(prompt) :]))
    return branches, (*LIST_KEYS, "chosen", "rejected")


def _paddle(row: dict[str, Any]) -> tuple[list[_Branch], tuple[str, ...]]:
    keys = ("chosen_response", "rejected_response")
    if missing := [key for key in keys if key not in row]:
        raise BadSampleError("missing_key", f"{missing[0]!r} is missing: add the answer")
    prompt = read_messages({k: row[k] for k in LIST_KEYS if k in row})["messages"]
    branches = [_Branch(prompt, _messages(row[key], "assistant", key)) for key in keys]
    return branches, (*LIST_KEYS, *keys)


def _erniekit(row: dict[str, Any]) -> tuple[list[_Branch], tuple[str, ...]]:
    asked, answered, answers, sort = (_values(row, key) for key in _ERNIEKIT)
    if len(asked) != len(answered) + 1 or len(answers) != 2 or len(sort) != 2:
        raise BadSampleError(
            "bad_order",
            f"'src' has {len(asked)} texts, 'tgt' {len(answered)}, 'response' {len(answers)} and "
            f"'sort' {len(sort)}; one text of 'tgt' less than of 'src', two answers and two "
            "numbers are needed",
        )
    if sort[0] == sort[1]:
        reason = f"'sort' is {sort}, so that no answer is better: leave the row out"
        raise BadSampleError("equal_answers", reason)
    prompt = [
        {"role": role, "content": text}
        for pair in zip(asked, [*answered, None], strict=True)
        for role, text in zip(("user", "assistant"), pair, strict=True)
        if text is not None
    ]
    if row.get("is_system"):
        prompt = [{**prompt[0], "role": "system"}, *prompt[2:]]
    texts = [text[0] if isinstance(text, list) and len(text) == 1 else text for text in answers]
    if wrong := [text for text in texts if not isinstance(text, str)]:
        reason = f"an answer of 'response' is {brief(wrong[0])}; one text is needed"
        raise BadSampleError("unsupported", reason)
    best = int(sort[1] > sort[0])
    branches = [
        _Branch(prompt, [{"role": "assistant", "content": texts[number]}] if texts[number] else [])
        for number in (best, 1 - best)
    ]
    return branches, (*_ERNIEKIT, "is_system")


def _values(row: Mapping[str, Any], key: str) -> list[Any]:
    """The texts or numbers of a key; a single text as a list of it."""
    value = row.get(key, [])
    values = [value] if isinstance(value, str) else value
    kind = int | float if key == "sort" else str | list
    if not isinstance(values, list) or not all(isinstance(each, kind) for each in values):
        reason = f"{key!r} is {brief(value)}; a list of {'numbers' if key == 'sort' else 'texts'}"
        raise BadSampleError("unsupported", f"{reason} is needed")
    return values


def _rated(row: dict[str, Any]) -> tuple[list[_Branch], tuple[str, ...]]:
    used = ("prompt", "completion", "instruction", "input", "output", "history", *LIST_KEYS)
    used = (*used, *_RATINGS)
    if "completion" in row:
        prompt = _messages(row.get("prompt", []), "user", "prompt")
        return [_Branch(prompt, _messages(row["completion"], "assistant", "completion"))], used
    if "instruction" in row:
        alpaca = {k: v for k, v in row.items() if k in used and k not in _RATINGS}
        messages = read_alpaca(alpaca)["messages"]
        return [_Branch(messages[:-1], messages[-1:])], used
    own = {key: row[key] for key in LIST_KEYS if key in row}
    read = read_sharegpt if _has_from(own) else read_messages
    return [_Branch(*_split(read(own)))], used


def _has_from(row: Mapping[str, Any]) -> bool:
    return any(
        isinstance(each, Mapping) and "from" in each
        for value in row.values()
        for each in (value if isinstance(value, list) else ())
    )


def _rating(row: Mapping[str, Any]) -> bool:
    given = [row[key] for key in _RATINGS if key in row]
    if len({*map(bool, given)}) != 1 or given[0] not in (0, 1):
        raise BadSampleError(
            "bad_target", f"the rating is {brief(given)}; one of true and false is needed"
        )
    return bool(given[0])
