"""Limits on the code that a reader must know to follow one batch or one model.

Guarantees: a batch passes few files, in both families, with and without kernels in C; importing a
family's model loads a bounded number of modules; a file above 350 lines gives its reason;
docs/architecture.md matches the code, in six boxes.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from paddle_vl.nn.operations import set_compiled
from tests.single_card_tests.train.tiny_policy_run import write_tiny_policy_run
from tests.support import forked
from tests.support.implementations import require_compiled

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kernels", ["compiled", "uncompiled"])
@pytest.mark.parametrize(("family", "most"), [("qwen3_vl", 28), ("pi07", 28)])
def test_a_batch_passes_few_files(family, most, kernels, tmp_path):
    from trace_batch import TEXT, passed_files

    if kernels == "compiled":
        require_compiled()
    else:
        set_compiled(False)
    is_policy = family == "pi07"
    run = write_tiny_policy_run(tmp_path) if is_policy else None
    passed = passed_files(run, "camera" if is_policy else TEXT)
    wanted = {f"nn/cpu/{'compiled' if kernels == 'compiled' else 'attention'}.py"}
    assert {"nn/operations.py", "train/optimizer.py", *wanted} <= set(passed)
    assert len(passed) <= most, list(passed)


@pytest.mark.parametrize(
    ("module", "most"),
    [("paddle_vl.families.qwen3_vl.model", 47), ("paddle_vl.families.pi07.policy", 63)],
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


def test_the_picture_has_six_boxes_and_every_folder_is_in_one():
    from draw_architecture import BOXES, box_of, folders

    assert len(BOXES) == 6
    assert {box_of(folder) for folder in folders()} == set(BOXES)
    with pytest.raises(ValueError, match="paddle_vl/other is in no box: add it to BOXES"):
        box_of("other")


def test_the_architecture_page_is_up_to_date():
    done = forked.run([str(ROOT / "tools" / "draw_architecture.py"), "--check"])
    assert done.returncode == 0, done.stderr
