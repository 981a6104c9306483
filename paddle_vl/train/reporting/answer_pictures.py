"""Pictures of generated answers: the image of a question, with the boxes of both answers."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from PIL import Image, ImageDraw

from paddle_vl.data.formats.grounding import boxes_in
from paddle_vl.data.media_file import load_rgb

_LONGEST_SIDE = 256
# Boxes are in thousandths of the image's sides.
_UNIT = 1000
_COLOURS = {"expected": "#2f9e44", "answer": "#d4145a"}
T = TypeVar("T")


def evenly(entries: Sequence[T], most: int) -> Sequence[T]:
    """At most so many of the entries, evenly chosen."""
    return entries[:: max(1, -(-len(entries) // most))]


def caption(line: Mapping[str, Any]) -> str:
    """A line of predictions.jsonl as text."""
    return "\n".join(f"{key}: {line[key]}" for key in ("prompt", "expected", "answer"))


def drawn(source: str, line: Mapping[str, Any]) -> Image.Image:
    """A small copy of an image; if it is the only one of a line of predictions.jsonl, with the
    boxes of the expected answer (green) and of the generated one.

    Raises:
        ValueError: the image cannot be read.
    """
    image = load_rgb(source)
    image.thumbnail((_LONGEST_SIDE, _LONGEST_SIDE))
    pen = ImageDraw.Draw(image)
    for key, colour in _COLOURS.items() if len(line["images"]) == 1 else ():
        for box in boxes_in(str(line[key])):
            sides = image.size * (len(box.corners) // 2)
            places = [c / _UNIT * side for c, side in zip(box.corners, sides, strict=True)]
            if len(places) == 2:
                pen.circle(places, 4, outline=colour, width=2)
            else:
                (left, right), (top, bottom) = sorted(places[::2]), sorted(places[1::2])
                pen.rectangle((left, top, right, bottom), outline=colour, width=2)
    return image
