"""The documents dataset: pages with exact answers, in splits that are apart.

Guarantees: a page of text or a formula is what its answer says, set once more; the rules of a table
bound the cells that its OTSL says; boxes bound the ink of their lines; no answer of val or test is
in another split; the same options give the same files, whatever tasks are beside them; the tool
says what is wrong.
"""

import contextlib
import json
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import matplotlib
import numpy as np
import pytest
from matplotlib.font_manager import FontProperties
from matplotlib.mathtext import MathTextParser
from PIL import Image, ImageDraw, ImageFont
from scipy import ndimage

from make_documents_dataset import (
    FONTS,
    MATH_FONTS,
    Options,
    main,
    make_documents_dataset,
)
from paddle_vl.data.formats.otsl import read_otsl
from paddle_vl.data.formats.spotting import read_spotting
from paddle_vl.families.paddleocr_vl.inputs.processor import TASK_PROMPTS

OPTIONS = Options(seed=3, held_out=12)
ROWS = {"text": 20, "table": 20, "formula": 5, "spotting": 5}
TTF = Path(matplotlib.get_data_path()) / "fonts" / "ttf"


@pytest.fixture(scope="module")
def documents(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("documents")
    assert make_documents_dataset(folder, ROWS, OPTIONS)
    return folder


def rows_of(folder: Path, name: str) -> list[tuple[str, Image.Image]]:
    """Answers and pages."""
    rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    task = name.partition("_")[0]
    for row in rows:
        assert row["messages"][0] == {"role": "user", "content": f"<image>{TASK_PROMPTS[task]}"}
    answers = [row["messages"][1]["content"] for row in rows]
    return [
        (answer, Image.open(folder / row["images"][0]))
        for answer, row in zip(answers, rows, strict=True)
    ]


def is_ink(page: Image.Image) -> np.ndarray:
    return np.asarray(page) < 150


def shape_of(ink: np.ndarray) -> np.ndarray:
    """Ink without its margins, in one size."""
    rows, columns = np.flatnonzero(ink.any(1)), np.flatnonzero(ink.any(0))
    inner = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    return np.asarray(Image.fromarray(inner.astype(np.float32)).resize((240, 80))).ravel()


def set_text(answer: str, font: str) -> np.ndarray:
    page = Image.new("L", (900, 300), 255)
    loaded = ImageFont.truetype(TTF / f"{font}.ttf", 22, layout_engine=ImageFont.Layout.BASIC)
    for number, line in enumerate(answer.split("\n")):
        place = (10, 40 + 22 * 1.3 * number)
        ImageDraw.Draw(page).text(place, line, 0, loaded, anchor="ls")
    return shape_of(is_ink(page))


def set_formula(answer: str, font: str) -> np.ndarray:
    assert (answer[:3], answer[-3:]) == (r"\[ ", r" \]")
    with matplotlib.rc_context({"mathtext.fontset": font}):
        parsed = MathTextParser("agg").parse(f"${answer[3:-3]}$", 72, FontProperties(size=22))
    return shape_of(np.asarray(parsed.image) > 105)


@pytest.mark.parametrize(
    ("task", "compose", "fonts"), [("text", set_text, FONTS), ("formula", set_formula, MATH_FONTS)]
)
def test_a_page_is_nearest_to_its_own_answer(documents, task, compose, fonts):
    rows = rows_of(documents, f"{task}_test")
    answers = [answer for answer, _ in rows]
    # Also letters in another order.
    others = ["\n".join(line[::-1] for line in answer.split("\n")) for answer in answers]
    wrong = others if task == "text" else []
    composed = {pair: compose(*pair) for pair in product([*answers, *wrong], fonts)}
    for answer, page in rows:
        found = shape_of(is_ink(page))
        alike = {pair: np.corrcoef(found, other)[0, 1] for pair, other in composed.items()}
        assert max(alike, key=alike.__getitem__)[0] == answer


def test_rules_of_a_table_bound_the_cells_of_its_answer(documents, tmp_path, monkeypatch):
    num_merged = 0
    # Where a span of all rows or columns would hide one.
    monkeypatch.setattr("make_documents_dataset.SPAN_SHARE", 1.0)
    make_documents_dataset(tmp_path, {"table": 40}, replace(OPTIONS, cells=(2, 2), held_out=1))
    rows = [*rows_of(documents, "table_train"), *rows_of(tmp_path, "table_train")]
    for answer, page in rows:
        table = read_otsl(answer)
        ink = is_ink(page)
        found = ndimage.find_objects(cast(Any, ndimage.label(~ink))[0])
        # Without holes of letters and the margin.
        boxes = [
            box
            for box in found
            if min(side.stop - side.start for side in box) > 15 and box[0].start > 0
        ]
        tops, lefts = (sorted({box[axis].start for box in boxes}) for axis in (0, 1))
        cells = [
            (
                tops.index(rows.start),
                lefts.index(columns.start),
                sum(rows.start <= top < rows.stop for top in tops),
                sum(columns.start <= left < columns.stop for left in lefts),
                bool(ink[rows, columns].any()),
            )
            for rows, columns in boxes
        ]
        assert sorted(cells) == [
            (cell.row, cell.column, cell.row_span, cell.column_span, bool(cell.text))
            for cell in table.cells
        ]
        num_merged += any(cell.row_span * cell.column_span > 1 for cell in table.cells)
    assert num_merged > 10


def test_boxes_bound_the_ink_of_their_lines(documents):
    for answer, page in rows_of(documents, "spotting_test"):
        ink, size = is_ink(page), np.array(page.size)
        for spot in read_spotting(answer):
            corners = np.array(spot.corners).reshape(4, 2)
            (left, top), (right, bottom) = corners[0], corners[2]
            assert corners[[1, 3]].tolist() == [[right, top], [left, bottom]]
            (left, top), (right, bottom) = (np.rint(corners[[0, 2]] * size / 1000)).astype(int)
            inner = ink[top:bottom, left:right]
            rows, columns = (np.flatnonzero(inner.any(axis)) for axis in (1, 0))
            # Thin ends are grey.
            assert max(rows[0], bottom - top - 1 - rows[-1]) <= 2
            assert max(columns[0], right - left - 1 - columns[-1]) <= 3
            ink[max(0, top - 1) : bottom + 1, max(0, left - 1) : right + 1] = False
        assert not ink.any()


def test_no_held_out_answer_is_in_another_split(tmp_path):
    options = Options(letters=(1, 1), lines=(1, 1), held_out=15)
    make_documents_dataset(tmp_path, {"text": 200}, options)
    train, val, test = (
        [answer for answer, _ in rows_of(tmp_path, f"text_{split}")]
        for split in ("train", "val", "test")
    )
    assert (len(train), len(set(val)), len(set(test))) == (200, 15, 15)
    assert not set(val) & set(test)
    assert not set(train) & {*val, *test}


def test_same_options_give_the_same_files_whatever_is_beside_them(documents, tmp_path):
    assert not make_documents_dataset(documents, ROWS, OPTIONS)
    assert make_documents_dataset(tmp_path, {"table": 20}, OPTIONS)
    names = [path.relative_to(tmp_path) for path in tmp_path.rglob("*table*/*.png")]
    assert len(names) == 20 + 2 * 12
    for name in [*names, Path("table_train.jsonl")]:
        assert (tmp_path / name).read_bytes() == (documents / name).read_bytes()
    assert make_documents_dataset(tmp_path, {"table": 4}, OPTIONS)
    assert len(rows_of(tmp_path, "table_train")) == 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["text=2"], "written"),
        (["chart=2"], "no task 'chart': text, table, formula, spotting"),
        (["text=many"], "text=many: TASK=ROWS is needed, as in text=20000"),
        (["text=2", "--held-out", "50"], "ask for fewer rows or for longer answers"),
    ],
)
def test_tool_says_what_it_did_or_what_is_wrong(tmp_path, monkeypatch, capsys, arguments, said):
    few = ["--held-out", "3", "--letters", "1", "1", "--lines", "1", "1"]
    monkeypatch.setattr(sys, "argv", ["tool", str(tmp_path / "made"), *few, *arguments])
    with contextlib.suppress(SystemExit):
        main()
    output = capsys.readouterr()
    assert said in (output.out if said == "written" else output.err)
