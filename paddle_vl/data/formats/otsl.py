"""Tables as OTSL, the answer of PaddleOCR-VL's table recognition, and as HTML.

    <fcel>Port<lcel><nl><fcel>Kiel<fcel>12<nl><ucel><ecel><nl>
    <table><tr><td colspan="2">Port</td></tr><tr><td rowspan="2">Kiel</td><td>12</td></tr>...

One tag a place, rows end with `<nl>`: `<fcel>` is a cell with the text behind it, `<ecel>` an empty
cell; `<lcel>` belongs to the cell on its left, `<ucel>` to the one above, `<xcel>` to both.

Neither form is markup inside of cells: text is literal in OTSL and escaped in HTML. OTSL has no
header cells, so `th` and `td` are alike. What is read for scoring is repaired as PaddleX 3.7 does.
"""

import html
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from typing import Any, NamedTuple

FILLED, EMPTY, LEFT, UP, BOTH = "<fcel>", "<ecel>", "<lcel>", "<ucel>", "<xcel>"
END_OF_ROW = "<nl>"
TAGS = (FILLED, EMPTY, LEFT, UP, BOTH, END_OF_ROW)
_TAG = re.compile(f"({'|'.join(TAGS)})")
# Rows and columns of a table of HTML at most, which a span may claim.
_MOST_PLACES = 1 << 16
_OF_TABLE = ("table", "thead", "tbody", "tfoot", "tr", "td", "th", "caption", "colgroup", "col")
# Tags whose text is the cell's, and those that never end.
_INLINE = ("b", "i", "u", "s", "strong", "em", "sub", "sup", "span", "p", "div", "a", "font")
_OF_PAGE = ("html", "body", "div")
_BREAK = "br"


class Cell(NamedTuple):
    """A cell: its text, the place of its upper left corner from 0, and how far it reaches."""

    text: str
    row: int
    column: int
    row_span: int = 1
    column_span: int = 1


class Table(NamedTuple):
    """A table: its cells in reading order, and its size in rows and columns."""

    cells: list[Cell]
    num_rows: int
    num_columns: int


class _Place(NamedTuple):
    tag: str
    text: str


def is_otsl(text: str) -> bool:
    """Whether a text begins like a table in OTSL."""
    return text.lstrip().startswith(TAGS)


def read_otsl(text: str, *, is_strict: bool = True) -> Table:
    """The table of a text in OTSL.

    Args:
        is_strict: False repairs a table as PaddleX does before it shows one: rows are cut or filled
            with empty cells to the width that changes fewest places and cuts no text, and tags that
            belong to no cell are empty cells.

    Raises:
        ValueError: strict, and rows have different numbers of places, a tag belongs to no cell or
            a span is no rectangle, a text stands where none can, or there is no table.
    """
    head, *parts = _TAG.split(text.strip())
    rows: list[list[_Place]] = [[]]
    for tag, inner in zip(parts[::2], parts[1::2], strict=True):
        if tag == END_OF_ROW:
            rows.append([])
        else:
            rows[-1].append(_Place(tag, inner.strip()))
        if is_strict and bool(inner.strip()) != (tag == FILLED):
            found = f"the text {inner.strip()[:40]!r}" if inner.strip() else "no text"
            raise ValueError(
                f"row {len(rows) - (tag == END_OF_ROW)} has {found} behind {tag}; text stands "
                f"behind {FILLED} alone, and {EMPTY} is a cell without"
            )
    if is_strict:
        if head:
            raise ValueError(f"it begins with {head[:40]!r} and not with a tag such as {FILLED}")
        rows = rows if rows[-1] else rows[:-1]
        _check_widths(rows)
    else:
        rows = _of_one_width([row for row in rows if row])
    table = _with_spans(rows)
    if is_strict:
        _check_spans(rows, table)
    return table


def write_otsl(table: Table) -> str:
    """The table in OTSL.

    Raises:
        ValueError: the text of a cell has one of the tags.
    """
    if found := next((tag[0] for cell in table.cells if (tag := _TAG.search(cell.text))), None):
        raise ValueError(f"the text of a cell has {found}, which OTSL would read as a place")
    texts = {(cell.row, cell.column): cell.text for cell in table.cells}
    return "".join(
        tag + texts.get((row, column), "") if column < table.num_columns else tag
        for row, tags in enumerate(_tags_of(table))
        for column, tag in enumerate([*tags, END_OF_ROW])
    )


