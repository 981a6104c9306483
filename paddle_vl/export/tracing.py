"""Tracing layers into programs: operations by plain implementations, or by kernels for programs.

A program has no gradient, and its kernels are compositions of Paddle's operations.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import Tensor
from paddle.jit.dy2static.program_translator import FunctionCache, convert_to_static

from paddle_vl.batch import rows, visual_index
from paddle_vl.families.vlm.modeling.embedding_inputs import visual_inputs
from paddle_vl.nn.attention import RotaryTables, apply_rotary
from paddle_vl.nn.dispatch import Operation, operation, use_kernels
from paddle_vl.nn.operations import layer_norm, swiglu
from paddle_vl.nn.transfer import HostTable

_kernels: Mapping[Operation, Callable[..., Any]] = {}

# They choose by themselves; a converted function would have copies of its module's variables. And
# conditions about shapes, not about values.
for _chooses in (Operation, HostTable, operation, visual_inputs):
    paddle.jit.not_to_static(_chooses)
# Likewise about shapes.
paddle.jit.ignore_module([rows, visual_index])


@contextmanager
def tracing() -> Iterator[None]:
    """Inside the block, layers with operations can be traced by `paddle.jit.to_static`."""

    def program_kernel(of: Operation) -> Callable[..., Any]:
        # A function that is called through a reference is not converted by itself: free sizes would
        # be -1 in it.
        return convert_to_static(_kernels.get(of, of.plain))

    cached: Any = FunctionCache
    converted: dict[Any, Any] = {}

    def convert_once(cache: FunctionCache, function: Any) -> Any:
        # A method is another object at each use, and was converted for each layer and each call.
        function = getattr(function, "__func__", function)
        if function not in converted:
            converted[function] = convert(cache, function)
        return converted[function]

    # A table that was made in eager mode would become a parameter.
    kept, HostTable.is_kept = HostTable.is_kept, False
    convert, cached._convert = cached._convert, convert_once
    try:
        with use_kernels(program_kernel):
            yield
    finally:
        cached._convert = convert
        HostTable.is_kept = kept


@contextmanager
def kernels_for_cpu() -> Iterator[None]:
    """Programs that are traced in the block have kernels that are fast on a CPU."""
    global _kernels
    before, _kernels = _kernels, CPU_KERNELS
    try:
        with paddle.no_grad():
            yield
    finally:
        _kernels = before


def _layer_norm(x: Tensor, weight_C: Tensor, bias_C: Tensor, epsilon: float) -> Tensor:
    """Paddle's own kernel, whose forward pass is thirteen times as fast as the composition."""
    return F.layer_norm(x, weight_C.shape, weight_C, bias_C, epsilon)


def _apply_rotary(q_TNH: Tensor, k_TKH: Tensor, tables: RotaryTables) -> tuple[Tensor, Tensor]:
    """Tables of full shape; nothing else, since a program may run where products round (TF32)."""
    tables.prepare([q_TNH.shape[-2], k_TKH.shape[-2]])
    return apply_rotary.plain(q_TNH, k_TKH, tables)


def _swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Two kernels with vector instructions are faster than the fused one without them."""
    if up is None:
        gate, up = gate.chunk(2, axis=-1)
    return F.silu(gate) * up


# Paddle's own RMS norm is compiled for AVX-512: it ends a process on other processors.
CPU_KERNELS: Mapping[Operation, Callable[..., Any]] = {
    layer_norm: _layer_norm,
    apply_rotary: _apply_rotary,
    swiglu: _swiglu,
}
