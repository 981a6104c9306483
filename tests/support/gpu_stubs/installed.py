"""Puts the stand-ins in the places of Paddle's functions."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import paddle
import pytest
from paddle import _C_ops
from paddle.incubate.nn import functional as incubate
from paddle.nn import functional as F

from paddle_vl.nn import dispatch
from tests.support.gpu_stubs import norms, products, rotary


class Standin(NamedTuple):
    """A stand-in, and Paddle's function in whose place it is."""

    module: Any
    name: str
    standin: Callable[..., Any]
    own: Callable[..., Any]


# Names of the stand-ins that were called, in order.
CALLS: list[str] = []
STANDINS = tuple(
    Standin(module, name, standin, getattr(module, name))
    for module, name, standin in (
        (F, "rms_norm", norms.rms_norm),
        (F, "layer_norm", norms.layer_norm),
        (incubate, "fused_rms_norm_ext", norms.fused_rms_norm_ext),
        (incubate, "fused_rms_norm", norms.fused_rms_norm),
        (incubate, "batched_gemm", products.batched_gemm),
        (incubate, "fused_rotary_position_embedding", rotary.fused_rotary_position_embedding),
        (_C_ops, "rms_norm_grad", norms.rms_norm_grad),
    )
)


@contextmanager
def gpu_stubs() -> Iterator[None]:
    """Inside the block `use_kernels("gpu")` runs on a CPU. With a GPU build it changes nothing."""
    if paddle.is_compiled_with_cuda():
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        for one in STANDINS:
            patch.setattr(one.module, one.name, _on_gpu(one))
        yield


def _on_gpu(one: Standin) -> Callable[..., Any]:
    """The stand-in where kernels of a GPU are forced, else Paddle's own function."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if dispatch._forced != "gpu":
            return one.own(*args, **kwargs)
        CALLS.append(one.name)
        return one.standin(*args, **kwargs)

    return call
