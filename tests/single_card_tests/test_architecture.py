"""Limits on the code that a reader must know to follow one batch or one model.

Guarantees: a batch of Qwen3-VL passes fewer than 30 files; importing a family's model loads a
bounded number of modules; a file above 350 lines gives its reason; docs/architecture.md matches the
code.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_a_batch_passes_fewer_than_30_files():
    from trace_batch import passed_files

    passed = passed_files()
    assert {"batch/visual_index.py", "train/optimizer.py"} <= set(passed.first)
    assert len(passed.first) < 30, list(passed.first)


@pytest.mark.parametrize(
    ("module", "most"),
    [("paddle_vl.families.qwen3_vl.model", 40), ("paddle_vl.families.pi07.policy", 56)],
)
def test_the_import_closure_of_a_model_is_bounded(module, most):
    program = (
        f"import importlib, sys; importlib.import_module({module!r})\n"
        "print(*(name for name in sys.modules if name.startswith('paddle_vl.')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    loaded = done.stdout.split()
    assert module in loaded
    assert len(loaded) <= most, loaded


def test_a_file_above_350_lines_says_why():
    folders = ("paddle_vl", "tools", "tests")
    for file in (file for folder in folders for file in (ROOT / folder).rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if len(text.splitlines()) > 350:
            docstring = ast.get_docstring(ast.parse(text)) or ""
            assert "350 lines" in docstring, (
                f"{file}: above 350 lines; split it, or say in its docstring why it is one file"
            )


def test_the_architecture_page_is_up_to_date():
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "draw_architecture.py", "--check"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
