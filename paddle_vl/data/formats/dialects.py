"""The formats of rows, as a table: what tells each from the keys of a row, and how the row becomes
one of `messages`. All rows take the same way from there.

    messages           {"messages": [{"role": "user", "content": "Hi"}, ...]}, also `conversations`
    sharegpt           {"conversations": [{"from": "human", "value": "Hi"}, ...]} of LLaMA-Factory
                       and ms-swift, with roles of tools; or pairs, {"human": ..., "assistant": ...}
    llava              the same with `image` or `video` (also of Qwen's finetune script), which
                       loses white space around the texts of a question
    erniekit           {"src": ["Where?"], "tgt": ["Here."], "label": [1]}, or of PaddleFormers
                       {"text_info": [{"text": "Hue?", "tag": "mask"}, {"text": "Grey.",
                       "tag": "no_mask"}], "image_info": [{"image_url": "a.png",
                       "matched_text_index": 0}]}: `mask` is the user's; an image stands before its
                       text, or where `order` puts it, and is the user's
    prompt_completion  {"prompt": [...], "completion": [...]} of TRL, messages of which the
                       completion is learned
    alpaca             {"instruction": "Translate.", "input": "sea", "output": "Meer"}, `history`
    query_response     {"query": "Where?", "response": "Here."} of ms-swift, and other names
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import chain, cycle
from typing import Any, NamedTuple

from paddle_vl.data.formats.canonical import MEDIA, split_tags
from paddle_vl.data.formats.keys import (
    LIST_KEYS,
    QUERY_KEYS,
    RESPONSE_KEYS,
    ROW_KEYS,
    TARGET_KEYS,
    check_keys,
    check_preference,
    from_text,
    is_empty,
    list_of,
    wrong,
)
from paddle_vl.data.formats.tool_calls import ANSWER_ROLES, CALL_ROLES
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.media_file import brief

Row = dict[str, Any]
Messages = list[Any]
_SET = "set data.format to what the rows are"
# Keys of the two sides of a pair in a list of turns.
_PAIR_KEYS = {"user": ("human", "user"), "assistant": ("assistant", "gpt", "bot")}
_SHAREGPT_ROLES = {
    "system": "system",
    **{name: role for role, names in _PAIR_KEYS.items() for name in names},
    **dict.fromkeys(ANSWER_ROLES, "tool"),
    **dict.fromkeys(CALL_ROLES, "tool_call"),
}
_LLAVA_ROLES = {"human": "user", "gpt": "assistant"}
_TAGS = {"mask": "user", "no_mask": "assistant"}
_TEXT_KEYS = ("text", "tag", "tool_calls", "tool_response")
_MEDIUM_KEYS = ("image_url", "matched_text_index")


def turns_of(texts: Iterable[Any]) -> Messages:
    """Messages of the user and the assistant in turn."""
    return [
        {"role": role, "content": text}
        for role, text in zip(cycle(("user", "assistant")), texts, strict=False)
    ]


def role_of(message: Any) -> Any:
    """The role of a message as it is written; None without."""
    return message.get("role") if isinstance(message, Mapping) else None


def _without(row: Row, read: Iterable[str], messages: Messages) -> Row:
    """The row with messages in place of the keys that were read."""
    return {"messages": messages} | {key: row[key] for key in row if key not in {*read}}


# Messages, ShareGPT and LLaVA.


def read_messages(row: Row) -> Row:
    """A row whose list of messages has any of its names.

    Raises:
        BadSampleError: there is none, or further turns stand beside it.
    """
    name = next((key for key in LIST_KEYS if key in row), LIST_KEYS[0])
    for key in (*LIST_KEYS, "history", "query", "response"):
        if key != name and not is_empty(row.get(key)):
            reason = f"{key!r} beside {name!r} is not read: write its turns into 'messages'"
            raise BadSampleError("unsupported", f"{reason}, and remove the key")
    return _without(row, LIST_KEYS, list_of(row.get(name), name))


def read_sharegpt(row: Row) -> Row:
    """See the module's table.

    Raises:
        BadSampleError: an unknown role, or roles that do not alternate.
    """
    row = read_messages(row)
    turns = [turn for message in row["messages"] for turn in _of_pair(message)]
    messages = [_message(turn, number, _SHAREGPT_ROLES) for number, turn in enumerate(turns, 1)]
    roles = [message["role"] for message in messages]
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
        reason = "the conversation does not end with an answer: add it, or leave the last question"
        raise BadSampleError("no_target", f"{reason} out")
    return {**row, "messages": messages}


def _read_llava(row: Row) -> Row:
    row, has_objects, messages = read_messages(row), not is_empty(row.get("objects")), []
    for number, turn in enumerate(row["messages"], 1):
        messages.append(message := _message(turn, number, _LLAVA_ROLES))
        if message["role"] == "user" and isinstance(message["content"], str):
            message["content"] = [
                part if part["type"] in MEDIA else {**part, "text": part["text"].strip()}
                for part in split_tags(message["content"], f"message {number}", has_objects)
            ]
    return {**row, "messages": messages}


def _of_pair(message: Any) -> list[Any]:
    """The two turns of a pair; any other message alone."""
    if isinstance(message, Mapping) and is_empty(message.get("from")):
        names = [key for key in message if not is_empty(message[key])]
        sides = [[name for name in names if name in side] for side in _PAIR_KEYS.values()]
        if len(names) == 2 and all(len(side) == 1 for side in sides):
            return [{"from": name, "value": message[name]} for (name,) in sides]
    return [message]


def _message(turn: Any, number: int, roles: Mapping[str, str]) -> dict[str, Any]:
    where = f"message {number}"
    if not isinstance(turn, Mapping):
        reason = f"{where} is a {type(turn).__name__}; a JSON object is needed"
        raise BadSampleError("missing_key", reason)
    name = turn.get("from")
    if not isinstance(name, str) or name not in roles:
        what = f"has the role {brief(name)!r}" if name is not None else "has no 'from'"
        reason = f"{where} {what}; use 'from' with one of {', '.join(roles)}"
        raise BadSampleError("unknown_role", reason)
    rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
    if clash := [key for key in ("role", "content") if not is_empty(rest.pop(key, None))]:
        reason = f"{where} has {', '.join(clash)} beside 'from' and 'value'"
        raise BadSampleError("ambiguous", f"{reason}: keep one of the spellings")
    return {"role": roles[name], "content": turn.get("value"), **rest}


# ERNIEKit and PaddleFormers.


def _read_erniekit(row: Row) -> Row:
    if "text_info" in row:
        read = ("text_info", "image_info", "video_info", "order", "is_system")
        return _without(row, read, _ernie_parts(row))
    found = _without(row, ("src", "tgt", "is_system"), _ernie_texts(row))
    if row.get("is_system") and isinstance(row.get("label"), list):
        # The answer beside the system text is thrown away, with its label.
        found["label"] = row["label"][1:]
    return found


def _ernie_texts(row: Row) -> Messages:
    columns = [[row[key]] if isinstance(row[key], str) else row[key] for key in ("src", "tgt")]
    if not all(isinstance(column, list | tuple) and column for column in columns):
        reason = "'src' and 'tgt' must each be a text or a list of texts"
        raise BadSampleError("missing_key", reason)
    lengths = [len(column) for column in columns]
    if lengths[0] != lengths[1]:
        reason = f"'src' has {lengths[0]} texts and 'tgt' has {lengths[1]}: give one each"
        raise BadSampleError("bad_order", reason)
    for key, column in zip(("src", "tgt"), columns, strict=True):
        for number, text in enumerate(column, start=1):
            if not isinstance(text, str) or not text.strip():
                what = f"text {number} of {key!r}"
                raise wrong(what, text, "write it, or leave it out", "empty_answer")
    messages = turns_of(chain.from_iterable(zip(*columns, strict=True)))
    if (is_system := row.get("is_system", 0)) not in (0, 1):
        raise wrong("'is_system'", is_system, "0 or 1 is needed", "ambiguous")
    return [{**messages[0], "role": "system"}, *messages[2:]] if is_system else messages


def _ernie_parts(row: Row) -> Messages:
    if row.get("is_system"):
        raise BadSampleError(
            "ambiguous",
            "'is_system' with 'text_info' has no effect in PaddleFormers, against its "
            "documentation: write the system text as 'system', and remove its two texts",
        )
    listed = {"text": _objects(row, "text_info", _TEXT_KEYS)}
    listed |= {kind: _objects(row, f"{kind}_info", _MEDIUM_KEYS) for kind in MEDIA}
    messages: Messages = []
    open_tag = None
    for kind, index in _order(row, listed):
        item = listed[kind][index]
        if kind == "text":
            message = _ernie_message(item, f"text {index} of 'text_info'")
        else:
            message = {"role": "user", "content": [{"type": kind, kind: item.get("image_url")}]}
        is_plain = message.keys() == {"role", "content"} and message["role"] != "tool"
        if is_plain and open_tag == message["role"]:
            messages[-1]["content"] += message["content"]
        else:
            messages.append(message)
        open_tag = message["role"] if is_plain else None
    return messages


def _objects(row: Row, key: str, known: tuple[str, ...]) -> list[dict[str, Any]]:
    items = row.get(key, [])
    if not isinstance(items, list | tuple) or not all(isinstance(each, Mapping) for each in items):
        raise wrong(repr(key), items, "a list of objects is needed")
    for number, each in enumerate(items):
        check_keys(each, f"object {number} of {key!r}", known)
    return [{name: each[name] for name in each if each[name] is not None} for each in items]


def _ernie_message(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    text, tag = item.get("text", ""), item.get("tag")
    if not isinstance(text, str) or tag not in (*_TAGS,):
        needed = "a string 'text' and the 'tag' mask (user) or no_mask (assistant) are needed"
        raise wrong(where, dict(item), needed, "unknown_role")
    message: dict[str, Any] = {"role": _TAGS[tag], "content": [{"type": "text", "text": text}]}
    is_answer, calls = bool(item.get("tool_response")), item.get("tool_calls")
    if (is_answer and tag != "mask") or (not is_empty(calls) and tag != "no_mask"):
        reason = f"{where} has the tag {tag}: 'tool_response' needs mask, and 'tool_calls' no_mask"
        raise BadSampleError("bad_tool_call", reason)
    message |= {"role": "tool"} if is_answer else {}
    return message if is_empty(calls) else message | {"tool_calls": calls}


def _order(row: Row, listed: Mapping[str, list[Any]]) -> list[tuple[str, int]]:
    """Kind and number of every text, image and video in reading order."""
    every = {(kind, index) for kind, items in listed.items() for index in range(len(items))}
    order = from_text(row.get("order"))
    if is_empty(order):
        if all(listed[kind] for kind in MEDIA):
            reason = "the record has images and videos but no 'order', so their places are a guess"
            raise BadSampleError("ambiguous", f"{reason}: add it")
        places = {("text", index): index for index in range(len(listed["text"]))}
        for kind in MEDIA:
            for index, item in enumerate(listed[kind]):
                places[kind, index] = _place(item, len(listed["text"]))
        # Media come before the text of their place, in the order of their list.
        return sorted(places, key=lambda each: (places[each], each[0] == "text", each))
    given = [order.get(key) if isinstance(order, Mapping) else None for key in ("type", "index")]
    columns = [each for each in given if isinstance(each, list | tuple) and len(each) == len(every)]
    pairs = [*zip(*columns, strict=True)] if len(columns) == 2 else []
    is_typed = all(isinstance(kind, str) and type(index) is int for kind, index in pairs)
    if not is_typed or {*pairs} != every:
        needed = (
            f"it must name each of the {len(every)} texts, images and videos once, as {{'type': "
            "[...], 'index': [...]}"
        )
        raise wrong("'order'", order, needed, "bad_order")
    return pairs


def _place(item: Mapping[str, Any], num_texts: int) -> int:
    place = item.get("matched_text_index")
    if isinstance(place, bool) or not isinstance(place, int) or not 0 <= place < num_texts:
        needed = f"the number of one of the {num_texts} text(s) of 'text_info', from 0, is needed"
        raise wrong("'matched_text_index'", place, needed, "bad_order")
    return place


# Questions and answers.


def _read_prompt_completion(row: Row) -> Row:
    prompt, completion = (list_of(row.get(key), key) for key in ("prompt", "completion"))
    if {"user", "system"} & {role for role in map(role_of, completion) if isinstance(role, str)}:
        raise BadSampleError(
            "bad_order",
            "the completion has a message of the user or a system message, which would be learned: "
            "move the messages before the answer into the prompt",
        )
    return _without(row, ("prompt", "completion"), [*map(_shown, prompt), *completion])


def _shown(message: Any) -> Any:
    """A message of the prompt, with `loss` false if it is the assistant's."""
    if role_of(message) not in ("assistant", *CALL_ROLES):
        return message
    if any(message.get(key) for key in TARGET_KEYS):
        reason = "a message of the prompt is a training target by its keys"
        raise BadSampleError("bad_target", f"{reason}: move it into the completion")
    return {**message, "loss": False}


