"""Checks of olmOCR-bench: what a row says about the text of a page, and whether it is so.

    {"pdf": "a.pdf", "page": 1, "id": "a_1", "type": "present", "text": "Total", "max_diffs": 1}

Of its types there are present, absent, order, table and baseline. The others are refused: math
needs formulas rendered by KaTeX in a browser; format and footnote need Markdown, which models that
give plain text do not write.

Source: olmOCR's `bench/tests.py`. Differences: a text is found within max_diffs edits, where theirs
compares windows of its length; a heading is any cell above or to the left, as OTSL has no others;
where a table ends there is no neighbour, which its package 0.4.27 lets pass.
"""

import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from paddle_vl.data.formats.otsl import Cell, Table, is_otsl, read_html, read_otsl
from paddle_vl.families.vlm.evaluation.edit_distance import edit_distance, near_ends

_MARKS = re.compile(r"\*\*(.*?)\*\*|__(.*?)__|\*(.*?)\*|_(.*?)_")
_ALIKE = str.maketrans(
    "\u2018\u2019\u201a\u201c\u201d\u201e\uff3f\u2013\u2014\u2011\u2012\u2212\u00b5",
    "'''\"\"\"_-----\u03bc",
)
_HTML_TABLE = re.compile(r"<table\b.*?(?:</table>|\Z)", re.DOTALL | re.IGNORECASE)
_PIPES = re.compile(r"(?:^[^\n]*\|[^\n]*(?:\n|\Z)){2,}", re.MULTILINE)
# Hiragana, katakana, Han and emoji, which no page of the benchmark has.
_FOREIGN = re.compile("[\u3040-\u30ff\u4e00-\u9fff\U0001f1e0-\U0001f1ff\U0001f300-\U0001f6ff]")
_MOST_REPEATS, _LONGEST_REPEAT = 30, 5


def passes(answer: str, row: Mapping[str, Any]) -> bool:
    """Whether the text of a page is as a row says.

    Raises:
        ValueError: the row is no check, of a type that is not covered, or has a wrong value.
    """
    kind = row.get("type")
    if kind not in _CHECKS:
        raise ValueError(
            f"the check {row.get('id')!r} has the type {kind!r}, and there are "
            f"{', '.join(_CHECKS)}: leave others out with `where: {{type: [..]}}`"
        )
    try:
        return _CHECKS[kind](answer, row)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"the check {row.get('id')!r} of type {kind} has a value that is missing or of another "
            f"kind ({error}): correct the row"
        ) from error


def _plain(text: str) -> str:
    text = " ".join(re.sub(r"<br/?>", " ", text).split())
    text = _MARKS.sub(lambda found: next(each for each in found.groups() if each is not None), text)
    return unicodedata.normalize("NFC", re.sub(r"</?[bi]>", "", text)).translate(_ALIKE)


def _diffs(row: Mapping[str, Any]) -> int:
    most = row.get("max_diffs") or 0
    if type(most) is not int or most < 0:
        raise TypeError(f"max_diffs is {most!r}, and must be a number from 0")
    return most


def _wanted(row: Mapping[str, Any], name: str) -> str:
    if not (text := _plain(row[name]).strip()):
        raise KeyError(name)
    return text


def _is_there(answer: str, row: Mapping[str, Any]) -> bool:
    text, answer = _wanted(row, "text"), _plain(answer)
    if not row.get("case_sensitive", True):
        text, answer = text.lower(), answer.lower()
    first, last = row.get("first_n"), row.get("last_n")
    if first or last:
        answer = (answer[:first] if first else "") + (answer[-last:] if last else "")
    return bool(near_ends(text, answer, _diffs(row)))


def _is_ordered(answer: str, row: Mapping[str, Any]) -> bool:
    starts = []
    for name in ("before", "after"):
        backwards = _plain(answer)[::-1]
        ends = near_ends(_wanted(row, name)[::-1], backwards, _diffs(row))
        starts.append([len(backwards) - end for end in ends])
    return bool(starts[0] and starts[1]) and min(starts[0]) < max(starts[1])


