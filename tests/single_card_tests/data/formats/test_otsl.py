"""Tables in OTSL and HTML.

Guarantees: what is right reads the same in both forms; what is not is named with its place, or
repaired for scoring as PaddleX 3.7.2 shows it.
"""

import pytest

from paddle_vl.data.formats.otsl import (
    Cell,
    Table,
    read_html,
    read_otsl,
    write_html,
    write_otsl,
)

SPANS = (
    "<fcel>Port & sea<lcel><fcel>t<nl><fcel>Kiel<lcel><ecel><nl><ucel><xcel><fcel>x < 1<nl>",
    '<table><tr><td colspan="2">Port &amp; sea</td><td>t</td></tr>'
    '<tr><td rowspan="2" colspan="2">Kiel</td><td></td></tr><tr><td>x &lt; 1</td></tr></table>',
)


@pytest.mark.parametrize(
    ("otsl", "html"),
    [SPANS, ("<ecel><nl>", "<table><tr><td></td></tr></table>")],
)
def test_a_table_reads_the_same_in_both_forms(otsl, html):
    table = read_otsl(otsl)
    assert (write_html(table), write_otsl(table)) == (html, otsl)
    assert read_html(html) == table


# Written by convert_otsl_to_html of PaddleX 3.7.2.
@pytest.mark.parametrize(
    ("otsl", "html"),
    [
        (
            "<fcel>a<fcel>b<nl><fcel>c",
            "<table><tr><td>a</td><td>b</td></tr><tr><td>c</td><td></td></tr></table>",
        ),
        (
            "<fcel>a<ecel><ecel><nl><fcel>b<nl><fcel>c<nl>",
            "<table><tr><td>a</td></tr><tr><td>b</td></tr><tr><td>c</td></tr></table>",
        ),
        (
            "<lcel><fcel>b<nl><nl><xcel><ucel>",
            '<table><tr><td></td><td rowspan="2">b</td></tr><tr><td></td></tr></table>',
        ),
        (
            "<fcel>a<lcel><nl><ucel><fcel>b<nl>",
            '<table><tr><td rowspan="2" colspan="2">a</td></tr><tr><td>b</td></tr></table>',
        ),
        ("<lcel><nl>", ""),
        ("no table", ""),
    ],
)
def test_a_broken_table_is_repaired_for_scoring_as_paddlex_shows_it(otsl, html):
    assert write_html(read_otsl(otsl, is_strict=False)) == html


@pytest.mark.parametrize(
    ("otsl", "match"),
    [
        ("<fcel>a<fcel>b<nl><fcel>c<nl>", "row 2 has 1 places and row 1 has 2"),
        ("<ecel><nl><lcel><nl>", "<lcel> in row 2, place 1 belongs to no cell"),
        ("<fcel>a<lcel><nl><ucel><fcel>b<nl>", "<fcel> in row 2, place 2 belongs to no cell"),
        ("<ecel><nl><fcel><nl>", "row 2 has no text behind <fcel>"),
        ("<fcel>a<nl><ecel>b<nl>", "row 2 has the text 'b' behind <ecel>"),
        ("Here: <fcel>a<nl>", "begins with 'Here: '"),
        ("<ucel><nl>", "has no cell"),
        ("", "has no cell"),
    ],
)
def test_a_table_of_otsl_that_is_none_is_named_with_its_place(otsl, match):
    with pytest.raises(ValueError, match=match):
        read_otsl(otsl)


@pytest.mark.parametrize(
    ("body", "match", "repaired"),
    [
        ("<tr><td>a</td><td>b</td></tr><tr><td>c</td></tr>", "no cell in row 2, column 2 of 2",
         "<fcel>a<fcel>b<nl><fcel>c<ecel><nl>"),
        ("<tr><td rowspan=3>a</td></tr>", "a rowspan that reaches row 3 of 1", "<fcel>a<nl>"),
        ("<tr><td colspan=0>a</td></tr>", "colspan '0'; a number from 1", "<fcel>a<nl>"),
        ("<tr><td>a<table></table></td></tr>", "a second table", "<fcel>a<nl>"),
        ("<tr><td>a<img></td></tr>", "the tag <img>", "<fcel>a<nl>"),
        ("<tr>b<td>a</td></tr>", "the text 'b' outside of its cells", "<fcel>a<nl>"),
        ("<tr><td>a</td><td rowspan=2>b</td></tr><tr><td colspan=2>c</td></tr>",
         "overlapping spans in row 2", "<fcel>a<fcel>b<nl><fcel>c<ucel><nl>"),
        ("<tr></tr>", "no <table> with a cell", ""),
    ],
)  # fmt: skip
def test_a_table_of_html_that_is_none_is_named_or_repaired(body, match, repaired):
    with pytest.raises(ValueError, match=match):
        read_html(f"<table>{body}</table>")
    assert write_otsl(read_html(f"<table>{body}</table>", is_strict=False)) == repaired


def test_markup_in_a_cell_of_html_leaves_its_text_and_a_break_a_blank():
    text = "<html><body><table><thead><tr><th><b>a</b><sup>2</sup><br>c</th></tr></thead></table>"
    assert read_html(text) == Table([Cell("a2 c", 0, 0)], 1, 1)


def test_a_cell_with_a_tag_of_otsl_and_spans_without_end_are_refused():
    with pytest.raises(ValueError, match="the text of a cell has <nl>"):
        write_otsl(Table([Cell("a<nl>b", 0, 0)], 1, 1))
    with pytest.raises(ValueError, match="more than 65536 places"):
        read_html("<table><tr><td rowspan=9999 colspan=9999>a</td></tr></table>", is_strict=False)
