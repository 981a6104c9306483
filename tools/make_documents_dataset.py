"""Write pages with exact ground truth: lines of text, tables, formulas, spotted lines.

    python tools/make_documents_dataset.py DIRECTORY text=20000 table=4000 formula=1000 spotting=500

Rows are those that PaddleOCR-VL is fine-tuned on, in the format `messages`, with its task prompts:

- text: `OCR:`, a paragraph's lines by line breaks
- table: `Table Recognition:`, OTSL with spans
- formula: `Formula Recognition:`, LaTeX in `\\[ \\]`
- spotting: `Spotting:`, each line with eight location tokens: four corners, thousandths of the page

Fonts are those that matplotlib ships: DejaVu, STIX and Computer Modern; formulas are set by its
mathtext. A page is dark ink on light paper, its margins, sizes, shades and grain drawn by chance.

The directory gets `images/`, and for each task `TASK_train.jsonl`, `TASK_val.jsonl` and
`TASK_test.jsonl`; `dataset.json` has the options. No answer of val or test occurs in another split.
The same options give the same files, whatever tasks are beside them.
"""

import argparse
import json
import string
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.font_manager import FontProperties
from matplotlib.mathtext import MathTextParser
from PIL import Image, ImageDraw, ImageFont

from paddle_vl.data.formats.otsl import Cell, Table, write_otsl
from paddle_vl.data.formats.spotting import UNITS, Spot, write_spotting
from paddle_vl.families.paddleocr_vl.inputs.processor import TASK_PROMPTS

# Increase when the written files change.
RECIPE_VERSION = 1
MANIFEST = "dataset.json"
# Of matplotlib's folder mpl-data/fonts/ttf. Each has all of `ALPHABET`.
FONTS = (
    "DejaVuSans", "DejaVuSansMono", "DejaVuSerif", "DejaVuSans-Bold",
    "STIXGeneral", "STIXGeneralItalic", "STIXGeneralBol", "cmr10", "cmss10", "cmtt10",
)  # fmt: skip
MATH_FONTS = ("cm", "stix", "dejavusans", "dejavuserif")
ALPHABET = string.ascii_letters + string.digits + " .,:-/%()"
TASKS = ("text", "table", "formula", "spotting")
SPLITS = ("test", "val", "train")
# Share of tables that get a merged cell where there is room, and of empty cells.
SPAN_SHARE, EMPTY_SHARE = 0.3, 0.1
# Attempts to draw an answer that no other split has.
MAX_DRAWS = 1000
_VOWELS, _CONSONANTS = "aeiou", "bcdfghjklmnprstvwxz"


@dataclass(frozen=True)
class Options:
    """What pages look like; ranges are of both ends.

    Attributes:
        letters: of a line.
        lines: of a page of text or spotting.
        cells: rows, and columns, of a table.
        cell_letters: of a cell.
        font_size: pixels.
        least_width: of a page of text, pixels; as a form's field has it.
        num_fonts: the first ones of `FONTS`.
        held_out: rows of val and of test, each task.
    """

    seed: int = 1
    letters: tuple[int, int] = (4, 30)
    lines: tuple[int, int] = (1, 4)
    cells: tuple[int, int] = (2, 4)
    cell_letters: tuple[int, int] = (1, 8)
    font_size: tuple[int, int] = (18, 26)
    least_width: int = 1
    num_fonts: int = len(FONTS)
    held_out: int = 300


def make_documents_dataset(
    directory: Path, rows: dict[str, int], options: Options | None = None
) -> bool:
    """Write the dataset unless it is complete; returns whether it was written.

    Args:
        rows: of the training split of each task.

    Raises:
        ValueError: an unknown task, or too few different answers for the splits.
    """
    options = options or Options()
    wanted = {"recipe_version": RECIPE_VERSION, "rows": rows, **asdict(options)}
    wanted = json.loads(json.dumps(wanted))
    manifest = directory / MANIFEST
    if manifest.is_file() and json.loads(manifest.read_text(encoding="utf-8")) == wanted:
        return False
    if unknown := sorted(rows.keys() - {*TASKS}):
        raise ValueError(f"no task {unknown[0]!r}: {', '.join(TASKS)}")
    manifest.unlink(missing_ok=True)
    for task, num_rows in rows.items():
        _write_task(directory, task, num_rows, options)
    # Last: if it exists, the dataset is complete.
    manifest.write_text(json.dumps(wanted, indent=1), encoding="utf-8")
    return True


