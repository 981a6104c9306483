"""Chat messages to turns: roles, text, and which image or video stands where.

Two spellings are read, the JSONL format of PaddleFormers and ms-swift and the message lists of HF:

    {"messages": [{"role": "user", "content": "<image>What is this?"},
                  {"role": "assistant", "content": "A cat."}], "images": ["cat.png"]}

    {"messages": [{"role": "user", "content": [{"type": "image", "image": "cat.png"},
                                               {"type": "text", "text": "What is this?"}]}, ...]}

In the first, `<image>` and `<video>` tags take the entries of `images` and `videos` in order. In
the second, text is literal (no tags), and a part without a source of its own takes the next entry.
`record_keys` says which other entries are honoured and which refused.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from paddle_vl.data.bad_sample import BadSampleError
from paddle_vl.data.line_index import parse_object
from paddle_vl.data.media_path import MediaFolder
from paddle_vl.data.video_reader import VideoFrames
from paddle_vl.families.qwen3_vl.inputs.record_keys import (
    RECORD_KEYS,
    check_box_tags,
    check_message_keys,
    check_record_keys,
    is_target,
    listed_targets,
    refuse_unknown,
    role_remedy,
)
from paddle_vl.families.qwen3_vl.inputs.turns import Conversation, ImagePart, Part, Turn, VideoPart

ROLES = ("system", "user", "assistant")

_TAG = re.compile(r"<(image|video)>")
# Keys of a part that hold its source; HF and OpenAI spell it in these ways.
_SOURCE_KEYS = {
    "image": ("image", "path", "url", "image_url"),
    "video": ("video", "path", "url"),
}
_PART_KEYS = {kind: ("type", *keys) for kind, keys in _SOURCE_KEYS.items()} | {
    "text": ("type", "text")
}


_PART_TYPES = {"image": ImagePart, "video": VideoPart}
# What other readers of messages set for one image or video. Left out silently, another size or
# number of frames would be trained on than its author meant.
_SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width")
_PART_SETTINGS = {
    "image": _SIZES,
    "video": (
        "fps", "nframes", "num_frames", "min_frames", "max_frames", "total_pixels", "video_start",
        "video_end", *_SIZES,
    ),
}  # fmt: skip
_SETTINGS_FOR_ALL = {
    "image": "data.max_pixels or data.min_pixels",
    "video": "data.video_fps, data.video_max_frames or data.video_max_pixels",
}
# Sources that are not file names.
_IN_MEMORY = (Image.Image, np.ndarray, VideoFrames)


def parse_line(line: bytes, directory: Path, allow_outside: bool = True) -> Conversation:
    """Parse one line of a JSONL file.

    Args:
        directory: where relative paths start; the file's own directory.
        allow_outside: whether images and videos may lie elsewhere.

    Raises:
        BadSampleError: naming the fault.
    """
    return parse_record(parse_object(line, "'messages'"), directory, allow_outside)


def parse_record(
    record: Mapping[str, Any], directory: Path | None = None, allow_outside: bool = True
) -> Conversation:
    """Parse a record of messages and media.

    Args:
        record: `messages`, and optionally `images`, `videos`, `system` and `label`; sources may
            also be PIL images, arrays or `VideoFrames`.
        directory: where relative paths start; None leaves them as they are.
        allow_outside: whether paths may lead out of the directory.

    Raises:
        BadSampleError: a missing or mistyped entry, an unknown role, an entry that nothing here
            renders, a number of tags that differs from the number of images or videos, or a path
            that is none.
    """
    if "messages" not in record:
        raise BadSampleError(
            "missing_key", f"the record has no 'messages'; it has {sorted(record)}"
        )
    messages = record["messages"]
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise BadSampleError("missing_key", "'messages' must be a list with at least one message")
    check_record_keys(record)
    roles = [message.get("role") if isinstance(message, Mapping) else None for message in messages]
    learned = listed_targets(record, roles)
    turns = [
        _parse_message(message, number, target)
        for number, (message, target) in enumerate(zip(messages, learned, strict=True), start=1)
    ]
    turns = _with_system(turns, record.get("system"))
    listed = {kind: _listed(record, kind, turns) for kind in _PART_TYPES}
    folder = MediaFolder(directory, allow_outside)
    filled = [
        replace(turn, parts=tuple(_fill(part, listed, folder) for part in turn.parts))
        for turn in turns
    ]
    extra = {key: value for key, value in record.items() if key not in RECORD_KEYS}
    return Conversation(tuple(filled), extra)


def _with_system(turns: list[Turn], text: Any) -> list[Turn]:
    """The turns with the record's own system message in front."""
    if text is None or text == "":
        return turns
    if not isinstance(text, str):
        raise BadSampleError(
            "missing_key", f"'system' is of type {type(text).__name__}; a text is needed"
        )
    check_box_tags(text, "'system'")
    system = Turn("system", tuple(_split_tags(text)), is_target=False)
    if turns[0].role != "system":
        return [system, *turns]
    if turns[0] != system:
        raise BadSampleError(
            "two_systems",
            "the record has 'system' and another text in its system message: keep one of them",
        )
    return turns


