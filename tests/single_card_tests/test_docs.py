"""The documentation.

Guarantees: every test and every file of this repository that a page names exists.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_tests_that_the_docs_name_exist():
    tests = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    for page in sorted((ROOT / "docs").glob("*.md")):
        named = set(re.findall(r"`(test_\w+)`", page.read_text(encoding="utf-8")))
        assert named <= tests, page.name


def test_files_that_the_pages_name_exist():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    assert len(pages) > 8
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for name in set(re.findall(r"\b((?:paddle_vl|tools|configs|tests)/[\w/]+\.\w+)", text)):
            assert (ROOT / name).exists(), f"{page.name} names {name}"