def read_alpaca(row: Row) -> Row:
    """See the module's table; `input` stands on a line of its own.

    Raises:
        BadSampleError: a value is missing or no text.
    """
    asked = [_text(row.get(key, ""), key) for key in ("instruction", "input")]
    answer = _text(row.get("output"), "output")
    query = "\n".join(text for text in asked if text)
    return _answered(row, query, answer, ("instruction", "input", "output", "history"))


def _read_query_response(row: Row) -> Row:
    names = (*QUERY_KEYS, *RESPONSE_KEYS, *ROW_KEYS, "history")
    lower: Row = {}
    for key, value in row.items():
        name = key.lower() if isinstance(key, str) and key.lower() in names else key
        if name in lower and lower[name] != value:
            raise BadSampleError("ambiguous", f"the record has {name!r} twice: keep one of them")
        lower[name] = value
    query, response = (_one_of(lower, keys) for keys in (QUERY_KEYS, RESPONSE_KEYS))
    return _answered(lower, query, response, (*QUERY_KEYS, *RESPONSE_KEYS, "history"))


def _one_of(row: Row, keys: tuple[str, ...]) -> str:
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


def _answered(row: Row, query: str, response: str, read: tuple[str, ...]) -> Row:
    if not query:
        raise BadSampleError("missing_key", "the question is empty: write it, or leave the row out")
    given = row.get("history")
    pairs = [] if is_empty(given) else from_text(given, literal=True)
    if not isinstance(pairs, list | tuple) or any(
        not isinstance(pair, list | tuple) or len(pair) != 2 for pair in pairs
    ):
        raise wrong("'history'", pairs, "a list of [question, answer] is needed")
    earlier = [_text(text, "history") for pair in pairs for text in pair]
    return _without(row, read, turns_of([*earlier, query, response]))


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str):
        what = f"is of type {type(value).__name__}" if value is not None else "is missing"
        remedy = " (several answers to choose from are not: keep one)" if key != "history" else ""
        raise BadSampleError("missing_key", f"{key!r} {what}; a string is needed{remedy}")
    return value


