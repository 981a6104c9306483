"""docs/testing.md shows the rows that run, no more and no fewer."""

import re
from pathlib import Path

import pytest

from tests.routes.page import COLUMNS, ROWS, promises

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"


@pytest.mark.parametrize("name", ROWS)
def test_the_page_has_every_row(name):
    section = re.search(
        rf"<!-- benchmark {name} -->\n(.*?)<!-- end of benchmark {name} -->",
        PAGE.read_text(encoding="utf-8"),
        re.DOTALL,
    )
    assert section, name
    shown = [
        [re.sub(r" \(\d+\.\d\)", "", cell) for cell in line.strip("| \n").split(" | ")]
        for line in section[1].splitlines()
        if line.startswith("| ")
    ]
    wanted = promises((row.promised, row.way) for row in ROWS[name])
    assert [cells for cells in shown if not cells[0].startswith("---")] == [[*COLUMNS], *wanted]
