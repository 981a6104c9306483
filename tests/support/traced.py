"""Traces the programs that a GPU would run, without running them.

Paddle's CPU build can trace bfloat16 but not compute in it. Hand-written gradient functions
(`PyLayer`) are traced forward, and backward with gradients of the output dtypes. Kernels are those
of a GPU, or the plain implementations; Paddle chooses those of attention as on a GPU.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

import paddle
import paddle.incubate.nn.functional as incubate
import paddle.nn.functional as F
import pytest
from paddle.autograd import PyLayer

from paddle_vl.families.pi07 import prefix
from paddle_vl.nn import linear
from paddle_vl.nn.dispatch import OPERATIONS, Kernel
from paddle_vl.nn.experts import grouped_linear
from paddle_vl.nn.parameter_table import ParameterTable
from paddle_vl.nn.transfer import HostTable
from tests.support.gpu_stubs.pretended import pretended_gpu


def _swiglu(gate, up=None):
    # With one tensor, it takes gate and up concatenated.
    return paddle.zeros_like(gate if up is not None else gate[..., : gate.shape[-1] // 2])


def _roots(x):
    return paddle.zeros([*x.shape[:-1]], "float32")


# GPU kernels; each is traced as one operator, with what it gives on a GPU for its tensors.
KERNELS = (
    (paddle, "scatter", lambda x, *_: paddle.zeros_like(x)),
    (paddle, "index_add", lambda x, *_: paddle.zeros_like(x)),
    (F, "silu", lambda x: paddle.zeros_like(x)),
    (F, "swiglu", _swiglu),
    (F, "rms_norm", lambda x, w: (paddle.zeros_like(x), _roots(x))),
    (F, "layer_norm", lambda x, w, b: paddle.zeros_like(x)),
    (incubate, "fused_rms_norm", lambda x, w, y: (*[paddle.zeros_like(x)] * 2, _roots(x))),
    (
        incubate,
        "fused_rms_norm_ext",
        lambda x, scale: (paddle.zeros(x.shape, scale.dtype), _roots(x)),
    ),
    (
        incubate,
        "fused_rotary_position_embedding",
        lambda x, sin, cos: (paddle.zeros_like(x), None, None),
    ),
    (paddle._C_ops, "rms_norm_grad", lambda x, w, *_: (paddle.zeros_like(x), paddle.zeros_like(w))),
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
    build: Callable[[], object],
    dropped: Cast | None = None,
    chosen: Literal["gpu", "plain"] = "gpu",
) -> tuple[list[Operator], list[Cast]]:
    """The operators of what `build` computes in a static program, and its casts to float32.

    Args:
        dropped: a cast to leave out.
        chosen: the kernels to trace.

    Returns:
        Operators, those of `KERNELS` and of attention first; every `Cast` of a bfloat16 tensor.
    """
    casts: list[Cast] = []
    gpu = pretended_gpu(stand_in=None, kernels=chosen)
    with pytest.MonkeyPatch.context() as patch, _static_mode(), gpu as calls:
        program = paddle.static.Program()
        patch.setattr(paddle, "in_dynamic_mode", lambda: True)
        patch.setattr(PyLayer, "apply", classmethod(_apply_and_backward))
        for operation in OPERATIONS:
            own = [replace(kernel, run=_static(kernel.run)) for kernel in operation.kernels]
            patch.setattr(operation, "kernels", own)
        patch.setattr(HostTable, "is_kept", False)
        # Values of a program have neither attributes nor initial values.
        patch.setattr(linear, "mark_fused", lambda parameter, columns: None)
        for law in (linear.NormalColumns, prefix.UnitRows):
            patch.setattr(law, "forward", lambda self, x, block=None: self.normal(x, block))
        patch.setattr(ParameterTable, "add", lambda self, parameters, spec=None: None)
        kernels: list[Operator] = []
        for module, name, gives in KERNELS:
            patch.setattr(module, name, _as_one_operator(name, gives, kernels))
        # Its views of one buffer cannot be traced.
        products = _as_one_operator(
            "grouped_linear",
            lambda x, weight: paddle.zeros([x.shape[0], weight.shape[2]], x.dtype),
            kernels,
        )
        patch.setattr(grouped_linear, "kernels", [Kernel("gpu", "Paddle", products)])
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


def _static(run: Callable) -> Callable:
    """A kernel, or what a `PyLayer` computes."""
    layer = getattr(run, "__self__", None)
    return run if layer is None else partial(_apply_and_backward, layer)


def _apply_and_backward(cls, *args, **kwargs):
    context = _Context()
    out = cls.forward(context, *args, **kwargs)
    gradients = [paddle.ones_like(x) for x in (out if isinstance(out, tuple) else (out,))]
    cls.backward(context, *gradients)
    return out


def _as_one_operator(name: str, gives: Callable, kernels: list[Operator]) -> Callable:
    def kernel(*args, **kwargs):
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, paddle.pir.Value)]
        found = gives(*tensors)
        outputs = found if isinstance(found, tuple) else (found,)
        given = tuple(_name(x.dtype) for x in outputs if x is not None)
        kernels.append(Operator(name, tuple(_name(x.dtype) for x in tensors), given))
        return found

    return kernel


def _recorded(casts: list[Cast], dropped: Cast | None) -> Callable:
    plain = paddle.pir.Value.astype

    def astype(self, dtype):
        if str(dtype).endswith("float32") and self.dtype == paddle.bfloat16:
            frame = sys._getframe(1)
            while "/paddle_vl/" not in frame.f_code.co_filename:
                frame = frame.f_back
            file = frame.f_code.co_filename.rpartition("/paddle_vl/")[2]
            place = Cast(file, frame.f_lineno)
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