class Format(NamedTuple):
    """A format of rows.

    Attributes:
        read: gives a row without null values as one of `messages`; BadSampleError if it cannot.
        needs_tags: whether its tools refuse media without a tag.
        reads_too: a format that its reader takes as well.
    """

    read: Callable[[Row], Row]
    needs_tags: bool = False
    reads_too: str | None = None


FORMATS = {
    "messages": Format(read_messages),
    "sharegpt": Format(read_sharegpt, needs_tags=True),
    "llava": Format(_read_llava, needs_tags=True, reads_too="sharegpt"),
    "erniekit": Format(_read_erniekit),
    "prompt_completion": Format(_read_prompt_completion),
    "alpaca": Format(read_alpaca),
    "query_response": Format(_read_query_response, reads_too="alpaca"),
}


def fitting_format(row: Any, format: str | None) -> str:
    """The format to read a row in.

    Args:
        row: after the renaming of its columns.
        format: name from `FORMATS` that the run or the rows before it have; None recognises it.

    Raises:
        BadSampleError: as `recognised`, or the row has another format.
        ValueError: there is no such format.
    """
    if format not in (None, *FORMATS):
        raise ValueError(f"format is {format!r}; use one of {', '.join(FORMATS)}")
    try:
        found = recognised(row)
    except BadSampleError as error:
        # Plain texts may be rows of two formats.
        if error.kind != "ambiguous" or format not in ("query_response", "prompt_completion"):
            raise
        return format
    if format is not None and found not in (format, FORMATS[format].reads_too):
        raise BadSampleError(
            "other_format",
            f"the row has the format {found}, and its source the format {format} (by data.format "
            f"or its first row): {_SET}, or put other rows into a source of their own",
        )
    return format or found