def _listed(record: Mapping[str, Any], kind: str, turns: Sequence[Turn]) -> Iterator[Any]:
    """The entries of `images` or `videos`, as many as there are places for them."""
    sources = record.get(f"{kind}s")
    sources = [] if sources is None else sources
    if isinstance(sources, str) or not isinstance(sources, Sequence):
        raise BadSampleError("missing_key", f"'{kind}s' must be a list of paths")
    places = sum(_is_open(part, kind) for turn in turns for part in turn.parts)
    if places != len(sources):
        raise BadSampleError(
            "tag_count",
            f"{places} {kind} place(s) (<{kind}> tags, or {kind} parts without a source) but "
            f"{len(sources)} entries in '{kind}s'; they are matched in order, so the numbers must "
            "be equal",
        )
    return iter(sources)


def _parse_message(message: Any, number: int, listed: bool | None) -> Turn:
    """A turn whose parts have their own source, or None for the next of `images` or `videos`.

    Args:
        listed: whether the record's `label` says that it is a target.
    """
    where = f"message {number}"
    if not isinstance(message, Mapping):
        raise BadSampleError(
            "missing_key", f"{where} is a {type(message).__name__}; an object is needed"
        )
    check_message_keys(message, where)
    for key in ("role", "content"):
        if message.get(key) is None:
            raise BadSampleError("missing_key", f"{where} has no {key!r}; it has {sorted(message)}")
    role, content = message["role"], message["content"]
    if role not in ROLES:
        raise BadSampleError(
            "unknown_role",
            f"{where} has role {str(role)[:80]!r}; use one of {', '.join(ROLES)}"
            + role_remedy(role),
        )
    if role == "system" and number > 1:
        raise BadSampleError(
            "unknown_role", f"{where} has role 'system', which only the first message may have"
        )
    if isinstance(content, str):
        check_box_tags(content, where)
        parts = tuple(_split_tags(content))
    elif isinstance(content, Sequence):
        parts = tuple(_parse_part(part, where) for part in content)
    else:
        raise BadSampleError(
            "missing_key",
            f"{where} has content of type {type(content).__name__}; text or a list is needed",
        )
    kinds = [_kind(part) for part in parts if not isinstance(part, str)]
    if role == "assistant" and kinds:
        raise BadSampleError(
            "tag_count",
            f"{where} is an assistant's and has a part of kind {kinds[0]} (or an <{kinds[0]}> "
            "tag); the model answers in text only: put it into a user or system message",
        )
    return Turn(role, parts, is_target(message, where, listed))


def _split_tags(content: str) -> Iterator[Part]:
    """Text and places of a tagged string, without empty text."""
    for index, piece in enumerate(_TAG.split(content)):
        if index % 2:
            yield _PART_TYPES[piece](None)
        elif piece:
            yield piece


def _parse_part(part: Any, where: str) -> Part:
    kind = part.get("type") if isinstance(part, Mapping) else None
    kind = "image" if kind == "image_url" else kind
    if kind == "text" and isinstance(part.get("text"), str):
        _check_part_keys(part, kind, where)
        return part["text"]
    if isinstance(kind, str) and kind in _PART_TYPES:
        _check_part_keys(part, kind, where)
        return _PART_TYPES[kind](_own_source(part, kind))
    raise BadSampleError(
        "missing_key",
        f"{where} has the part {str(part)[:80]}; use {{'type': 'text', 'text': ...}}, "
        "{'type': 'image', ...} or {'type': 'video', ...}",
    )


def _check_part_keys(part: Mapping[str, Any], kind: str, where: str) -> None:
    ignored = [key for key in _PART_SETTINGS.get(kind, ()) if part.get(key) is not None]
    if ignored:
        raise BadSampleError(
            "unsupported",
            f"{where} has a {kind} part with {', '.join(ignored)}, which cannot be set for one "
            f"{kind}; set {_SETTINGS_FOR_ALL[kind]} for all",
        )
    for key, value in part.items():
        # Tables that are written as JSON give every part the keys of all others, as null.
        if key not in _PART_KEYS[kind] and value is not None:
            refuse_unknown(key, f"a part of type {kind} of {where}", _PART_KEYS[kind])


def _own_source(part: Mapping[str, Any], kind: str) -> Any:
    return next((part[key] for key in _SOURCE_KEYS[kind] if part.get(key) is not None), None)


def _fill(part: Part, listed: Mapping[str, Iterator[Any]], folder: MediaFolder) -> Part:
    if isinstance(part, str):
        return part
    kind = _kind(part)
    source = next(listed[kind]) if _is_open(part, kind) else part.source
    if isinstance(source, _IN_MEMORY):
        return part._replace(source=source)
    if not isinstance(source, str | os.PathLike) or not os.fspath(source):
        raise BadSampleError(
            "missing_key", f"{kind} source {str(source)[:80]!r} is not a path; write a file name"
        )
    text = os.fspath(source).removeprefix("file://")
    if text.startswith(("http://", "https://", "data:")):
        raise BadSampleError(
            "unsupported",
            f"{kind} {text[:80]!r} is not a file; save it as one and write its path",
        )
    return part._replace(source=folder.path(text, kind))


def _kind(part: ImagePart | VideoPart) -> str:
    return "image" if isinstance(part, ImagePart) else "video"


def _is_open(part: Part, kind: str) -> bool:
    return isinstance(part, _PART_TYPES[kind]) and part.source is None
