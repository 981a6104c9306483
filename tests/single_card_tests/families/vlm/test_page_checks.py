"""Checks of olmOCR-bench: each of its types, and those that are refused."""

import pytest

from paddle_vl.families.vlm.evaluation.metrics import Scored, metric_named
from paddle_vl.families.vlm.evaluation.page_checks import passes

PAGE = "The **harbour** of Kiel\nhad \u201c1,200\u201d ships - see_also_ the café.<br>Page 7"
HTML = (
    '<table><tr><th colspan="2">Ships</th></tr><tr><td>Kiel</td><td>12</td></tr>'
    "<tr><td>Lübeck</td><td>3</td></tr></table>"
)
MARKDOWN = "| Port | Ships |\n|---|---:|\n| Kiel | 12 |\n| Lübeck | 3 |\n"
OTSL = "<fcel>Ships<lcel><nl><fcel>Kiel<fcel>12<nl><fcel>Lübeck<fcel>3<nl>"


def present(text: str, **more) -> dict:
    return {"type": "present", "text": text, **more}


def cell(text: str, **more) -> dict:
    return {"type": "table", "cell": text, **more}


@pytest.mark.parametrize(
    ("answer", "row", "wanted"),
    [
        (PAGE, present('harbour of Kiel had "1,200" ships'), True),
        (PAGE, present("kiel"), False),
        (PAGE, present("kiel", case_sensitive=False), True),
        (PAGE, present("habour of Keil", max_diffs=2), False),
        (PAGE, present("habour of Keil", max_diffs=3), True),
        (PAGE, present("seealso the cafe\u0301."), True),
        (PAGE, present("harbour", first_n=10), False),
        (PAGE, present("Page 7", first_n=10, last_n=8), True),
        ("", present("Kiel"), False),
        (PAGE, present("Page 7") | {"type": "absent"}, False),
        (PAGE, present("Page 8") | {"type": "absent"}, True),
        ("", present("Page 8") | {"type": "absent"}, True),
        (PAGE, {"type": "order", "before": "harbour", "after": "ships"}, True),
        (PAGE, {"type": "order", "before": "ships", "after": "harbour"}, False),
        (PAGE, {"type": "order", "before": "ships", "after": "boats"}, False),
        # What is found at one place only does not follow itself.
        (PAGE, {"type": "order", "before": "ships", "after": "shops", "max_diffs": 2}, False),
        *((table, cell("12", left="Kiel", down="3"), True) for table in (HTML, MARKDOWN, OTSL)),
        *((table, cell("3", top_heading="Ships"), True) for table in (HTML, MARKDOWN, OTSL)),
        *((table, cell("3", up="Ships"), False) for table in (HTML, MARKDOWN, OTSL)),
        (HTML, cell("Kiel", up="Ships", right="12"), True),
        (HTML, cell("3", left_heading="Lubeck", max_diffs=1), True),
        (HTML, cell("12", right="Kiel"), False),
        (MARKDOWN, cell("---"), False),
        (f"{HTML}\n{MARKDOWN}", cell("Kiel", up="Port"), True),
        ("Kiel 12", cell("Kiel"), False),
        # At most half of a cell may differ.
        (HTML, cell("abcd", max_diffs=4), False),
        ('<table><tr><td colspan="9999" rowspan="9999">a', cell("a"), False),
        (PAGE, {"type": "baseline"}, True),
        ("-- .", {"type": "baseline"}, False),
        ("text " + "ab" * 31, {"type": "baseline"}, False),
        ("text " + "ab" * 30, {"type": "baseline"}, True),
        ("Kiel 港", {"type": "baseline"}, False),
        ("Kiel 港", {"type": "baseline", "check_disallowed_characters": False}, True),
        ("7", {"type": "baseline", "max_length": 1}, True),
        ("17 a", {"type": "baseline", "max_length": 2}, False),
    ],
)
def test_what_a_row_says_of_a_page(answer, row, wanted):
    row = {"pdf": "a.pdf", "page": 1, "id": "a_1", **row}
    assert passes(answer, row) is wanted
    assert metric_named("olmocr").own(Scored(answer, ["a_1"], row)) == {"olmocr": wanted}


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"type": "math", "math": "x"}, "'a_1' has the type 'math', and there are present, absent"),
        ({"type": "footnote", "marker": "1"}, "has the type 'footnote'"),
        ({"question": "?"}, r"has the type None, .*leave others out with `where: {type: \[..\]}`"),
        ({"type": "present"}, r"of type present has a value that is missing .*\('text'\)"),
        ({"type": "order", "before": "x", "after": " "}, r"missing or .*\('after'\)"),
        ({"type": "present", "text": 7}, "of another kind"),
        ({"type": "table", "cell": "x", "max_diffs": -1}, "max_diffs is -1, and must be a number"),
    ],
)
def test_rows_that_are_no_check_are_refused(row, told):
    with pytest.raises(ValueError, match=told):
        passes("x", {"id": "a_1", **row})
