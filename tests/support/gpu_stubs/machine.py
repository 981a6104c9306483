"""Stubs of the operators of `paddle._C_ops` that Paddle has for GPUs only, and what they pretend.

A stub takes the arguments of an operator, checks what the real kernel checks, and computes in
Paddle's own operators, so that gradients come by themselves. In a traced program, which has no
values, it returns zeros. `kernel_stub` registers one; `pretended_gpu` puts all in place. (The
stand-ins of `installed` replace Paddle's Python functions instead.)

The checks are those of Paddle 3.3.1 (`paddle/phi/kernels/gpu`) and of its flash-attention library
(`flash_attn.cu`: CHECK_FWD_EXECUTABLE, CHECK_BWD_EXECUTABLE).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import paddle

from tests.support.gpu_stubs.contract import ContractError

STUBS: dict[str, Callable[..., Any]] = {}


@dataclass(frozen=True)
class KernelCall:
    """A call of a stub.

    Attributes:
        name: of the operator.
        shapes, dtypes: of its tensors, in order; dtypes as the stub was told to take them.
        copies: number of tensors that Paddle would copy, since the kernel wants them contiguous.
        details: what else the stub tells, such as `causal`.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    copies: int
    details: dict[str, Any] = field(default_factory=dict)


@dataclass
class Machine:
    """What the stubs pretend.

    Attributes:
        capability: compute capability of the device.
        stand_in: dtype that stands for bfloat16; None to take dtypes as they are.
        flags: Paddle's flags of a GPU build.
        calls: calls of stubs so far.
    """

    capability: tuple[int, int]
    stand_in: str | None
    flags: dict[str, Any]
    calls: list[KernelCall] = field(default_factory=list)

    def dtype_of(self, x: Any) -> Any:
        """The dtype that a tensor stands for."""
        return self.meant(x.dtype)

    def meant(self, dtype: Any) -> Any:
        """The dtype that this one stands for."""
        return paddle.bfloat16 if str(dtype) == f"paddle.{self.stand_in}" else dtype

    def record(self, name: str, *tensors: Any, **details: Any) -> None:
        """Note a call with its tensors."""
        given = [x for x in tensors if x is not None]
        shapes = tuple(tuple(x.shape) for x in given)
        dtypes = tuple(str(self.dtype_of(x)).removeprefix("paddle.") for x in given)
        copies = sum(not is_traced(x) and not x.is_contiguous() for x in given)
        self.calls.append(KernelCall(name, shapes, dtypes, copies, details))


def kernel_stub(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: the stub of `paddle._C_ops.NAME`; its first argument is the `Machine`."""

    def add(stub: Callable[..., Any]) -> Callable[..., Any]:
        STUBS[name] = stub
        return stub

    return add


def require(condition: object, message: str) -> None:
    """Raise `ContractError` unless the condition holds."""
    if not condition:
        raise ContractError(message)


def is_traced(x: Any) -> bool:
    """Whether a tensor is a value of a traced program."""
    return isinstance(x, paddle.pir.Value)
