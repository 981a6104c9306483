"""What an exported program consists of, and processes that have no model code."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).parents[2]

# Operations that a program must not have: control flow by the host's choice, and the host itself.
HOST_OPERATIONS = ("if", "py_func", "memcpy_d2h", "print", "assert", "select_input")
# Their output's size depends on values, or they repeat others; a GPU's host waits for it.
_WAITS = ("while", "nonzero", "masked_select", "unique", "unique_consecutive", "bincount")
# Sizes and places that are tensors are read on the host, from this operand on.
_PLACES = {
    "slice": 1, "set_value_with_tensor": 2, "set_value_with_tensor_": 2, "set_value": 1,
    "set_value_": 1, "strided_slice": 1, "arange": 0, "full_with_tensor": 0, "expand": 1,
    "reshape": 1, "tile": 1, "full_batch_size_like": 0,
}  # fmt: skip


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


def host_waits(file: Path) -> dict[str, int]:
    """What makes the host wait for a value of a program, with its number.

    `while` and other operations whose work depends on values; and `OPERATION of INPUT` where a size
    or a place is computed from the value of an input. Sizes of tensors are known to the host.
    """
    made: dict[int, dict] = {}
    found: dict[str, int] = {}

    def count(key: str) -> None:
        found[key] = found.get(key, 0) + 1

    def sources(number: int, seen: set[int]) -> set[str]:
        """Names of the inputs whose values are in a value."""
        if number in seen or number not in made:
            return set()
        seen.add(number)
        operator = made[number]
        name = operator["#"].rpartition(".")[2]
        if name == "data":
            return {one["AT"]["D"] for one in operator["A"] if one.get("N") == "name"}
        if name.startswith("shape"):
            return set()
        return set().union(*(sources(one["%"], seen) for one in operator.get("I", [])))

    def walk(block: dict) -> None:
        for operator in block["ops"]:
            outputs = operator.get("O", [])
            for one in outputs if isinstance(outputs, list) else [outputs]:
                made[one["%"]] = operator
            name = operator["#"].rpartition(".")[2]
            if name in (*_WAITS, *HOST_OPERATIONS):
                count(name)
            operands = operator.get("I", [])
            inputs = [sources(one["%"], set()) for one in operands[_PLACES.get(name, 9999) :]]
            for source in sorted(set().union(*inputs)):
                count(f"{name} of {source}")
            for region in operator.get("regions", []):
                for inner in region["blocks"]:
                    walk(inner)

    for region in json.loads(file.read_text(encoding="utf-8"))["program"]["regions"]:
        for block in region["blocks"]:
            walk(block)
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