def recognised(row: Any) -> str:
    """The format of a row.

    Args:
        row: after the renaming of its columns.

    Raises:
        BadSampleError: no format fits, several do, or it is one that is not trained on here.
    """
    if not isinstance(row, Mapping):
        needed = (
            "an object is needed (a list of rows is packed data of Qwen's pack_data.py: give the "
            "rows one by one, the run packs them)"
        )
        raise wrong("the row", row, needed, "unsupported")
    check_preference(row)
    given = {key for key, value in row.items() if value is not None}
    names = {str(key).lower() for key in given}
    is_question, is_answer = bool(names & {*QUERY_KEYS}), bool(names & {*RESPONSE_KEYS})
    if name := next((key for key in LIST_KEYS if key in given), None):
        return _format_of_list(row, name)
    if {"src", "tgt"} <= given or "text_info" in given:
        return "erniekit"
    if {"prompt", "completion"} <= given:
        if any(isinstance(row[key], list | tuple) for key in ("prompt", "completion")):
            return "prompt_completion"
        raise BadSampleError(
            "ambiguous",
            "'prompt' and 'completion' are plain texts, which TRL continues without a chat "
            "template and ms-swift makes a conversation of: set data.format to query_response for "
            "a conversation, or write the file as a source of documents, {path: ..., format: text}",
        )
    if "instruction" in given and given & {"input", "output"}:
        return "alpaca"
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
    return "sharegpt" if all(keys & {*side} for side in _PAIR_KEYS.values()) else "messages"
