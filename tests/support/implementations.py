"""Implementations of the operations of `paddle_vl.nn` that golden cases run with."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import pytest

from paddle_vl.nn.cpu import compiled, compiler
from paddle_vl.nn.operations import set_compiled, use_kernels
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


def take_compiled() -> None:
    """Take the compiled kernels as commands do, where there is a compiler; without comparing them,
    which has a test of its own."""
    if os.environ.get(compiled.SWITCH) != "0":
        with suppress(compiler.CompilerError):
            compiled._library = compiled._library or compiler.load_kernels()
            set_compiled(True)
