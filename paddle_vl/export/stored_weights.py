"""Weights in half precision, which the programs widen.

`paddle.jit.save` writes parameters as they are. Here each parameter of a layer is replaced by one
in the stored dtype, and the layer's attribute becomes the widened value, so that eager calls and
traced programs compute with the same rounded weights. In a program the widening is a cast. It
depends on parameters alone, so Paddle's predictor computes it once, at load: an answer costs what
it costs with float32 weights.

Programs for GPUs compute in bfloat16, and are traced on any machine. Paddle refuses to trace an
operation in a dtype for which the installed build has no kernel. The CPU build has none in bfloat16
for four operations of the models: in the block of `in_bfloat16` they are traced on float32 copies
of their inputs, and their result is cast back. Two of them only move rows, the others are sums and
products that Paddle's own bfloat16 kernels compute in float32, too.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import paddle
from paddle import Tensor, _C_ops, nn
from paddle.base.framework import EagerParamBase

HALF = "bfloat16"
LARGEST_FLOAT16 = 65504.0
# Without bfloat16 kernels on a CPU.
_WITHOUT_HALF = ("gather_nd", "index_add", "scatter", "swiglu")
_WIDENED: dict[type, type] = {}
_computation: Any = "float32"


@contextmanager
def in_bfloat16() -> Iterator[None]:
    """Inside the block stored weights are widened to bfloat16, and layers traced in it."""
    global _computation
    operations: Any = _C_ops
    own = {name: getattr(operations, name) for name in _WITHOUT_HALF}
    try:
        for name, operation in own.items():
            setattr(operations, name, _in_float32(operation))
        _computation = HALF
        yield
    finally:
        _computation = "float32"
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


def store_weights(layers: Iterable[nn.Layer], dtype: str) -> None:
    """Replace the float32 parameters of layers by ones in half precision.

    Args:
        layers: of all programs; a parameter that several have stays one parameter.

    Raises:
        ValueError: a weight is too large for float16.
    """
    found = {id(one): one for root in layers for one in root.sublayers(include_self=True)}
    kept: dict[int, Tensor] = {}
    for layer in found.values():
        # With those of other layers that it holds as attributes.
        held = {name: x for name, x in vars(layer).items() if isinstance(x, EagerParamBase)}
        for name, parameter in {**layer._parameters, **held}.items():
            if parameter is not None and parameter.dtype == paddle.float32:
                if id(parameter) not in kept:
                    kept[id(parameter)] = _stored(parameter, dtype)
                _replace(layer, name, kept[id(parameter)])


def _stored(parameter: Tensor, dtype: Any) -> Tensor:
    if dtype == "float16" and float(parameter.abs().max()) > LARGEST_FLOAT16:
        raise ValueError(
            f"--dtype float16: weight {parameter.name} has values up to "
            f"{float(parameter.abs().max()):.3g}, above {LARGEST_FLOAT16:.0f}: use bfloat16"
        )
    return EagerParamBase.from_tensor(parameter.astype(dtype), trainable=False)


def _replace(layer: nn.Layer, name: str, weight: Tensor) -> None:
    """Give a layer the stored parameter, and its widened value under the parameter's name."""
    layer._parameters.pop(name, None)
    vars(layer).pop(name, None)
    layer.add_parameter(f"{name}_stored", weight)
    own = type(layer)
    if own not in _WIDENED:
        widened: type = type(own.__name__, (own,), {"__module__": own.__module__})
        _WIDENED[own], _WIDENED[widened] = widened, widened
    layer.__class__ = _WIDENED[own]
    if not isinstance(vars(type(layer)).get(name), property):
        setattr(type(layer), name, property(_widened(name)))


def _widened(name: str) -> Callable[[nn.Layer], Tensor | None]:
    def value(layer: nn.Layer) -> Tensor | None:
        parameters: Mapping[str, Any] = layer._parameters
        stored = parameters.get(f"{name}_stored")
        if stored is None:
            # Another instance of the class, where it is a parameter or None.
            return parameters.get(name, vars(layer).get(name))
        return paddle.cast(stored, _computation)

    return value
