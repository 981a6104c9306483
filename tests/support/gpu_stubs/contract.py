"""What the stand-ins share: checks of a kernel's contract, and a stand-in for bfloat16.

Paddle's CPU wheel cannot compute in bfloat16. Under `halves_are("float64")` float64 has its place:
a stand-in takes float64 where a kernel takes bfloat16, float32 stays float32, and the numbers are
at least as exact.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import paddle
from paddle import Tensor

_half: str = "bfloat16"


class ContractError(AssertionError):
    """A call that the kernel on a GPU would refuse, or answer wrongly."""


def need(fits: bool, kernel: str, wanted: str, **found: Any) -> None:
    """Raise a `ContractError` unless the call fits."""
    if not fits:
        shown = ", ".join(f"{name} {_shown(value)}" for name, value in found.items())
        raise ContractError(f"{kernel} needs {wanted}; found {shown}")


def is_float32(x: Tensor) -> bool:
    return x.dtype == paddle.float32


def is_half(x: Tensor) -> bool:
    """Whether a tensor has the dtype that stands for bfloat16."""
    return _name(x.dtype) == _half


@contextmanager
def halves_are(dtype: str) -> Iterator[None]:
    """Inside the block this dtype stands for bfloat16."""
    global _half
    before, _half = _half, dtype
    try:
        yield
    finally:
        _half = before


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{_name(value.dtype)} {list(value.shape)}"
    return str(value)


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("paddle.")
