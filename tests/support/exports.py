"""What an exported program consists of."""

import json
from pathlib import Path
from typing import Any

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
