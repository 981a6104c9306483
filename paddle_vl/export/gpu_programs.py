"""Programs that compute in bfloat16, for GPUs, traced on any machine.

Paddle refuses to trace an operation in a dtype for which the installed build has no kernel. The
CPU build has none in bfloat16 for four operations of the models. In the block of `in_bfloat16` they
are traced on float32 copies of their inputs, and their result is cast back: two of them only move
rows, the others are sums and products that Paddle's own bfloat16 kernels compute in float32, too.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from paddle import Tensor, _C_ops

from paddle_vl.export.stored_weights import computing_in

HALF = "bfloat16"
_WIDENED = ("gather_nd", "index_add", "scatter", "swiglu")


@contextmanager
def in_bfloat16() -> Iterator[None]:
    """Layers with stored weights are traced in bfloat16 inside the block."""
    operations: Any = _C_ops
    own = {name: getattr(operations, name) for name in _WIDENED}
    try:
        for name, operation in own.items():
            setattr(operations, name, _in_float32(operation))
        with computing_in(HALF):
            yield
    finally:
        for name, operation in own.items():
            setattr(operations, name, operation)


def _in_float32(operation: Callable[..., Tensor]) -> Callable[..., Tensor]:
    cast: Any = _C_ops.cast

    def on_copies(*args: Any, **kwargs: Any) -> Tensor:
        is_half = [str(getattr(one, "dtype", "")).endswith(HALF) for one in args]
        wide = [cast(x, "float32") if half else x for x, half in zip(args, is_half, strict=True)]
        result = operation(*wide, **kwargs)
        return cast(result, HALF) if any(is_half) else result

    return on_copies
