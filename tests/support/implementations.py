"""Implementations of the operations of `paddle_vl.nn` that golden cases run with."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import pytest

from paddle_vl.nn.cpu import compiled, compiler
from paddle_vl.nn.dispatch import has_compiled, set_compiled, use_kernels
from tests.support.gpu_stubs import pretended


def implementation(name: str) -> AbstractContextManager[Any]:
    """`compiled`; `cpu`, the kernels without those; or what `gpu_stubs.pretended.implementation`
    has."""
    if name in ("cpu", "compiled"):
        return _on_cpu(name == "compiled")
    return pretended.implementation(name)


@contextmanager
def _on_cpu(are_compiled: bool) -> Iterator[None]:
    before = has_compiled()
    if are_compiled:
        require_compiled()
    set_compiled(are_compiled)
    try:
        with use_kernels("cpu"):
            yield
    finally:
        set_compiled(before)


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
    set_compiled(False)
    if os.environ.get(compiled.SWITCH) != "0":
        with suppress(compiler.CompilerError):
            compiled.load()
            set_compiled(True)
