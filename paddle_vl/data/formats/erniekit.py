"""Rows of ERNIEKit and PaddleFormers: `src` and `tgt`, or `text_info` with images and videos.

    {"src": ["Where?"], "tgt": ["Here."], "label": [1]}

    {"text_info": [{"text": "Which colour?", "tag": "mask"}, {"text": "Grey.", "tag": "no_mask"}],
     "image_info": [{"image_url": "a.png", "matched_text_index": 0}]}

`mask` is the user's, `no_mask` the assistant's. An image stands before its text, or where `order`
puts it, and is the user's.
"""

from collections.abc import Mapping
from typing import Any

from paddle_vl.data.formats.canonical import MEDIA
from paddle_vl.data.formats.keys import from_text, is_empty, refuse_unknown
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.media_file import brief

_OF_TEXTS = ("src", "tgt", "is_system")
_OF_PARTS = ("text_info", "image_info", "video_info", "order", "is_system")
_TEXT_KEYS = ("text", "tag", "tool_calls", "tool_response")
_MEDIUM_KEYS = ("image_url", "matched_text_index")
_ROLES = {"mask": "user", "no_mask": "assistant"}


def read_erniekit(row: dict[str, Any]) -> dict[str, Any]:
    """The row as one of `messages`.

    Args:
        row: without null values.

    Raises:
        BadSampleError: texts of different number, blank texts, an unknown tag, or places that are
            not there.
    """
    messages, read = (_parts(row), _OF_PARTS) if "text_info" in row else (_texts(row), _OF_TEXTS)
    rest = {key: value for key, value in row.items() if key not in read}
    if row.get("is_system") and isinstance(row.get("label"), list):
        # The answer beside the system text is thrown away, with its label.
        rest["label"] = row["label"][1:]
    return {**rest, "messages": messages}


def _texts(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    columns = [[row[key]] if isinstance(row[key], str) else row[key] for key in ("src", "tgt")]
    if not all(isinstance(column, list | tuple) and column for column in columns):
        raise BadSampleError(
            "missing_key", "'src' and 'tgt' must each be a text or a list of texts"
        )
    lengths = [len(column) for column in columns]
    if lengths[0] != lengths[1]:
        raise BadSampleError(
            "bad_order", f"'src' has {lengths[0]} texts and 'tgt' has {lengths[1]}: give one each"
        )
    for key, column in zip(("src", "tgt"), columns, strict=True):
        for number, text in enumerate(column, start=1):
            if not isinstance(text, str) or not text.strip():
                reason = f"text {number} of {key!r} is {brief(text)!r}: write it, or leave it out"
                raise BadSampleError("empty_answer", reason)
    messages = [
        {"role": role, "content": text}
        for pair in zip(*columns, strict=True)
        for role, text in zip(_ROLES.values(), pair, strict=True)
    ]
    if (is_system := row.get("is_system", 0)) not in (0, 1):
        raise BadSampleError("ambiguous", f"'is_system' is {brief(is_system)!r}; 0 or 1 is needed")
    return [{**messages[0], "role": "system"}, *messages[2:]] if is_system else messages


def _parts(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    if row.get("is_system"):
        raise BadSampleError(
            "ambiguous",
            "'is_system' with 'text_info' has no effect in PaddleFormers, against its "
            "documentation: write the system text as 'system', and remove its two texts",
        )
    listed = {"text": _objects(row, "text_info", _TEXT_KEYS)}
    listed |= {kind: _objects(row, f"{kind}_info", _MEDIUM_KEYS) for kind in MEDIA}
    messages: list[dict[str, Any]] = []
    open_tag = None
    for kind, index in _order(row, listed):
        item = listed[kind][index]
        if kind == "text":
            message = _message(item, f"text {index} of 'text_info'")
        else:
            part = {"type": kind, kind: item.get("image_url")}
            message = {"role": "user", "content": [part]}
        is_plain = message.keys() == {"role", "content"} and message["role"] != "tool"
        if is_plain and open_tag == message["role"]:
            messages[-1]["content"] += message["content"]
        else:
            messages.append(message)
        open_tag = message["role"] if is_plain else None
    return messages


def _objects(row: Mapping[str, Any], key: str, known: tuple[str, ...]) -> list[dict[str, Any]]:
    items = row.get(key, [])
    if not isinstance(items, list | tuple) or not all(isinstance(each, Mapping) for each in items):
        raise BadSampleError(
            "missing_key", f"{key!r} must be a list of objects; it is {brief(items)}"
        )
    found = [{name: each[name] for name in each if each[name] is not None} for each in items]
    for number, each in enumerate(found):
        for name in each.keys() - {*known}:
            refuse_unknown(name, f"object {number} of {key!r}", known)
    return found


def _message(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    text, tag = item.get("text", ""), item.get("tag")
    if not isinstance(text, str) or tag not in (*_ROLES,):
        raise BadSampleError(
            "unknown_role",
            f"{where} is {brief(dict(item))}; a string 'text' and the 'tag' mask (user) or no_mask "
            "(assistant) are needed",
        )
    message: dict[str, Any] = {"role": _ROLES[tag], "content": [{"type": "text", "text": text}]}
    is_answer, calls = bool(item.get("tool_response")), item.get("tool_calls")
    if (is_answer and tag != "mask") or (not is_empty(calls) and tag != "no_mask"):
        raise BadSampleError(
            "bad_tool_call",
            f"{where} has the tag {tag}: 'tool_response' needs mask, and 'tool_calls' no_mask",
        )
    if is_answer:
        message["role"] = "tool"
    if not is_empty(calls):
        message["tool_calls"] = calls
    return message


def _order(row: Mapping[str, Any], listed: Mapping[str, list[Any]]) -> list[tuple[str, int]]:
    """Kind and number of every text, image and video in reading order."""
    every = {(kind, index) for kind, items in listed.items() for index in range(len(items))}
    order = from_text(row.get("order"))
    if is_empty(order):
        if all(listed[kind] for kind in MEDIA):
            reason = "the record has images and videos but no 'order', so their places are a guess"
            raise BadSampleError("ambiguous", f"{reason}: add it")
        before = [(_place(item, len(listed["text"])), kind, index)
                  for kind in MEDIA for index, item in enumerate(listed[kind])]  # fmt: skip
        texts = [(index, "text", index) for index in range(len(listed["text"]))]
        # Media come before the text of their place, in the order of their list.
        found = sorted(before + texts, key=lambda each: (each[0], each[1] == "text"))
        return [(kind, index) for _, kind, index in found]
    given = [order.get(key) if isinstance(order, Mapping) else None for key in ("type", "index")]
    columns = [each for each in given if isinstance(each, list | tuple) and len(each) == len(every)]
    pairs = [*zip(*columns, strict=True)] if len(columns) == 2 else []
    if not all(isinstance(kind, str) and type(index) is int for kind, index in pairs) or (
        {*pairs} != every
    ):
        raise BadSampleError(
            "bad_order",
            f"'order' is {brief(order)}; it must name each of the {len(every)} texts, images and "
            "videos once, as {'type': [...], 'index': [...]}",
        )
    return pairs


def _place(item: Mapping[str, Any], num_texts: int) -> int:
    place = item.get("matched_text_index")
    if isinstance(place, bool) or not isinstance(place, int) or not 0 <= place < num_texts:
        raise BadSampleError(
            "bad_order",
            f"'matched_text_index' is {brief(place)!r}; the number of one of the {num_texts} "
            "text(s) of 'text_info', from 0, is needed",
        )
    return place
