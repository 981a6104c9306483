"""Implementations of the operations of `paddle_vl.nn` that golden cases run with."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from paddle_vl.nn.cpu import compiled, compiler
from paddle_vl.nn.operations import use_kernels
from tests.support.gpu_stubs import pretended


def implementation(name: str) -> AbstractContextManager[Any]:
    """`compiled`, or what `gpu_stubs.pretended.implementation` has."""
    return _compiled() if name == "compiled" else pretended.implementation(name)


@contextmanager
def _compiled() -> Iterator[None]:
    require_compiled()
    try:
        with use_kernels("cpu"):
            yield
    finally:
        compiled.disable()


def require_compiled() -> None:
    """Use the compiled kernels; skips the test only if the machine has no compiler."""
    try:
        compiler.find_compiler()
    except compiler.CompilerError as error:
        pytest.skip(str(error))
    assert compiled.enable(), compiled.refusal()
