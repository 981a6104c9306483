"""Pictures of generated answers: the image of a question, with the boxes of both answers."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from PIL import Image, ImageDraw

from paddle_vl.data.formats.grounding import boxes_in
from paddle_vl.data.media_file import load_rgb

_LONGEST_SIDE = 256
# Boxes are in thousandths of the image's sides; points are drawn as circles, in pixels.
_UNIT, _RADIUS = 1000, 4
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
            # Clipped: drawing far outside takes long.
            x, y = (
                sorted(min(max(each, 0), _UNIT) / _UNIT * side for each in box.corners[axis::2])
                for axis, side in enumerate(image.size)
            )
            if len(x) == 1:
                around = (x[0] - _RADIUS, y[0] - _RADIUS, x[0] + _RADIUS, y[0] + _RADIUS)
                pen.ellipse(around, outline=colour, width=2)
            else:
                pen.rectangle((x[0], y[0], x[1], y[1]), outline=colour, width=2)
    return image
