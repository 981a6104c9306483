"""What an exported program consists of, runtimes, and processes that have no model code."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paddle_vl.export.onnx_writing import PACKAGES

MISSING = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
HAS_ONNX = not MISSING
needs_onnx = pytest.mark.skipif(
    not HAS_ONNX, reason=f"the extra onnx is not installed: {', '.join(MISSING)}"
)
# Parameters of a fixture of exported models.
RUNTIMES = ("paddle", pytest.param("onnxruntime", marks=needs_onnx))

CHECKOUT = Path(__file__).parents[2]

# Operations that a program must not have: control flow by the host's choice, and the host itself.
HOST_OPERATIONS = ("if", "py_func", "memcpy_d2h", "print", "assert", "select_input")


def operations(file: Path) -> list[str]:
    """The names of all operations of a program."""
    found = []

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            if isinstance(value.get("#"), str):
                found.append(value["#"].rpartition(".")[2])
            for one in value.values():
                walk(one)
        elif isinstance(value, list):
            for one in value:
                walk(one)

    walk(json.loads(file.read_text(encoding="utf-8")))
    return found


def output_without_model_code(
    family: str, modules: Sequence[str], script: str, folder: Path
) -> Any:
    """The JSON value that a script prints last, in a process that cannot import the model's code.

    Args:
        family: folder of the model family.
        modules: its modules that are refused, beside `nn`, `parallel` and `train`.
        folder: working directory.
    """
    refusal = f"""
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        own = [f"paddle_vl.families.{family}.{{part}}" for part in {tuple(modules)}]
        other = ("paddle_vl.nn", "paddle_vl.parallel", "paddle_vl.train")
        if name in own or name.startswith(other):
            raise ImportError(name)

sys.meta_path.insert(0, Refuse())
"""
    run = subprocess.run(
        [sys.executable, "-c", refusal + script],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])
