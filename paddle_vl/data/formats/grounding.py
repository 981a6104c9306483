"""Boxes and names of `objects` (ms-swift), as Qwen3-VL writes them, and back.

    {"messages": [..., {"role": "assistant", "content": "<ref-object> at <bbox>"}],
     "objects": {"ref": ["sheep"], "bbox": [[90.9, 160.8, 135, 212.8]]}, "images": ["a.png"]}

Tags of names and of boxes take the entries in order, each kind for itself. A box of four numbers
has two corners, one of two is a point. Written coordinates are thousandths of the image's width and
height, whatever it is resized to: `int(round(pixel / size * 1000))`.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from paddle_vl.data.formats.canonical import Message
from paddle_vl.data.formats.keys import (
    BOX_TOKENS,
    RowSettings,
    check_keys,
    from_text,
    is_empty,
    wrong,
)
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.media_file import brief

_KEYS = ("ref", "bbox", "bbox_type", "image_id")
_TYPES = ("real", "norm1")
_NAME_TAG, _BOX_TAG = "<ref-object>", "<bbox>"
_TAG = re.compile(f"{_NAME_TAG}|{_BOX_TAG}")
_UNITS = 1000

_NUMBER = r"\s*(-?\d+(?:\.\d+)?)\s*"
_LIST = rf"\[{_NUMBER},{_NUMBER}(?:,{_NUMBER},{_NUMBER})?\]"
_PAIR = rf"\({_NUMBER},{_NUMBER}\)"
# Decoding an answer takes the markers away.
_MARKED = rf"<\|box_start\|>{_PAIR}(?:,{_PAIR})?<\|box_end\|>|{_PAIR},\s*{_PAIR}"
_NAME = r"(?:<\|object_ref_start\|>(.*?)<\|object_ref_end\|>\s*)?"
_WRITTEN = re.compile(f"{_NAME}(?:{_LIST}|{_MARKED})", re.DOTALL)
_FENCE = re.compile(r"```(?:json)?\s*(.*?)\s*(?:```|$)", re.DOTALL)


class Objects(NamedTuple):
    """What the tags of a row stand for.

    Attributes:
        names: for `<ref-object>`.
        boxes: for `<bbox>`; four numbers, or two of a point.
        is_fraction: whether the numbers are fractions of the image, not pixels.
        images: for each box, the number of its image in the row.
    """

    names: list[str]
    boxes: list[list[float]]
    is_fraction: bool
    images: list[int]


class Box(NamedTuple):
    """A box in a text.

    Attributes:
        corners: x and y of two corners, of a point, or of four corners in order, in pixels.
        label: its name; None without.
    """

    corners: tuple[float, ...]
    label: str | None


def read_objects(value: Any) -> Objects | None:
    """The `objects` of a row, which may be JSON text; None without.

    Raises:
        BadSampleError: an unknown key, a name that is no text, or no box.
    """
    objects = from_text(value)
    if is_empty(objects):
        return None
    if not isinstance(objects, Mapping):
        raise _wrong("'objects'", objects, f"an object of {', '.join(_KEYS)}")
    check_keys(objects, "'objects'", _KEYS)
    given = {key: each for key, each in objects.items() if each is not None}
    names, boxes = (given.get(key, []) for key in ("ref", "bbox"))
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise _wrong("'ref' of 'objects'", names, "a list of texts")
    if not isinstance(boxes, list | tuple):
        raise _wrong("'bbox' of 'objects'", boxes, "a list of boxes")
    if (kind := given.get("bbox_type", "real")) not in _TYPES:
        needed = "'real' (pixels of the image file) or 'norm1' (fractions of 0 to 1)"
        raise _wrong("'bbox_type'", kind, needed)
    images = given.get("image_id") or [0] * len(boxes)
    is_number = isinstance(images, list | tuple) and all(type(each) is int for each in images)
    if not is_number or len(images) != len(boxes):
        raise _wrong("'image_id'", images, "one number for each box, from 0,")
    return Objects(list(names), [_numbers(box) for box in boxes], kind == "norm1", list(images))


def write_boxes(messages: Sequence[Message], objects: Objects, settings: RowSettings) -> None:
    """Put names and boxes in the places of their tags.

    Args:
        messages: in the canonical form; their texts are changed.

    Raises:
        BadSampleError: another number of tags than of entries, or a box without an image or outside
            of its image.
    """
    parts = [part for message in messages for part in message["content"]]
    images = [part["image"] for part in parts if part["type"] == "image"]
    texts = list(_texts(messages))
    for tag, entries, key in ((_NAME_TAG, objects.names, "ref"), (_BOX_TAG, objects.boxes, "bbox")):
        num_tags = sum(holder[name].count(tag) for holder, name in texts)
        if num_tags != len(entries):
            raise BadSampleError(
                "tag_count",
                f"{num_tags} tag(s) {tag} but {len(entries)} entries in {key!r} of 'objects'; they "
                "are matched in order and must be equal in number",
            )
    names = iter(objects.names)
    boxes = iter(
        [_scaled(number, objects, images, settings) for number in range(len(objects.boxes))]
    )

    def written(tag: re.Match[str]) -> str:
        if tag[0] == _BOX_TAG:
            return _spelled(next(boxes), settings)
        start, end = BOX_TOKENS["object_ref"] if settings.boxes == "markers" else ("", "")
        return f"{start}{next(names)}{end}"

    for holder, name in texts:
        holder[name] = _TAG.sub(written, holder[name])


def read_boxes(text: str, size: tuple[int, int]) -> list[Box]:
    """The boxes and points of an answer.

    Args:
        text: JSON, also within a fence of backticks, or other text with boxes in either spelling.
        size: width and height of the image in pixels.

    Raises:
        ValueError: JSON with a box that has another number of numbers than two or four.
    """
    fenced = _FENCE.search(text)
    text = fenced[1] if fenced else text
    value = from_text(text.strip())
    entries = [value] if isinstance(value, Mapping) else value
    if isinstance(entries, list) and entries and all(isinstance(each, Mapping) for each in entries):
        found = [(each.get("bbox_2d", each.get("point_2d")), each.get("label")) for each in entries]
        try:
            return [_in_pixels(_numbers(box), label, size) for box, label in found]
        except BadSampleError as error:
            raise ValueError(f"the text {brief(text)!r} has no boxes: {error.reason}") from error
    return [
        _in_pixels([float(number) for number in match.groups()[1:] if number], match[1], size)
        for match in _WRITTEN.finditer(text)
    ]


def boxes_in(answer: str) -> list[Box]:
    """Boxes and points of an answer, in thousandths; none if it is no such answer."""
    try:
        found = read_boxes(answer, (_UNITS, _UNITS))
    except (ValueError, OverflowError):
        return []
    # A model may write digits without end.
    return [box for box in found if all(map(math.isfinite, box.corners))]


def _texts(messages: Sequence[Message]) -> Iterator[tuple[Any, str]]:
    """Objects with a text, and its key in each, in reading order."""
    for message in messages:
        if "reasoning_content" in message:
            yield message, "reasoning_content"
        yield from ((part, "text") for part in message.get("content", ()) if part["type"] == "text")


def _numbers(box: Any) -> list[float]:
    numbers = list(box) if isinstance(box, list | tuple) else []
    is_finite = all(type(each) in (int, float) and math.isfinite(each) for each in numbers)
    if len(numbers) not in (2, 4) or not is_finite:
        reason = f"a box is {brief(box)}; four numbers (two corners) or two (a point) are needed"
        raise _bad_box(reason)
    return numbers


def _scaled(
    number: int, objects: Objects, images: Sequence[Any], settings: RowSettings
) -> list[int]:
    """The coordinates of a box in thousandths of its image."""
    box, image = objects.boxes[number], objects.images[number]
    if not 0 <= image < len(images):
        raise _bad_box(
            f"box {number + 1} is in image {image} (from 0) of {len(images)}: correct 'image_id', "
            "or add the image"
        )
    if objects.is_fraction:
        size = (1, 1)
    elif settings.image_size is None:
        raise _bad_box("boxes in pixels need the sizes of images: give RowSettings.image_size")
    else:
        size = settings.image_size(images[image])
    exact = [value / size[place % 2] * _UNITS for place, value in enumerate(box)]
    if not settings.clip_boxes and not all(-0.5 <= value <= _UNITS + 0.5 for value in exact):
        raise _bad_box(
            f"box {number + 1} {brief(box)} is outside of its image of {size[0]} x {size[1]}: "
            "correct it, or set data.clip_boxes to true"
        )
    x, y = (sorted(min(max(round(each), 0), _UNITS) for each in exact[axis::2]) for axis in (0, 1))
    return [each for corner in zip(x, y, strict=True) for each in corner]


def _spelled(box: Sequence[int], settings: RowSettings) -> str:
    if settings.boxes == "json":
        return str(list(box))
    start, end = BOX_TOKENS["box"]
    corners = zip(box[::2], box[1::2], strict=True)
    return start + ",".join(f"({x},{y})" for x, y in corners) + end


def _in_pixels(box: Sequence[float], label: str | None, size: tuple[int, int]) -> Box:
    return Box(tuple(value / _UNITS * size[place % 2] for place, value in enumerate(box)), label)


def _wrong(what: str, value: Any, needed: str) -> BadSampleError:
    return wrong(what, value, f"{needed} is needed", "bad_box")


def _bad_box(reason: str) -> BadSampleError:
    return BadSampleError("bad_box", reason)
