"""How near an answer is to one reference: text, formulas, tables and spotted lines of documents.

A rate is a pair, errors and what they are of, so that those of many answers can be added.
"""

import math
import re
import unicodedata
from collections.abc import Callable, Hashable, Sequence
from itertools import product

from paddle_vl.data.formats.otsl import Table, is_otsl, read_html, read_otsl
from paddle_vl.data.formats.spotting import Spot, read_spotting
from paddle_vl.families.vlm.evaluation.edit_distance import (
    Tree,
    edit_distance,
    tree_edit_distance,
)

Rate = tuple[float, float]
# Of the smallest rectangle or polygon around both, as ICDAR's protocols have it.
_LEAST_IOU = 0.5


def character_errors(answer: str, reference: str) -> Rate:
    """Edits and letters of the reference; a run of spaces and line ends is one space."""
    return _errors(" ".join(answer.split()), " ".join(reference.split()))


def word_errors(answer: str, reference: str) -> Rate:
    """Edits of words and words of the reference."""
    return _errors(answer.split(), reference.split())


def _errors(answer: Sequence[Hashable], reference: Sequence[Hashable]) -> Rate:
    if not reference:
        raise ValueError("a reference is empty, and an error rate is a share of it: use ned")
    return edit_distance(answer, reference), len(reference)


def normalised_distance(answer: Sequence[Hashable], reference: Sequence[Hashable]) -> float:
    """Edits over the longer length; 0 of two empty texts."""
    longest = max(len(answer), len(reference))
    return edit_distance(answer, reference) / longest if longest else 0.0


def letters_distance(answer: str, reference: str) -> float:
    """The normalised distance of letters, digits and underscores alone, as OmniDocBench has it."""
    return normalised_distance(*(re.sub(r"\W", "", text) for text in (answer, reference)))


# What a formula looks like, not what it says.
_STYLES = """
    bm boldmath boldsymbol coloneqq displaystyle enspace left mathbb mathbf mathbfcal mathcal
    mathfrak mathit mathnormal mathrm mathscr mathsf mathtt medspace negmedspace nobreakspace notag
    operatorname qquad quad right scriptscriptstyle setlength space symbf symbfit text textbf
    thickspace thinspace
""".split()
_UNSEEN = re.compile(
    r"\\(?:tag|hspace|begin|end)\{[^{}]*\}|\\arraycolsep[^}]*\}|"
    rf"\\(?:{'|'.join(_STYLES)})(?![A-Za-z])|(?<!\\)(?:\\[()\[\]]|\$)|\s+"
)


def formula_distance(answer: str, reference: str) -> float:
    """The normalised distance of LaTeX without delimiters, spaces, fonts, environments and case.

    As OmniDocBench's, but that whole commands are left out (`\\leftarrow` stays), and delimiters
    wherever they are.
    """
    plain = [_UNSEEN.sub("", text).strip(".").lower() for text in (answer, reference)]
    return normalised_distance(*plain)


def table_similarity(answer: str, reference: str, *, has_text: bool = True) -> float:
    """TEDS: 1 less the tree edit distance of tables over the rows and cells of the larger one.

    Args:
        answer, reference: tables in OTSL or HTML; what is broken is repaired, of other text the
            similarity is 0.
        has_text: whether the texts of cells count; False for TEDS-S, of the structure alone.

    Source: PubTabNet's metric, with header cells and NFKC as OmniDocBench has them.
    """
    wanted, found = _table_of(reference), _table_of(answer)
    if not wanted.cells:
        raise ValueError(f"the reference {reference!r:.80} is no table: write OTSL or HTML")
    if not found.cells:
        return 0.0
    one, other = _tree_of(found, has_text), _tree_of(wanted, has_text)
    most = max(len(table.cells) + table.num_rows for table in (found, wanted))
    return 1.0 if one == other else 1 - tree_edit_distance(one, other, _exchange) / most


