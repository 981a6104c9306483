"""Draw the package: its boxes, the path of one batch, and the picture of the README.

    python tools/draw_architecture.py            write them into docs/
    python tools/draw_architecture.py --check    exit with 1 where one of them is not up to date

The files are docs/architecture.md and docs/images/overview.svg. The boxes of `BOXES` are groups of
folders. Arrows are import statements: an arrow from A to B means that a file of A imports one of B;
arrows that follow from others are left out. An import against the order of the boxes is a dotted
arrow. The path comes from `tools/trace_batch.py`; it is that with kernels in C, so
without a C compiler it is neither written nor compared.
"""

import argparse
import ast
import logging
import re
import sys
from html import escape
from pathlib import Path
from typing import NamedTuple

from paddle_vl.nn.cpu import compiled
from trace_batch import passed_files

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "paddle_vl"
PAGE = ROOT / "docs" / "architecture.md"
OVERVIEW = ROOT / "docs" / "images" / "overview.svg"
# The boxes from top to bottom, and the folders of the package in each.
BOXES = {
    "commands and add-ons": "cli doctor export integrations profile report testing",
    "training": "train",
    "model families": "families generation",
    "parallelism": "parallel",
    "data and files": "checkpoint config data files",
    "layers and batches": "batch nn",
}
# The table has each of its folders in a row of its own.
_SPLIT = "families"


def box_of(folder: str) -> str:
    """The box of a folder of the package.

    Raises:
        ValueError: no box names it.
    """
    for box, folders in BOXES.items():
        if folder in folders.split():
            return box
    raise ValueError(f"paddle_vl/{folder} is in no box: add it to BOXES of {Path(__file__).name}")


def folders() -> list[str]:
    """Names of the package's folders."""
    return sorted(file.parent.name for file in PACKAGE.glob("*/__init__.py"))


def imports() -> dict[str, set[str]]:
    """The boxes that each box imports."""
    known = folders()
    found: dict[str, set[str]] = {box: set() for box in BOXES}
    for file in sorted(PACKAGE.glob("*/**/*.py")):
        own = box_of(file.relative_to(PACKAGE).parts[0])
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                top, _, rest = name.partition(".")
                folder = rest.partition(".")[0]
                if top == "paddle_vl" and folder in known:
                    found[own].add(box_of(folder))
        found[own].discard(own)
    return found


def arrows() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """The arrows between boxes: down, without those that a longer way implies; and up."""
    order = list(BOXES)
    graph = imports()
    down = {a: {b for b in graph[a] if order.index(b) > order.index(a)} for a in order}
    reached: dict[str, set[str]] = {}
    for box in reversed(order):
        reached[box] = down[box].union(*(reached[below] for below in down[box]))
    solid = [
        (a, b) for a in order for b in order
        if b in down[a] and not any(b in reached[other] for other in down[a])
    ]  # fmt: skip
    return solid, [(a, b) for a in order for b in order if b in graph[a] - down[a]]


def first_sentence(folder: str) -> str:
    """First sentence of a folder's docstring."""
    text = ast.get_docstring(
        ast.parse((PACKAGE / folder / "__init__.py").read_text(encoding="utf-8"))
    )
    return re.split(r"\n\n|(?<=\.)\s", text or "", maxsplit=1)[0].replace("\n", " ").rstrip(".")


def picture() -> str:
    """The Mermaid graph of the boxes, and a table of their folders."""
    known = folders()
    rows = ["| box | folder | what it is | files |", "| --- | --- | --- | --- |"]
    boxes = []
    for box, names in BOXES.items():
        inside = [name for name in names.split() if name in known]
        label = box
        boxes.append(f'    {_id(box)}["<b>{box}</b><br/>{" ".join(inside)}"]')
        for name in inside:
            nested = sorted(file.parent for file in (PACKAGE / name).glob("*/__init__.py"))
            nested = nested if name == _SPLIT else []
            for folder in (PACKAGE / name, *nested):
                files = [
                    file for file in folder.rglob("*.py")
                    if file.name != "__init__.py"
                    and not (folder.name == _SPLIT and file.parent != folder)
                ]  # fmt: skip
                part = folder.relative_to(PACKAGE).as_posix()
                rows.append(f"| {label} | `{part}` | {first_sentence(part)} | {len(files)} |")
                label = ""
    solid, up = arrows()
    lines = [f"    {_id(a)} --> {_id(b)}" for a, b in solid]
    lines += [f"    {_id(a)} -.-> {_id(b)}" for a, b in up]
    return "\n".join(["```mermaid", "graph TD", *boxes, *lines, "```", "", *rows])


