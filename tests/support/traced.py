"""Traces the programs that a GPU would run, without running them.

Paddle's CPU build can trace bfloat16 but not compute in it. Hand-written gradient functions
(`PyLayer`) are traced forward, and backward with gradients of the output dtypes. Kernels are those
of a GPU, and Paddle chooses the kernels of attention as on one (`tests.support.gpu`).
"""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import paddle
import pytest
from paddle.autograd import PyLayer

from paddle_vl.nn.operations import OPERATIONS
from tests.support.gpu import pretended_gpu

# GPU kernels; each is traced as one operator with the dtype of its first tensor, as on a GPU.
KERNELS = (
    (paddle, "scatter"),
    (paddle, "index_add"),
    (paddle.nn.functional, "silu"),
    (paddle.nn.functional, "swiglu"),
)


class Operator(NamedTuple):
    """An operator of a traced program with the dtypes of its tensors."""

    name: str
    takes: tuple[str, ...]
    gives: tuple[str, ...]


class Cast(NamedTuple):
    """A place in the package that casts a tensor to float32."""

    file: str
    line: int


class _Context:
    """What a PyLayer keeps from its forward pass for its backward pass."""

    def save_for_backward(self, *tensors):
        self.tensors = tensors

    def saved_tensor(self):
        return self.tensors


def trace(
    build: Callable[[], object], dropped: Cast | None = None
) -> tuple[list[Operator], list[Cast]]:
    """The operators of what `build` computes in a static program, and its casts to float32.

    Args:
        dropped: a cast to leave out.

    Returns:
        Operators, those of `KERNELS` and of attention first; every `Cast` of a bfloat16 tensor.
    """
    casts: list[Cast] = []
    gpu = pretended_gpu(dtype=None)
    with pytest.MonkeyPatch.context() as patch, _static_mode(), gpu as calls:
        program = paddle.static.Program()
        patch.setattr(paddle, "in_dynamic_mode", lambda: True)
        patch.setattr(PyLayer, "apply", classmethod(_apply_and_backward))
        for operation in OPERATIONS:
            for device, kernel in operation.kernels.items():
                layer = getattr(kernel, "__self__", None)
                if layer is not None:
                    patch.setitem(operation.kernels, device, partial(_apply_and_backward, layer))
        kernels: list[Operator] = []
        for module, name in KERNELS:
            patch.setattr(module, name, _as_one_operator(name, kernels))
        patch.setattr(paddle.pir.Value, "astype", _recorded(casts, dropped))
        with paddle.static.program_guard(program, paddle.static.Program()):
            build()
        kernels += [Operator(call.name, call.dtypes, call.dtypes[:1]) for call in calls]
        return kernels + [_described(op) for op in program.global_block().ops], casts


@contextmanager
def _static_mode() -> Iterator[None]:
    paddle.enable_static()
    try:
        yield
    finally:
        paddle.disable_static()


def _apply_and_backward(cls, *args, **kwargs):
    context = _Context()
    out = cls.forward(context, *args, **kwargs)
    gradients = [paddle.ones_like(x) for x in (out if isinstance(out, tuple) else (out,))]
    cls.backward(context, *gradients)
    return out


def _as_one_operator(name: str, kernels: list[Operator]) -> Callable:
    def kernel(*args, **kwargs):
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, paddle.pir.Value)]
        dtypes = tuple(_name(x.dtype) for x in tensors)
        kernels.append(Operator(name, dtypes, dtypes[:1]))
        like = tensors[0]
        # With one tensor, swiglu takes gate and up concatenated.
        return paddle.zeros_like(
            like[..., : like.shape[-1] // 2] if (name, len(tensors)) == ("swiglu", 1) else like
        )

    return kernel


def _recorded(casts: list[Cast], dropped: Cast | None) -> Callable:
    plain = paddle.pir.Value.astype

    def astype(self, dtype):
        caller = next(
            f for f in reversed(traceback.extract_stack()[:-1]) if "/paddle_vl/" in f.filename
        )
        place = Cast(caller.filename.rpartition("/paddle_vl/")[2], caller.lineno)
        if str(dtype).endswith("float32") and self.dtype == paddle.bfloat16:
            if place == dropped:
                return self
            casts.append(place)
        return plain(self, dtype)

    return astype


def _name(dtype) -> str:
    return str(dtype).removeprefix("paddle.")


def _described(op) -> Operator:
    def dtypes(values) -> tuple[str, ...]:
        return tuple(_name(v.dtype) for v in values if v.is_dense_tensor_type())

    return Operator(
        op.name().removeprefix("pd_op."), dtypes(op.operands_source()), dtypes(op.results())
    )
