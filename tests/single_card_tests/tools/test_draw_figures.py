"""The plots of docs/images are drawn from the tables of the pages.

Guarantees: every plot finds its table and is drawn; a page shows it; every picture has a tool; a
number that is no median with its range, and a missing table, are refused by name.
"""

import re
import sys
from pathlib import Path

import pytest

import draw_figures

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", draw_figures.FIGURES)
def test_a_figure_is_drawn_from_its_table_and_shown_in_a_page(name, tmp_path):
    draw_figures.FIGURES[name](tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md")]
    assert any(f"(images/{name}.png)" in page for page in pages)


def test_every_picture_of_the_docs_has_a_tool():
    drawn = {f"{name}.png" for name in draw_figures.FIGURES} | {"overview.svg"}
    assert {file.name for file in (ROOT / "docs" / "images").iterdir()} == drawn


def test_bad_input_is_refused(monkeypatch, capsys):
    assert draw_figures.numbers("75 (70 to 80), 1 never") == (75, 70, 80)
    with pytest.raises(ValueError, match=re.escape("'75' is not a median with its range")):
        draw_figures.numbers("75")
    with pytest.raises(ValueError, match=re.escape("docs/export.md has no table that begins")):
        draw_figures.tables("export.md", "| nothing |")
    monkeypatch.setattr(sys, "argv", ["draw_figures.py", "nothing"])
    with pytest.raises(SystemExit):
        draw_figures.main()
    assert "nothing: the figures are profile_pi07_cpu" in capsys.readouterr().err
