"""The plots of docs/images are drawn from the tables of the pages.

Guarantees: every plot finds its table and is drawn; a page shows it; a
missing table and an unknown figure are refused by name.
"""

import re
import sys
from pathlib import Path

import pytest

import draw_figures

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", draw_figures.FIGURES)
def test_a_figure_is_drawn_from_its_table_and_shown_in_a_page(name, tmp_path):
    draw_figures.FIGURES[name]().savefig(tmp_path / "figure.png", dpi=50)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md")]
    assert any(f"(images/{name}.png)" in page for page in pages)


def test_bad_input_is_refused(monkeypatch, capsys):
    with pytest.raises(ValueError, match=re.escape("docs/export.md has no table that begins")):
        draw_figures.tables("export.md", "| nothing |")
    monkeypatch.setattr(sys, "argv", ["draw_figures.py", "nothing"])
    with pytest.raises(SystemExit):
        draw_figures.main()
    assert "nothing: the figures are pretraining" in capsys.readouterr().err