def write_html(table: Table) -> str:
    """The table in HTML, as PaddleX writes it; an empty text of one without cells."""
    rows = [""] * table.num_rows
    for cell in table.cells:
        spans = (("rowspan", cell.row_span), ("colspan", cell.column_span))
        more = "".join(f' {name}="{span}"' for name, span in spans if span > 1)
        rows[cell.row] += f"<td{more}>{html.escape(cell.text)}</td>"
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<table>{body}</table>" if table.cells else ""


def read_html(text: str, *, is_strict: bool = True) -> Table:
    """The table of a text in HTML; of bold or raised text and the like in it the text alone.

    Args:
        is_strict: False takes what is there of a broken table, and fills its rows.

    Raises:
        ValueError: strict, and rows reach different widths, spans overlap or leave the table, a tag
            is none of a table's, a text is in no cell, or there is no table or more than one.
    """
    parser = _Parser(is_strict)
    parser.feed(text)
    parser.close()
    parser.end()
    return parser.table()


def _check_widths(rows: Sequence[Sequence[_Place]]) -> None:
    if not any(place.tag in (FILLED, EMPTY) for row in rows for place in row):
        raise ValueError(f"it has no cell; rows of {FILLED} and {EMPTY} are needed")
    for number, row in enumerate(rows, start=1):
        if len(row) != len(rows[0]):
            raise ValueError(
                f"row {number} has {len(row)} places and row 1 has {len(rows[0])}; every row needs "
                f"as many ({LEFT}, {UP} and {BOTH} fill those that a wider cell covers)"
            )


def _of_one_width(rows: list[list[_Place]]) -> list[list[_Place]]:
    """Rows cut or filled to the first width that changes fewest places and cuts no text."""
    if not rows:
        return []
    last = [
        max((i for i, each in enumerate(row, 1) if each.tag == FILLED), default=0) for row in rows
    ]
    widths = range(max(last), max(map(len, rows)) + 1)
    width = min(widths, key=lambda each: sum(abs(len(row) - each) for row in rows))
    return [(row + [_Place(EMPTY, "")] * (width - len(row)))[:width] for row in rows]


def _with_spans(rows: Sequence[Sequence[_Place]]) -> Table:
    """The table of rows of one width; where spans overlap the later cell is in front."""
    num_columns = len(rows[0]) if rows else 0
    places = [(row, column) for row in range(len(rows)) for column in range(num_columns)]
    owners = {place: Cell("", *place) for place in places}
    own = [place for place in places if rows[place[0]][place[1]].tag in (FILLED, EMPTY)]
    if not own:
        return Table([], 0, 0)
    for row, column in own:
        tag, text = rows[row][column]
        right, below = rows[row][column + 1 :], [each[column] for each in rows[row + 1 :]]
        height, width = 1 + _leading(below, (UP, BOTH)), 1 + _leading(right, (LEFT, BOTH))
        cell = Cell(text if tag == FILLED else "", row, column, height, width)
        owners |= dict.fromkeys(_covered(cell), cell)
    cells = [cell for place, cell in owners.items() if place == (cell.row, cell.column)]
    return Table(cells, len(rows), num_columns)


def _leading(places: Sequence[_Place], tags: tuple[str, ...]) -> int:
    return next((i for i, each in enumerate(places) if each.tag not in tags), len(places))


def _covered(cell: Cell) -> Iterator[tuple[int, int]]:
    for row in range(cell.row, cell.row + cell.row_span):
        yield from ((row, cell.column + more) for more in range(cell.column_span))


def _tags_of(table: Table) -> list[list[str]]:
    """The tag of every place."""
    tags = [[EMPTY] * table.num_columns for _ in range(table.num_rows)]
    for cell in table.cells:
        for row, column in _covered(cell):
            inner = {(True, False): LEFT, (False, True): UP, (False, False): BOTH}
            own = FILLED if cell.text else EMPTY
            tags[row][column] = inner.get((row == cell.row, column == cell.column), own)
    return tags