def _table_of(text: str) -> Table:
    try:
        read: Callable[..., Table] = read_otsl if is_otsl(text) else read_html
        return read(text, is_strict=False)
    except ValueError:
        # Spans that nobody can show.
        return Table([], 0, 0)


def _tree_of(table: Table, has_text: bool) -> Tree:
    rows: list[list[Tree]] = [[] for _ in range(table.num_rows)]
    for cell in table.cells:
        text = unicodedata.normalize("NFKC", cell.text) if has_text else ""
        rows[cell.row].append(Tree((cell.row_span, cell.column_span, text)))
    return Tree("table", [Tree("row", row) for row in rows])


def _exchange(one: Hashable, other: Hashable) -> float:
    if one == other:
        return 0.0
    if isinstance(one, tuple) and isinstance(other, tuple) and one[:2] == other[:2]:
        return normalised_distance(one[2], other[2])
    return 1.0


def spotting_rates(answer: str, reference: str) -> dict[str, Rate]:
    """F1, precision and recall of spotted lines, as pairs of counts.

    A line is right if it and one of the reference overlap by an IoU of a half or more and have the
    same text without regard to case; each counts once, the nearest pair first.
    """
    wanted, found = read_spotting(reference), read_spotting(answer, is_strict=False)
    pairs = [
        (_overlap(one, other), i, j)
        for (i, one), (j, other) in product(enumerate(found), enumerate(wanted))
        if one.text.casefold() == other.text.casefold()
    ]
    left_found, left_wanted = set(range(len(found))), set(range(len(wanted)))
    for iou, i, j in sorted(pairs, reverse=True):
        if iou >= _LEAST_IOU and i in left_found and j in left_wanted:
            left_found.remove(i)
            left_wanted.remove(j)
    right = len(found) - len(left_found)
    return {
        "spotting_f1": (2 * right, len(found) + len(wanted)),
        "spotting_precision": (right, len(found)),
        "spotting_recall": (right, len(wanted)),
    }


Point = tuple[float, float]


def _overlap(one: Spot, other: Spot) -> float:
    """IoU of the convex polygons around the corners of two lines."""
    a, b = (
        _hull(list(zip(each.corners[::2], each.corners[1::2], strict=True)))
        for each in (one, other)
    )
    inner = _area(_clipped(a, b)) if len(a) > 2 and len(b) > 2 else 0.0
    union = _area(a) + _area(b) - inner
    return inner / union if union > 0 else 0.0


def _side(a: Point, b: Point, c: Point) -> float:
    """Above 0 where c is on the left of the way from a to b."""
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])


def _hull(points: Sequence[Point]) -> list[Point]:
    """The corners of the convex hull, to the left around it."""
    halves: list[list[Point]] = []
    for ordered in (sorted(set(points)), sorted(set(points), reverse=True)):
        half: list[Point] = []
        for point in ordered:
            while len(half) > 1 and _side(half[-2], half[-1], point) <= 0:
                half.pop()
            half.append(point)
        halves.append(half[:-1])
    return halves[0] + halves[1]


def _clipped(polygon: list[Point], by: Sequence[Point]) -> list[Point]:
    """What of a convex polygon is in another one."""
    for a, b in zip(by, [*by[1:], by[0]], strict=True):
        kept: list[Point] = []
        for one, other in zip(polygon, [*polygon[1:], *polygon[:1]], strict=True):
            from_line, to_line = _side(a, b, one), _side(a, b, other)
            if from_line >= 0:
                kept.append(one)
            if from_line * to_line < 0:
                share = from_line / (from_line - to_line)
                kept.append(
                    (one[0] + share * (other[0] - one[0]), one[1] + share * (other[1] - one[1]))
                )
        polygon = kept
    return polygon


def _area(polygon: Sequence[Point]) -> float:
    pairs = zip(polygon, [*polygon[1:], *polygon[:1]], strict=True)
    return math.fsum(a[0] * b[1] - b[0] * a[1] for a, b in pairs) / 2
