"""Spotted lines of text, as PaddleOCR-VL writes them from 1.5 on.

    Total<|LOC_102|><|LOC_40|><|LOC_310|><|LOC_40|><|LOC_310|><|LOC_88|><|LOC_102|><|LOC_88|>

One line of text each, and behind it x and y of its four corners, clockwise from the top left, in
thousandths of the image's width and height.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

from paddle_vl.data.formats.grounding import Box

UNITS = 1000
_NUMBERS = 8
_TOKEN = re.compile(r"<\|LOC_(-?\d+)\|>")
_TAIL = re.compile(rf"((?:{_TOKEN.pattern})+)\s*$")


class Spot(NamedTuple):
    """A line of text and x and y of its four corners, in thousandths of the image."""

    text: str
    corners: tuple[int, ...]


def read_spotting(answer: str, *, is_strict: bool = True) -> list[Spot]:
    """The lines of an answer.

    Args:
        is_strict: False takes the first corners of a line that has four, and no line without.

    Raises:
        ValueError: strict, and a line has no text, another number of location tokens behind it
            than eight, one outside of 0 to 1000, or there is no line.
    """
    lines = answer.strip().split("\n") if answer.strip() else []
    spots = [_spot(line, number, is_strict) for number, line in enumerate(lines, start=1)]
    if is_strict and not spots:
        raise ValueError("it has no line of text with its four corners")
    return [spot for spot in spots if spot is not None]


def write_spotting(spots: Iterable[Spot]) -> str:
    """The answer with these lines."""
    return "\n".join(
        text + "".join(f"<|LOC_{value}|>" for value in corners) for text, corners in spots
    )


def spotted_boxes(answer: str) -> list[Box]:
    """The corners of the lines of an answer, with their texts as names; none of another answer."""
    return [Box(spot.corners, spot.text) for spot in read_spotting(answer, is_strict=False)]


def _spot(line: str, number: int, is_strict: bool) -> Spot | None:
    tail = _TAIL.search(line)
    text = line[: tail.start()] if tail else line
    values = tuple(map(int, _TOKEN.findall(tail[1]))) if tail else ()
    if is_strict:
        total = len(_TOKEN.findall(line))
        if len(values) != _NUMBERS or total != _NUMBERS:
            raise ValueError(
                f"line {number} has {total} location tokens, {len(values)} of them behind its "
                f"text; {_NUMBERS} are needed, x and y of four corners, and one line for each text"
            )
        if outside := [value for value in values if not 0 <= value <= UNITS]:
            raise ValueError(
                f"line {number} has <|LOC_{outside[0]}|>, outside of the image: coordinates are "
                f"thousandths of its width and height, 0 to {UNITS}"
            )
        if not text.strip():
            raise ValueError(f"line {number} has no text in front of its location tokens")
    return Spot(text.strip(), values[:_NUMBERS]) if len(values) >= _NUMBERS else None
