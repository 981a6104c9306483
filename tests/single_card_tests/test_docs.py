"""The documentation.

Guarantees: every test named in docs/ exists.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_tests_that_the_docs_name_exist():
    tests = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    for page in sorted((ROOT / "docs").glob("*.md")):
        named = set(re.findall(r"`(test_\w+)`", page.read_text(encoding="utf-8")))
        assert named <= tests, page.name
