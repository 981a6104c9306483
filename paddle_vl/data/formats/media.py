"""Images and videos of a row: their sources, the tags in texts, and which takes which.

A tag `<image>` or `<video>`, or a content part without a source, is a place, which takes the next
entry of `images` or `videos`. A source stays what the row gave: a path or an address, a list of
frames, bytes, or an object in memory; a data URI becomes its bytes.
"""

import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paddle_vl.data.formats.canonical import MEDIA, Draft, Part
from paddle_vl.data.formats.keys import SOURCE_KEYS, from_text, is_empty, refuse_unknown
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.media_file import brief
from paddle_vl.data.remote import data_uri_bytes
from paddle_vl.data.worker_pool import warn_once

_LOGGER = logging.getLogger(__name__)
# Of a data URI; a line has far less by default.
_MOST_BYTES = 1 << 26
_TAG = re.compile(r"<(image|video)>")
_REFUSED_TAGS = {
    "<audio>": "which stands for a sound in other formats: audio is not supported",
    **dict.fromkeys(
        ("<bbox>", "<ref-object>"),
        "which ms-swift replaces by an entry of 'objects' and which would be learned literally "
        "here: write the coordinates or the name as text, or give the record 'objects'",
    ),
}
# Keys of a source that is an object.
_SOURCE_KEYS = ("bytes", "path", "url", "detail", "type")
_DETAIL_NOTE = "images have a 'detail', as for OpenAI's models: it has no effect here"


def split_tags(text: str, where: str, has_objects: bool = False) -> list[Part]:
    """The texts of a string with tags, and a place for each tag.

    Args:
        has_objects: whether the row has entries for the tags of boxes and names.

    Raises:
        BadSampleError: a tag that nothing would replace.
    """
    for tag, why in _REFUSED_TAGS.items():
        if tag in text and (tag == "<audio>" or not has_objects):
            raise BadSampleError("unsupported", f"{where} has the tag {tag}, {why}")
    pieces = enumerate(_TAG.split(text))
    return [{"type": piece} if i % 2 else {"type": "text", "text": piece} for i, piece in pieces]


def media_part(part: Mapping[str, Any], kind: str, where: str) -> Part:
    """An image or a video of a content part; a place if it has no source.

    Raises:
        BadSampleError: an unusable source, or two.
    """
    found = [_read(part[key], kind) for key in SOURCE_KEYS[kind] if part.get(key) is not None]
    if any(other is not found[0] and not _same(other, found[0]) for other in found[1:]):
        raise BadSampleError(
            "ambiguous", f"{where} has a part of type {kind} with several sources: keep one of them"
        )
    return {"type": kind, kind: found[0]} if found else {"type": kind}


def fill_places(drafts: Sequence[Draft], row: Mapping[str, Any], needs_tags: bool) -> None:
    """Give every place its source from the lists of the row.

    If there are sources and no places at all, all come before the first text of a user, videos
    before images, as ms-swift and TRL put them.

    Args:
        needs_tags: the format has no such default.

    Raises:
        BadSampleError: an unusable source, or another number of sources than of places.
    """
    listed = {kind: _listed(row, kind) for kind in MEDIA}
    users = [draft for draft in drafts if draft.role == "user"]
    if users and not needs_tags and not any(_media_of(drafts)):
        users[0].parts[:0] = [{"type": kind} for kind in reversed(MEDIA) for _ in listed[kind]]
    for kind, sources in listed.items():
        places = [part for part in _media_of(drafts) if part["type"] == kind and kind not in part]
        if len(places) != len(sources):
            raise BadSampleError(
                "tag_count",
                f"{len(places)} {kind} place(s) (<{kind}> tags, or {kind} parts without a source) "
                f"but {len(sources)} entries in '{kind}s'; they are matched in order and must be "
                "equal in number",
            )
        for place, source in zip(places, sources, strict=True):
            place[kind] = source


def _media_of(drafts: Sequence[Draft]) -> Iterator[Part]:
    return (part for draft in drafts for part in draft.parts if part["type"] in MEDIA)


def _listed(row: Mapping[str, Any], kind: str) -> list[Any]:
    """The sources of `images` or `image`, of `videos` or `video`."""
    names = [name for name in (f"{kind}s", kind) if not is_empty(row.get(name))]
    if len(names) == 2 and not _same(*(row[name] for name in names)):
        raise BadSampleError(
            "ambiguous", f"the record has '{kind}s' and {kind!r}: keep one of them"
        )
    given = row[names[0]] if names else []
    # A table's cell is text.
    given = from_text(given) if isinstance(given, str) and given.startswith(("[", "{")) else given
    if isinstance(given, str | bytes | Mapping | os.PathLike):
        given = [given]
    if not isinstance(given, list | tuple):
        raise BadSampleError(
            "missing_key", f"'{kind}s' must be a list of {kind}s; it is {brief(given)}"
        )
    return [_read(each, kind) for each in given]


def _read(value: Any, kind: str) -> Any:
    """A source in one of the forms that the module's docstring names."""
    where = f"{kind} source"
    if isinstance(value, Mapping):
        value = _unwrapped(value)
    if kind == "video" and isinstance(value, list | tuple) and value:
        return [_read(frame, "image") for frame in value]
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    is_nothing = is_empty(value) or (isinstance(value, bytes) and not value)
    if is_nothing or isinstance(value, int | float | list | tuple | Mapping):
        others = " or an image's bytes are" if kind == "image" else " or a list of frames is"
        raise BadSampleError(
            "missing_key", f"{where} {brief(value)!r} is not a path; a file name{others} needed"
        )
    if not isinstance(value, str):
        return value
    if not value.startswith("data:"):
        return value.removeprefix("file://")
    return data_uri_bytes(value, _MOST_BYTES)


def _unwrapped(value: Mapping[str, Any]) -> Any:
    """The source in an object: of HF (`bytes`, `path`), OpenAI (`url`) or Anthropic (`data`)."""
    if value.get("type") == "base64":
        return f"data:{value.get('media_type')};base64,{value.get('data')}"
    if unknown := [key for key in value if key not in _SOURCE_KEYS and value[key] is not None]:
        refuse_unknown(unknown[0], "a source", _SOURCE_KEYS)
    if value.get("detail") is not None:
        warn_once(_LOGGER, "detail", _DETAIL_NOTE)
    return value.get("bytes") or value.get("path") or value.get("url")


def _same(first: Any, second: Any) -> bool:
    """Whether two sources are the same text, bytes or list; objects in memory never are."""
    plain = (str, bytes, list, tuple, Mapping)
    if not (isinstance(first, plain) and isinstance(second, plain)):
        return False
    return first == second or first == [second] or [first] == second