def _has_cell(answer: str, row: Mapping[str, Any]) -> bool:
    fits = partial(_fits, most=_diffs(row))
    text = _wanted(row, "cell")
    wanted = {name: _plain(row[name]) for name in _PLACES if row.get(name)}
    return any(
        fits(text, cell.text)
        and all(
            any(fits(wanted[name], other.text) for other in table.cells if is_at(cell, other))
            for name, is_at in _PLACES.items()
            if name in wanted
        )
        for table in _tables(answer)
        for cell in table.cells
    )


def _fits(wanted: str, found: str, most: int) -> bool:
    """Whether they differ by so many edits, and at most half of what is wanted."""
    return edit_distance(wanted, _plain(found)) <= min(most, len(wanted) / 2)


def _shares_columns(one: Cell, other: Cell) -> bool:
    return max(one.column, other.column) < min(
        one.column + one.column_span, other.column + other.column_span
    )


def _shares_rows(one: Cell, other: Cell) -> bool:
    return max(one.row, other.row) < min(one.row + one.row_span, other.row + other.row_span)


# Whether the second cell is there, seen from the first one.
_PLACES: dict[str, Callable[[Cell, Cell], bool]] = {
    "up": lambda c, o: _shares_columns(c, o) and o.row + o.row_span == c.row,
    "down": lambda c, o: _shares_columns(c, o) and c.row + c.row_span == o.row,
    "left": lambda c, o: _shares_rows(c, o) and o.column + o.column_span == c.column,
    "right": lambda c, o: _shares_rows(c, o) and c.column + c.column_span == o.column,
    "top_heading": lambda c, o: _shares_columns(c, o) and o.row < c.row,
    "left_heading": lambda c, o: _shares_rows(c, o) and o.column < c.column,
}


def _tables(answer: str) -> Iterator[Table]:
    """Tables in OTSL, HTML and Markdown; broken ones are repaired."""
    if is_otsl(answer):
        yield read_otsl(answer, is_strict=False)
    for found in _HTML_TABLE.findall(answer):
        try:
            yield read_html(found, is_strict=False)
        except ValueError:
            # Spans that nobody can show.
            continue
    for found in _PIPES.findall(answer):
        lines = [line.strip().strip("|").split("|") for line in found.splitlines()]
        lines = [line for line in lines if set("".join(line)) - set("-: ")]
        cells = [
            Cell(text.strip(), row, column)
            for row, line in enumerate(lines)
            for column, text in enumerate(line)
        ]
        yield Table(cells, len(lines), max(map(len, lines), default=0))


def _is_sane(answer: str, row: Mapping[str, Any]) -> bool:
    """Not empty, without a repetition at its end and signs that no page has; or of a blank page
    at most `max_length` letters."""
    letters = sum(map(str.isalnum, answer))
    if (longest := row.get("max_length")) is not None:
        return letters <= longest
    text = " ".join(answer.split())
    counts = (_repeats(text, size) for size in range(1, min(_LONGEST_REPEAT, len(text)) + 1))
    is_repeated = any(count > row.get("max_repeats", _MOST_REPEATS) for count in counts)
    is_foreign = row.get("check_disallowed_characters", True) and _FOREIGN.search(answer)
    return bool(letters and not is_repeated and not is_foreign)


def _repeats(text: str, size: int) -> int:
    """How often the last letters of a text stand at its end."""
    count, last = 1, text[-size:]
    while text.endswith(last, 0, len(text) - count * size):
        count += 1
    return count


_CHECKS: dict[Any, Callable[[str, Mapping[str, Any]], bool]] = {
    "present": _is_there,
    "absent": lambda answer, row: not _is_there(answer, row),
    "order": _is_ordered,
    "table": _has_cell,
    "baseline": _is_sane,
}