def _write_task(directory: Path, task: str, num_rows: int, options: Options) -> None:
    held_out: set[str] = set()
    for number, split in enumerate(SPLITS):
        (directory / "images" / f"{task}_{split}").mkdir(parents=True, exist_ok=True)
        lines = []
        for index in range(num_rows if split == "train" else options.held_out):
            # A row depends on nothing that is drawn for others, but for answers it must not have.
            stream = [options.seed, TASKS.index(task), number, index]
            rng = np.random.default_rng(stream)
            content, answer = _new_content(task, rng, options, held_out)
            if split != "train":
                held_out.add(answer)
            image, answer = _PAGES[task](content, answer, rng, options)
            name = f"images/{task}_{split}/{index:06d}.png"
            _grained(image, rng).save(directory / name, compress_level=1)
            turns = ("user", f"<image>{TASK_PROMPTS[task]}"), ("assistant", answer)
            messages = [{"role": role, "content": text} for role, text in turns]
            lines.append(json.dumps({"task": task, "messages": messages, "images": [name]}))
        (directory / f"{task}_{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _new_content(
    task: str, rng: np.random.Generator, options: Options, held_out: set[str]
) -> tuple[Any, str]:
    for _ in range(MAX_DRAWS):
        content, answer = _CONTENTS[task](rng, options)
        if answer not in held_out:
            return content, answer
    raise ValueError(
        f"{task}: {MAX_DRAWS} answers in a row are in another split: ask for fewer rows or for "
        f"longer answers"
    )


def _within(ends: Sequence[int], rng: np.random.Generator) -> int:
    return int(rng.integers(ends[0], ends[1] + 1))


def _one_of(choices: Sequence[Any], rng: np.random.Generator) -> Any:
    return choices[int(rng.integers(len(choices)))]


# Texts


def _word(rng: np.random.Generator) -> str:
    syllables = [
        _one_of(_CONSONANTS, rng) + _one_of(_VOWELS, rng) + _one_of(("", "", "n", "s", "r"), rng)
        for _ in range(_within((1, 3), rng))
    ]
    return "".join(syllables)


def _number(rng: np.random.Generator) -> str:
    return str(int(rng.integers(10 ** _within((1, 4), rng))))


_PIECES: tuple[Callable[[np.random.Generator], str], ...] = (
    *[_word] * 3,
    lambda rng: _word(rng).capitalize(),
    lambda rng: _word(rng).upper(),
    _number,
    lambda rng: f"{rng.uniform(0, 1000):,.2f}",
    lambda rng: f"{rng.uniform(0, 100):.1f}%",
    lambda rng: f"{rng.integers(1900, 2100)}-{rng.integers(1, 13):02d}-{rng.integers(1, 29):02d}",
    lambda rng: f"{rng.integers(24)}:{rng.integers(60):02d}",
    lambda rng: f"{_word(rng).upper()}/{_number(rng)}",
    lambda rng: f"({_word(rng)})",
)


def _line(letters: Sequence[int], rng: np.random.Generator) -> str:
    length, text = _within(letters, rng), ""
    while len(text) < length:
        text = f"{text} {_one_of(_PIECES, rng)(rng)}".strip()
    # A space at the end cannot be seen.
    return text[:length].strip()


def _lines(rng: np.random.Generator, options: Options) -> tuple[list[str], str]:
    lines = [_line(options.letters, rng) for _ in range(_within(options.lines, rng))]
    return lines, "\n".join(lines)


@cache
def _font(name: str, size: int) -> ImageFont.FreeTypeFont:
    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{name}.ttf"
    # Raqm, the other engine, is not on every machine.
    return ImageFont.truetype(str(path), size, layout_engine=ImageFont.Layout.BASIC)


def _drawn_font(rng: np.random.Generator, options: Options) -> ImageFont.FreeTypeFont:
    return _font(_one_of(FONTS[: options.num_fonts], rng), _within(options.font_size, rng))


def _page(width: float, height: float, rng: np.random.Generator) -> tuple[Image.Image, int]:
    """A page and its ink."""
    size = max(1, round(width)), max(1, round(height))
    return Image.new("L", size, _within((225, 255), rng)), _within((0, 70), rng)


