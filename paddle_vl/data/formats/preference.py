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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import Any, NamedTuple

from paddle_vl.data.formats.canonical import Conversation
from paddle_vl.data.formats.dialects import (
    Messages,
    read_alpaca,
    read_messages,
    read_sharegpt,
    role_of,
    turns_of,
)
from paddle_vl.data.formats.keys import LIST_KEYS, RowSettings, is_empty, list_of, renamed, wrong
from paddle_vl.data.formats.reader import to_canonical
from paddle_vl.data.jsonl import BadSampleError

_MEDIA = ("images", "image", "videos", "video", "tools")
_RATINGS = ("label", "kto_tag")
_SWIFT = ("rejected_response", "rejected_messages", *(f"rejected_{key}" for key in _MEDIA))
# An empty text in one of these is an empty answer; elsewhere it asks for nothing.
_ANSWERS = ("chosen", "rejected", "chosen_response", "rejected_response", "completion")
_SIDES = ("chosen", "rejected")
_ALPACA = ("instruction", "input", "history")
_ERNIEKIT = ("src", "tgt", "response", "sort")


class _Branch(NamedTuple):
    """A prompt, a completion, and keys of the row that are this branch's own."""

    prompt: Messages
    completion: Messages
    own: Mapping[str, Any] = {}


@dataclass(frozen=True)
class PreferenceRow:
    """A pair of rows in the canonical form, in which the completion alone is learned, or one.

    Attributes:
        rejected: None of a rated answer.
        is_chosen: whether the answer is wanted.
    """

    chosen: Conversation
    rejected: Conversation | None
    is_chosen: bool


def to_preference(row: Mapping[str, Any], settings: RowSettings) -> PreferenceRow:
    """The answers of a row; its keys tell its form.

    Raises:
        BadSampleError: no form fits, a branch is no row of fine-tuning, both are equal, or an
            answer is empty.
    """
    if not isinstance(row, Mapping):
        raise wrong("the row", row, "an object is needed", "unsupported")
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


def _form_of(row: Mapping[str, Any]) -> tuple[str, "_Read"]:
    keys, has_list = row.keys(), any(key in row for key in LIST_KEYS)
    is_rated = any(isinstance(row.get(key), bool | int | float) for key in _RATINGS)
    is_pair, is_llama = {*_SIDES} <= keys, has_list or "instruction" in row
    forms = (
        ("PaddleFormers", _paddle, "chosen_response" in row),
        ("ERNIEKit", _erniekit, {"response", "sort"} <= keys),
        ("LLaMA-Factory", _llama, is_pair and is_llama),
        ("TRL", _trl, is_pair),
        ("ms-swift", _swift, bool(keys & {*_SWIFT})),
        ("rated answers", _rated, is_rated),
    )
    for name, read, fits in forms:
        if fits:
            return name, read
    raise BadSampleError(
        "no_preference",
        f"the row compares no answers; its keys are {sorted(map(str, row))[:40]}: it needs "
        "'chosen' and 'rejected', 'rejected_response' or 'rejected_images' beside 'messages', "
        "'chosen_response' and 'rejected_response', 'response' and 'sort', or for rated answers "
        "'label' or 'kto_tag' (true or false); rename them with data.columns",
    )


def _canonical(branch: _Branch, rest: Mapping[str, Any], settings: RowSettings) -> Conversation:
    roles = [*map(role_of, branch.prompt)]
    if not branch.completion:
        reason = "an answer is empty: write it, or leave the row out"
        raise BadSampleError("empty_answer", reason)
    if not roles or roles[-1] not in ("user", "tool", "tool_response", "observation"):
        needed = "one of the user or of a tool is needed, which the answers are to"
        last = roles[-1] if roles else "missing"
        raise wrong("the role of the last message of the prompt", last, needed, "bad_order")
    row = {**rest, **branch.own, "prompt": branch.prompt, "completion": branch.completion}
    found = to_canonical(row, settings, format="prompt_completion")
    found.check_targets()
    return found


# The branches of a row, and the keys that were read.
_Found = tuple[list[_Branch], Sequence[str]]
_Read = Callable[[dict[str, Any]], _Found]


def _messages(value: Any, role: str, key: str) -> Messages:
    """A list of messages, or a plain text as one of a role."""
    if isinstance(value, str) and not value.lstrip().startswith("["):
        return [{"role": role, "content": value}]
    if isinstance(value, Mapping):
        return [value]
    return list_of(value, key)


def _listed(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: row[key] for key in LIST_KEYS if key in row}


def _split(messages: Messages, own: Mapping[str, Any] = {}) -> _Branch:
    """The messages up to the last one of a user, and those behind it."""
    users = [number for number, each in enumerate(messages, 1) if role_of(each) == "user"]
    number = users[-1] if users else 0
    return _Branch(messages[:number], messages[number:], own)


def _last(messages: Messages) -> _Branch:
    return _Branch(messages[:-1], messages[-1:])


