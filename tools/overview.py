"""The picture at the top of the README, as SVG: what goes into the package and what comes out.

`tools/draw_architecture.py` writes it into docs/images/overview.svg.
"""

from html import escape
from typing import NamedTuple

_WIDTH, _HEIGHT = 960, 420
_LINE = 19


class Box(NamedTuple):
    """A box: its corner and size in pixels, its title, and the lines below."""

    x: int
    y: int
    width: int
    height: int
    fill: str
    title: str
    lines: tuple[str, ...]


_DATA, _MODEL, _RUN, _OUT = "#e7f0fe", "#fff3d6", "#e3f5e7", "#f3e8fb"
_BOXES = (
    Box(20, 60, 250, 120, _DATA, "Your data",
        ("conversations, images, videos", "text, captions, pages", "robot demonstrations")),
    Box(20, 240, 250, 120, _MODEL, "A model",
        ("Qwen3-VL, in HF's files", "pi07, in OpenTau's files", "or random weights")),
    Box(355, 60, 250, 300, _RUN, "paddle-vl train run.yaml",
        ("fine-tuning, LoRA,", "pretraining, policies", "", "one device, or many ranks:",
         "data, tensor, sequence,", "pipeline, expert parallel", "and sharding", "",
         "stops and resumes to the bit")),
    Box(690, 60, 250, 120, _OUT, "A checkpoint and a report",
        ("the same files,", "for HF and OpenTau too", "metrics and plots")),
    Box(690, 240, 250, 120, _OUT, "Use it",
        ("evaluate, generate, act", "export: static programs", "and ONNX")),
)  # fmt: skip
# From and to, x and y; every arrow is straight.
_ARROWS = (
    (270, 120, 355, 120),
    (270, 300, 355, 300),
    (605, 120, 690, 120),
    (815, 180, 815, 240),
)


def overview() -> str:
    """The picture as the text of an SVG file."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" font-family="Helvetica, Arial, DejaVu Sans, '
        'sans-serif" font-size="14">',
        "<title>What paddle-vl reads, does and writes</title>",
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="10" refY="5" markerWidth="9" '
        'markerHeight="9" orient="auto"><path d="M0 0 L10 5 L0 10 z" fill="#444"/></marker></defs>',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_WIDTH // 2}" y="34" text-anchor="middle" font-size="17" font-weight="bold">'
        "paddle-vl: vision-language models and robot policies on PaddlePaddle</text>",
    ]
    for x, y, to_x, to_y in _ARROWS:
        parts.append(
            f'<line x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" stroke="#444" stroke-width="2" '
            'marker-end="url(#tip)"/>'
        )
    for box in _BOXES:
        parts += _drawn(box)
    note = "Every output and gradient equals the original's, on one rank or many."
    parts.append(f'<text x="{_WIDTH // 2}" y="396" text-anchor="middle" fill="#444">{note}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _drawn(box: Box) -> list[str]:
    middle = box.x + box.width // 2
    parts = [
        f'<rect x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" rx="8" '
        f'fill="{box.fill}" stroke="#444"/>',
        f'<text x="{middle}" y="{box.y + 30}" text-anchor="middle" font-weight="bold" '
        f'font-size="15">{escape(box.title)}</text>',
    ]
    for number, line in enumerate(box.lines):
        y = box.y + 58 + number * _LINE
        parts.append(f'<text x="{middle}" y="{y}" text-anchor="middle">{escape(line)}</text>')
    return parts