def _grained(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    grain = rng.normal(scale=rng.uniform(0, 5), size=(image.height, image.width))
    return Image.fromarray(np.clip(np.asarray(image) + grain, 0, 255).astype(np.uint8))


def _text_page(
    lines: list[str], answer: str, rng: np.random.Generator, options: Options
) -> tuple[Image.Image, str]:
    """Lines below each other, as a layout model cuts them out."""
    font = _drawn_font(rng, options)
    left, right, top, bottom = rng.integers(1, 5, size=4)
    # Of a line with ascenders and descenders, whatever the font's own table says.
    ascent, pitch = font.size * 0.95, font.size * 1.3
    width = left + max(font.getlength(line) for line in lines) + right
    image, ink = _page(max(width, options.least_width), top + pitch * len(lines) + bottom, rng)
    draw = ImageDraw.Draw(image)
    for number, line in enumerate(lines):
        draw.text((left, top + ascent + pitch * number), line, ink, font, anchor="ls")
    return image, answer


def _spotting_page(
    lines: list[str], _: str, rng: np.random.Generator, options: Options
) -> tuple[Image.Image, str]:
    """Lines at their own places of a page, from the top; boxes are those of the ink."""
    fonts = [_drawn_font(rng, options) for _ in lines]
    boxes = [font.getbbox(line, anchor="ls") for font, line in zip(fonts, lines, strict=True)]
    heights = [box[3] - box[1] for box in boxes]
    widths = [box[2] - box[0] for box in boxes]
    page_width = max(widths) + _within((10, 60), rng)
    gaps = rng.integers(4, 24, size=len(lines) + 1)
    image, ink = _page(page_width, sum(heights) + gaps.sum(), rng)
    draw, top, spots = ImageDraw.Draw(image), 0, []
    for line, font, box, height, width, gap in zip(
        lines, fonts, boxes, heights, widths, gaps, strict=False
    ):
        left, top = _within((2, image.width - int(np.ceil(width)) - 2), rng), top + gap
        draw.text((left - box[0], top - box[1]), line, ink, font, anchor="ls")
        corners = _corners((left, top, left + width, top + height), image.size)
        spots.append(Spot(line, corners))
        top += height
    return image, write_spotting(spots)


def _corners(box: Sequence[float], size: Sequence[int]) -> tuple[int, ...]:
    """Corners of a box (left, top, right, bottom) of a page of that size, in pixels."""
    left, top, right, bottom = (
        round(UNITS * side / size[axis % 2]) for axis, side in enumerate(box)
    )
    return left, top, right, top, right, bottom, left, bottom


# Tables


def _table(rng: np.random.Generator, options: Options) -> tuple[Table, str]:
    num_rows, num_columns = _within(options.cells, rng), _within(options.cells, rng)
    cells = {}
    for row, column in np.ndindex(num_rows, num_columns):
        text = "" if rng.random() < EMPTY_SHARE else _line(options.cell_letters, rng)
        cells[row, column] = Cell(text, row, column)
    if rng.random() < SPAN_SHARE:
        row, column = int(rng.integers(num_rows)), int(rng.integers(num_columns))
        # Another cell must show where a covered row or column ends.
        spans = [
            (down, across)
            for down, across in ((1, 1), (1, 2), (2, 1), (2, 2))
            if row + down <= num_rows and column + across <= num_columns
            if (down == 1 or across < num_columns) and (across == 1 or down < num_rows)
        ]
        down, across = _one_of(spans, rng)
        merged = cells[row, column]._replace(row_span=down, column_span=across)
        for i, j in np.ndindex(down, across):
            del cells[row + i, column + j]
        cells[row, column] = merged
    table = Table([cells[place] for place in sorted(cells)], num_rows, num_columns)
    return table, write_otsl(table)


def _table_page(
    table: Table, answer: str, rng: np.random.Generator, options: Options
) -> tuple[Image.Image, str]:
    """A ruled table; texts stand in the middle of their cells."""
    font = _drawn_font(rng, options)
    padding, pitch = _within((3, 8), rng), font.size * 1.3 + _within((2, 8), rng)
    widths = np.full(table.num_columns, 1.5 * font.size)
    for cell in table.cells:
        covered = slice(cell.column, cell.column + cell.column_span)
        share = (font.getlength(cell.text) + 2 * padding) / cell.column_span
        widths[covered] = np.maximum(widths[covered], share)
    left, top = rng.integers(2, 8, size=2).tolist()
    edges_x = [left, *(left + widths.cumsum()).tolist()]
    edges_y = [top + pitch * row for row in range(table.num_rows + 1)]
    image, ink = _page(edges_x[-1] + left, edges_y[-1] + top, rng)
    draw = ImageDraw.Draw(image)
    for cell in table.cells:
        x = edges_x[cell.column], edges_x[cell.column + cell.column_span]
        y = edges_y[cell.row], edges_y[cell.row + cell.row_span]
        draw.rectangle((round(x[0]), round(y[0]), round(x[1]), round(y[1])), outline=ink)
        start = (x[0] + x[1] - font.getlength(cell.text)) / 2
        baseline = (y[0] + y[1]) / 2 + 0.32 * font.size
        draw.text((start, baseline), cell.text, ink, font, anchor="ls")
    return image, answer


# Formulas

_SYMBOLS = (*"abcxyzn", "\\alpha", "\\beta", "\\theta", "\\lambda", "\\pi")
_OPERATORS = ("+", "-", "=", "\\leq", "\\times", "\\cdot")
_PATTERNS = (
    "\\frac{{{}}}{{{}}}", "\\sqrt{{{}}}", "{{{}}}^{{{}}}", "{{{}}}_{{{}}}",
    "\\sum_{{{}}}^{{{}}}", "\\int_{{{}}}^{{{}}}",
)  # fmt: skip


def _formula(depth: int, rng: np.random.Generator) -> str:
    if depth == 0 or rng.random() < 0.3:
        return _one_of(_SYMBOLS, rng) if rng.random() < 0.7 else str(rng.integers(10))
    pattern = _one_of(_PATTERNS, rng)
    return pattern.format(*(_formula(depth - 1, rng) for _ in range(pattern.count("{}"))))


def _latex(rng: np.random.Generator, _: Options) -> tuple[str, str]:
    wanted, parts = _one_of((3, 5), rng), [_formula(2, rng)]
    while len(parts) < wanted:
        parts += [_one_of(_OPERATORS, rng), _formula(2, rng)]
    latex = " ".join(parts)
    return latex, f"\\[ {latex} \\]"


def _formula_page(
    latex: str, answer: str, rng: np.random.Generator, options: Options
) -> tuple[Image.Image, str]:
    size = FontProperties(size=_within(options.font_size, rng))
    with matplotlib.rc_context({"mathtext.fontset": _one_of(MATH_FONTS, rng)}):
        # 72 dots an inch: a point is a pixel.
        parsed = _MATH.parse(f"${latex}$", 72, size)
    # 0 paper to 255 ink.
    drawn = np.asarray(parsed.image)
    left, right, top, bottom = rng.integers(2, 8, size=4)
    height, width = drawn.shape
    image, ink = _page(left + width + right, top + height + bottom, rng)
    image.paste(ink, (int(left), int(top)), Image.fromarray(drawn))
    return image, answer


_MATH = MathTextParser("agg")
_CONTENTS: dict[str, Callable[..., tuple[Any, str]]] = {
    "text": _lines, "table": _table, "formula": _latex, "spotting": _lines,
}  # fmt: skip
_PAGES: dict[str, Callable[..., tuple[Image.Image, str]]] = {
    "text": _text_page, "table": _table_page, "formula": _formula_page, "spotting": _spotting_page,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("directory", type=Path, help="folder; left unchanged if it is complete")
    parser.add_argument(
        "rows", nargs="+", metavar="TASK=ROWS", help=f"training rows of {', '.join(TASKS)}"
    )
    for name, value in asdict(Options()).items():
        count = {"nargs": 2, "metavar": ("LEAST", "MOST")} if isinstance(value, tuple) else {}
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, **count)
    found = vars(parser.parse_args())
    directory, texts = found.pop("directory"), found.pop("rows")
    # Ranges come as lists.
    options: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in found.items()
    }
    try:
        rows = dict(map(_task_and_rows, texts))
        is_written = make_documents_dataset(directory, rows, Options(**options))
    except ValueError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    print(f"{directory}: {'written' if is_written else 'complete already'}")


def _task_and_rows(text: str) -> tuple[str, int]:
    task, _, number = text.partition("=")
    if not number.isdecimal():
        raise ValueError(f"{text}: TASK=ROWS is needed, as in text=20000")
    return task, int(number)


if __name__ == "__main__":
    main()
