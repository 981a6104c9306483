"""The operations of `paddle_vl.nn` and their examples.

`tests/single_card_tests/doctor` fails where an operation has no example.
"""

import pkgutil
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import paddle_vl.nn

# Importing them fills the table.
from paddle_vl.doctor import attention_examples, row_examples  # noqa: F401
from paddle_vl.doctor.example import EXAMPLES, Example
from paddle_vl.nn.operations import OPERATIONS, Operation


def missing_examples() -> list[str]:
    """Operations without an example."""
    return [
        name_of(operation) for operation in own_operations() if name_of(operation) not in EXAMPLES
    ]


def own_operations() -> list[Operation]:
    """The operations of this package, not those that a user's code has added."""
    # An operation is registered when its module is imported.
    for module in pkgutil.walk_packages(paddle_vl.nn.__path__, "paddle_vl.nn."):
        import_module(module.name)
    return [op for op in OPERATIONS if op.__module__.startswith("paddle_vl.")]


def name_of(operation: Any) -> str:
    """The name of an operation's function."""
    return operation.__name__


def variants(operation: Operation) -> Mapping[str, Example]:
    """The operation's examples: its own, and further forms of the call as `NAME.FORM`."""
    name = name_of(operation)
    return {key: value for key, value in EXAMPLES.items() if key.split(".")[0] == name}
