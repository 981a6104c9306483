"""Samples as a model sees them, on one HTML page and in a terminal.

The text that carries the loss is coloured, and boxes of the text are drawn on the pictures.
"""

from collections.abc import Iterable, Sequence
from html import escape

import numpy as np
from PIL import Image

from paddle_vl.data.formats.grounding import Box
from paddle_vl.data.shown_sample import ShownSample
from paddle_vl.report.html import document, picture

# Boxes and points are in thousandths of the picture's width and height.
_SCALE = 1000
# Numbers of a box; more are the corners of a spotted line.
_OF_BOX = 4
_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
article { border-top: 1px solid #ccc; padding: 1rem 0; }
h2 { font-size: 1rem; } .note { color: #555; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f6f6f6; padding: .8rem; }
mark { background: #c9f0d0; color: inherit; }
figure { display: inline-block; margin: 0 .8rem .8rem 0; position: relative; }
figure img { display: block; max-width: 28rem; }
figure svg { position: absolute; inset: 0; width: 100%; height: 100%; }
rect, circle, polygon { fill: none; stroke: #d4145a; stroke-width: 2; }
rect, circle, polygon { vector-effect: non-scaling-stroke; }
text { fill: #d4145a; font-size: 36px; }
@media (prefers-color-scheme: dark) {
  body { background: #16181c; color: #ddd; } pre { background: #22252b; }
  mark { background: #14532d; } .note { color: #aaa; }
}
"""


def as_text(sample: ShownSample, colours: bool) -> str:
    """The sample for a terminal; without colours the text with loss stands between [[ and ]]."""
    before, after = (_GREEN, _PLAIN) if colours else ("[[", "]]")
    shown = (f"{before}{run.text}{after}" if run.is_learned else run.text for run in sample.runs)
    return f"{sample.place}: {sample.summary}\n{''.join(shown)}\n"


def page(samples: Iterable[ShownSample], title: str) -> str:
    """An HTML page without scripts and references to other files."""
    note = "<mark>marked text</mark> carries the loss"
    body = f'<p class="note">Samples as the model sees them: {note}.</p>\n'
    return document(title, _STYLE, body + "".join(map(_article, samples)))


def _article(sample: ShownSample) -> str:
    text = "".join(
        f"<mark>{escape(run.text)}</mark>" if run.is_learned else escape(run.text)
        for run in sample.runs
    )
    boxes = sample.boxes if len(sample.pictures) == 1 else ()
    figures = "".join(_figure(picture, boxes) for picture in sample.pictures)
    return (
        f'<article>\n<h2>{escape(sample.place)}</h2>\n<p class="note">{escape(sample.summary)}</p>'
        f"\n{figures}\n<pre>{text}</pre>\n</article>\n"
    )


def _figure(picture_HWC: np.ndarray, boxes: Sequence[Box]) -> str:
    shapes = "".join(map(_shape, boxes))
    box = f'viewBox="0 0 {_SCALE} {_SCALE}" preserveAspectRatio="none"'
    drawing = f"<svg {box}>{shapes}</svg>" if shapes else ""
    return f"<figure>{picture(Image.fromarray(picture_HWC))}{drawing}</figure>\n"


def _shape(box: Box) -> str:
    x, y, *rest = box.corners
    name = f'<text x="{x:g}" y="{max(y - 8, 30):g}">{escape(box.label or "")}</text>'
    if not rest:
        return f'<circle cx="{x:g}" cy="{y:g}" r="8"/>{name}'
    if len(box.corners) > _OF_BOX:
        points = " ".join(f"{each:g}" for each in box.corners)
        return f'<polygon points="{points}"/>{name}'
    width, height = rest[0] - x, rest[1] - y
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"/>{name}'
