"""The API reference.

Guarantees: every module has a page, the first page has the public names, and a pdoc warning fails
the build.
"""

from pathlib import Path

import pytest

import paddle_vl
from tests.support import forked

ROOT = Path(__file__).parents[3]


@pytest.mark.heavy
def test_every_module_has_a_page(tmp_path):
    tool = ROOT / "tools" / "build_api_docs.py"
    done = forked.run([str(tool), "--output", str(tmp_path), "--text-only"])
    assert done.returncode == 0, done.stderr
    package = Path(paddle_vl.__file__).parent
    for file in package.rglob("*.py"):
        if file.name == "__main__.py":
            continue
        name = file.relative_to(package.parent).with_suffix("").as_posix()
        page = tmp_path / f"{name.removesuffix('/__init__')}.html"
        assert page.is_file(), page
    first = (tmp_path / "paddle_vl.html").read_text(encoding="utf-8")
    for name in paddle_vl.__all__:
        assert f'id="{name}"' in first
