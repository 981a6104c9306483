"""Limits on the code that a reader must know to follow one batch or one model.

Guarantees: a batch passes few files, in both families, with and without kernels in C; importing a
family's model loads a bounded number of modules; docs/architecture.md matches the code,
in six boxes.
"""

import functools
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from paddle_vl.nn.cpu.compiled import SWITCH
from paddle_vl.nn.dispatch import set_compiled
from tests.single_card_tests.train.tiny_policy_run import write_tiny_policy_run
from tests.support.implementations import require_compiled

ROOT = Path(__file__).parents[2]


@functools.cache
def passed(family: str, kernels: str) -> dict[str, str]:
    """The files that a batch passes, each with its first function."""
    from draw_architecture import TEXT, passed_files

    if kernels == "compiled":
        require_compiled()
    else:
        with pytest.MonkeyPatch.context() as patch:
            # A run takes the compiled kernels by itself.
            patch.setenv(SWITCH, "0")
            set_compiled(False)
            return passed_files(None, TEXT)
    if family == "qwen3_vl":
        return passed_files(None, TEXT)
    with tempfile.TemporaryDirectory() as folder:
        return passed_files(write_tiny_policy_run(Path(folder)), "camera")


@pytest.mark.parametrize(
    ("family", "kernels"),
    [("qwen3_vl", "compiled"), ("qwen3_vl", "attention"), ("pi07", "compiled")],
)
def test_a_batch_passes_few_files(family, kernels):
    found = passed(family, kernels)
    assert {"nn/operations.py", "train/optimizer.py", f"nn/cpu/{kernels}.py"} <= set(found)
    assert len(found) <= 32, list(found)


MOST_IMPORTED = {"paddle_vl.families.qwen3_vl.model": 41, "paddle_vl.families.pi07.policy": 51}


def test_the_import_closure_of_a_model_is_bounded():
    """Each is imported by a fork of a process that has imported Paddle alone."""
    program = f"""
import importlib, os, sys
import paddle
for module in {list(MOST_IMPORTED)}:
    if os.fork() == 0:
        importlib.import_module(module)
        files = (n for n, m in sys.modules.items() if not hasattr(m, "__path__"))
        print(*(name for name in files if name.startswith("paddle_vl.")), flush=True)
        os._exit(0)
    os.wait()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    lines = done.stdout.splitlines()
    for (module, most), line in zip(MOST_IMPORTED.items(), lines, strict=True):
        loaded = line.split()
        assert module in loaded
        assert len(loaded) <= most, loaded


def test_the_picture_has_six_boxes_and_every_folder_is_in_one():
    from draw_architecture import BOXES, box_of, folders

    assert len(BOXES) == 6
    assert {box_of(folder) for folder in folders()} == set(BOXES)
    with pytest.raises(ValueError, match="paddle_vl/other is in no box: add it to BOXES"):
        box_of("other")


def test_the_architecture_page_is_up_to_date(monkeypatch):
    import draw_architecture as tool

    monkeypatch.setattr(tool, "passed_files", lambda: passed("qwen3_vl", "compiled"))
    page = tool.PAGE.read_text(encoding="utf-8")
    made = tool.written(tool.written(page, "picture", tool.picture()), "path", tool.path())
    assert made == page, "run python tools/draw_architecture.py"