def _check_spans(rows: Sequence[Sequence[_Place]], table: Table) -> None:
    """Every tag says what the spans of the cells say."""
    covers = Counter(place for cell in table.cells for place in _covered(cell))
    for row, tags in enumerate(_tags_of(table)):
        for column, tag in enumerate(tags):
            if rows[row][column].tag != tag or covers[row, column] != 1:
                found = rows[row][column].tag
                raise ValueError(
                    f"{found} in row {row + 1}, place {column + 1} belongs to no cell whose span "
                    f"is a rectangle: a cell is followed by {LEFT} to its right, {UP} below it and "
                    f"{BOTH} between them"
                )


class _Parser(HTMLParser):
    """Reads one table of HTML."""

    def __init__(self, is_strict: bool):
        super().__init__(convert_charrefs=True)
        self._is_strict = is_strict
        self._tables = self._row = 0
        self._is_open = False
        # Text and spans of the cell that is open.
        self._texts: list[str] | None = None
        self._spans = (1, 1)
        self._cells: list[Cell] = []
        self._taken: set[tuple[int, int]] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == _BREAK and self._texts is not None:
            self._texts.append(" ")
        if tag not in (*_OF_TABLE, *_INLINE, *_OF_PAGE, _BREAK):
            self._fault(f"has the tag <{tag}>, which is none of a table's")
        if tag == "table":
            self._tables += 1
            if self._tables > 1:
                self._fault("has a second table, or one inside of a cell: write each as one row")
        elif tag == "tr":
            self._end_row()
            self._is_open = True
        elif tag in ("td", "th"):
            self._end_cell()
            self._texts, self._is_open = [], True
            given = dict(attrs)
            self._spans = (self._span(given, "rowspan"), self._span(given, "colspan"))

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._end_cell()
        elif tag in ("tr", "table", "thead", "tbody", "tfoot"):
            self._end_row()

    def handle_data(self, data: str) -> None:
        if self._texts is not None:
            self._texts.append(data)
        elif data.strip():
            self._fault(f"has the text {data.strip()[:40]!r} outside of its cells")

    def end(self) -> None:
        """What the end of the text ends."""
        self._end_row()

    def table(self) -> Table:
        """The table that was read, its rows filled where it may be."""
        if not self._tables or not self._cells:
            self._fault("has no <table> with a cell")
        num_rows = 1 + max((row for row, _ in self._taken), default=-1)
        num_columns = 1 + max((column for _, column in self._taken), default=-1)
        if num_rows > self._row:
            self._fault(f"has a rowspan that reaches row {num_rows} of {self._row}")
            num_rows = self._row
        cells = list(self._cells)
        for place in ((row, column) for row in range(num_rows) for column in range(num_columns)):
            if place not in self._taken:
                row, column = place
                self._fault(f"has no cell in row {row + 1}, column {column + 1} of {num_columns}")
                cells.append(Cell("", row, column))
        cells = [
            cell._replace(row_span=min(cell.row_span, num_rows - cell.row))
            for cell in sorted(cells, key=lambda cell: (cell.row, cell.column))
        ]
        return Table(cells, num_rows, num_columns)

    def _end_row(self) -> None:
        self._end_cell()
        self._row += self._is_open
        self._is_open = False

    def _end_cell(self) -> None:
        if self._texts is None:
            return
        text, self._texts = " ".join("".join(self._texts).split()), None
        column = 0
        while (self._row, column) in self._taken:
            column += 1
        cell = Cell(text, self._row, column, *self._spans)
        if cell.row_span * cell.column_span + len(self._taken) > _MOST_PLACES:
            raise ValueError(f"it has more than {_MOST_PLACES} places; correct its spans")
        places = set(_covered(cell))
        if places & self._taken:
            self._fault(f"has overlapping spans in row {self._row + 1}")
            cell = cell._replace(row_span=1, column_span=1)
            places = {(self._row, column)}
        self._taken |= places
        self._cells.append(cell)

    def _span(self, given: dict[str, Any], name: str) -> int:
        value = given.get(name, "1")
        if not re.fullmatch(r"\s*[1-9]\d{0,3}\s*", value or ""):
            self._fault(f"has {name} {value!r}; a number from 1 is needed")
            return 1
        return int(value)

    def _fault(self, reason: str) -> None:
        if self._is_strict:
            raise ValueError(f"it {reason}")