def _id(box: str) -> str:
    return re.sub(r"\W", "_", box)


def path() -> str:
    """Table of the files that a batch passes."""
    lines = ["| | file | where the batch enters it |", "| --- | --- | --- |"]
    for number, (name, function) in enumerate(passed_files().first.items(), 1):
        function = function.replace(".<locals>", "").replace("<listcomp>", "[...]")
        lines.append(f"| {number} | `{name}` | `{function}` |")
    return "\n".join(lines)


_WIDTH, _HEIGHT = 960, 420
_LINE = 19


class Card(NamedTuple):
    """A card of the README's picture: its corner and size in pixels, its title, the lines below."""

    x: int
    y: int
    width: int
    height: int
    fill: str
    title: str
    lines: tuple[str, ...]


_DATA, _MODEL, _RUN, _OUT = "#e7f0fe", "#fff3d6", "#e3f5e7", "#f3e8fb"
_CARDS = (
    Card(20, 60, 250, 120, _DATA, "Your data",
        ("conversations, images, videos", "text, captions, pages", "robot demonstrations")),
    Card(20, 240, 250, 120, _MODEL, "A model",
        ("Qwen3-VL, in HF's files", "pi07, in OpenTau's files", "or random weights")),
    Card(355, 60, 250, 300, _RUN, "paddle-vl train run.yaml",
        ("fine-tuning, LoRA,", "pretraining, policies", "", "one device, or many ranks:",
         "data, tensor, sequence,", "pipeline, expert parallel", "and sharding", "",
         "stops and resumes to the bit")),
    Card(690, 60, 250, 120, _OUT, "A checkpoint and a report",
        ("the same files,", "for HF and OpenTau too", "metrics and plots")),
    Card(690, 240, 250, 120, _OUT, "Use it",
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
    for card in _CARDS:
        parts += _drawn(card)
    note = "Every output and gradient equals the original's, on one rank or many."
    parts.append(f'<text x="{_WIDTH // 2}" y="396" text-anchor="middle" fill="#444">{note}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _drawn(card: Card) -> list[str]:
    middle = card.x + card.width // 2
    parts = [
        f'<rect x="{card.x}" y="{card.y}" width="{card.width}" height="{card.height}" rx="8" '
        f'fill="{card.fill}" stroke="#444"/>',
        f'<text x="{middle}" y="{card.y + 30}" text-anchor="middle" font-weight="bold" '
        f'font-size="15">{escape(card.title)}</text>',
    ]
    for number, line in enumerate(card.lines):
        y = card.y + 58 + number * _LINE
        parts.append(f'<text x="{middle}" y="{y}" text-anchor="middle">{escape(line)}</text>')
    return parts


def written(page: str, name: str, text: str) -> str:
    """The page with the text between two markers replaced.

    Raises:
        ValueError: the page does not have the markers.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    head, found, rest = page.partition(begin)
    _, also_found, tail = rest.partition(end)
    if not (found and also_found):
        raise ValueError(f"{PAGE} has no {begin} ... {end}: put both on lines of their own")
    return f"{head}{begin}\n{text}\n{end}{tail}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, compare only")
    options = parser.parse_args()
    logging.disable(logging.INFO)
    page = PAGE.read_text(encoding="utf-8")
    made = written(page, "picture", picture())
    if compiled.enable():
        made = written(made, "path", path())
    for file, text in ((PAGE, made), (OVERVIEW, overview())):
        if not options.check:
            file.write_text(text, encoding="utf-8")
            print(f"wrote {file.relative_to(ROOT)}")
        elif not file.exists() or file.read_text(encoding="utf-8") != text:
            sys.exit(f"{file.name} is out of date: run python tools/draw_architecture.py")


if __name__ == "__main__":
    main()