def _trl(row: dict[str, Any]) -> _Found:
    sides = [_messages(row[key], "assistant", key) for key in _SIDES]
    if "prompt" in row:
        prompt = _messages(row["prompt"], "user", "prompt")
        return [_Branch(prompt, side) for side in sides], ("prompt", *_SIDES)
    same = [one == other for one, other in zip(*sides, strict=False)]
    number = (*same, False).index(False)
    # Equal answers have no message of their own; they are refused as such.
    number = min(number, *(len(side) - 1 for side in sides))
    return [_Branch(side[:number], side[number:]) for side in sides], _SIDES


def _swift(row: dict[str, Any]) -> _Found:
    own = {key: row[key] for key in _MEDIA if key in row}
    chosen = _split(read_messages(_listed(row))["messages"], own)
    theirs = {key.removeprefix("rejected_"): row[key] for key in _SWIFT if key in row}
    if "messages" in theirs and "response" in theirs:
        reason = "has 'rejected_response' and 'rejected_messages': keep one of them"
        raise BadSampleError("ambiguous", reason)
    response, messages = theirs.pop("response", None), theirs.pop("messages", None)
    if messages is not None:
        other = _split(list_of(messages, "rejected_messages"), theirs)
    else:
        other = chosen._replace(own={**own, **theirs})
        if response is not None:
            answer = _messages(response, "assistant", "rejected_response")
            other = other._replace(completion=answer)
    return [chosen, other], (*LIST_KEYS, *_SWIFT, *_MEDIA)


def _llama(row: dict[str, Any]) -> _Found:
    branches = []
    if "instruction" in row:
        asked = {key: row[key] for key in _ALPACA if key in row}
        for key in _SIDES:
            branches.append(_last(read_alpaca({**asked, "output": row[key]})["messages"]))
        return branches, (*_ALPACA, *_SIDES)
    prompt = list_of(next(iter(_listed(row).values())), "conversations")
    for key in _SIDES:
        text = isinstance(row[key], str)
        answer = {"from": "gpt", "value": row[key]} if text else row[key]
        answer = answer if isinstance(answer, list) else [answer]
        messages = read_sharegpt({"conversations": [*prompt, *answer]})["messages"]
        branches.append(_Branch(messages[: len(prompt)], messages[len(prompt) :]))
    return branches, (*LIST_KEYS, *_SIDES)


def _paddle(row: dict[str, Any]) -> _Found:
    keys = ("chosen_response", "rejected_response")
    if missing := [key for key in keys if key not in row]:
        raise BadSampleError("missing_key", f"{missing[0]!r} is missing: add the answer")
    prompt = read_messages(_listed(row))["messages"]
    branches = [_Branch(prompt, _messages(row[key], "assistant", key)) for key in keys]
    return branches, (*LIST_KEYS, *keys)


def _erniekit(row: dict[str, Any]) -> _Found:
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
    prompt = turns_of([*chain.from_iterable(zip_longest(asked, answered))][:-1])
    if row.get("is_system"):
        prompt = [{**prompt[0], "role": "system"}, *prompt[2:]]
    texts = [text[0] if isinstance(text, list) and len(text) == 1 else text for text in answers]
    if several := [text for text in texts if not isinstance(text, str)]:
        raise wrong("an answer of 'response'", several[0], "one text is needed", "unsupported")
    ranked = sorted((0, 1), key=lambda number: -sort[number])
    answers = [[{"role": "assistant", "content": texts[n]}] if texts[n] else [] for n in ranked]
    return [_Branch(prompt, answer) for answer in answers], (*_ERNIEKIT, "is_system")


def _values(row: Mapping[str, Any], key: str) -> list[Any]:
    """The texts or numbers of a key; a single text as a list of it."""
    value = row.get(key, [])
    values = [value] if isinstance(value, str) else value
    kind, what = (int | float, "numbers") if key == "sort" else (str | list, "texts")
    if not isinstance(values, list) or not all(isinstance(each, kind) for each in values):
        raise wrong(repr(key), value, f"a list of {what} is needed", "unsupported")
    return values


def _rated(row: dict[str, Any]) -> _Found:
    used = (*_ALPACA, "output", "prompt", "completion", *LIST_KEYS, *_RATINGS)
    if "completion" in row:
        prompt = _messages(row.get("prompt", []), "user", "prompt")
        return [_Branch(prompt, _messages(row["completion"], "assistant", "completion"))], used
    if "instruction" in row:
        alpaca = {key: row[key] for key in (*_ALPACA, "output") if key in row}
        return [_last(read_alpaca(alpaca)["messages"])], used
    own = _listed(row)
    turns = [each for value in own.values() if isinstance(value, list) for each in value]
    has_from = any(isinstance(each, Mapping) and "from" in each for each in turns)
    return [_split((read_sharegpt if has_from else read_messages)(own)["messages"])], used


def _rating(row: Mapping[str, Any]) -> bool:
    given = [row[key] for key in _RATINGS if key in row]
    if len({*map(bool, given)}) != 1 or given[0] not in (0, 1):
        raise wrong("the rating", given, "one of true and false is needed", "bad_target")
    return bool(given[0])
