"""Weights in half precision or int8, which the programs widen.

`paddle.jit.save` writes parameters as they are. Here each parameter of a layer is replaced by one
in the stored dtype, and the layer's attribute becomes the widened value, so that eager calls and
traced programs compute with the same rounded weights. In a program the widening is a cast, and for
int8 a product with the scales. It depends on parameters alone, so Paddle's predictor computes it
once, at load: an answer costs what it costs with float32 weights.

int8 is symmetric, with one scale per output channel: `weight = int8 * scale`,
`scale = max |weight| / 127` over the input features. This is `weight_only_int8` of Paddle's
`weight_quantize`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import Tensor, nn
from paddle.base.framework import EagerParamBase

LARGEST_FLOAT16 = 65504.0
_WIDENED: dict[type, type] = {}
_computation: Any = "float32"


class StoredWeight(NamedTuple):
    """A parameter as it is in the file.

    Attributes:
        values: in half precision, or int8.
        scale: of int8 values, float32, broadcast over them; None otherwise.
    """

    values: Tensor
    scale: Tensor | None

    def widened(self) -> Tensor:
        """In the dtype of the computation, see `computing_in`."""
        if self.scale is None:
            return paddle.cast(self.values, _computation)
        # Paddle does not multiply a value of a program by a parameter with `*`.
        wide = paddle.multiply(paddle.cast(self.values, "float32"), self.scale)
        return wide if _computation == "float32" else paddle.cast(wide, _computation)


@contextmanager
def computing_in(dtype: str) -> Iterator[None]:
    """Inside the block stored weights are widened to this dtype; to float32 elsewhere."""
    global _computation
    before, _computation = _computation, dtype
    try:
        yield
    finally:
        _computation = before


def store_weights(
    layers: Iterable[nn.Layer], dtype: str, quantized: Iterable[tuple[Tensor, int]] = ()
) -> None:
    """Replace the float32 parameters of layers by stored ones.

    Args:
        layers: of all programs; a parameter that several have stays one parameter.
        dtype: of what is not quantized; `float32` leaves it as it is.
        quantized: matrices that get int8 weights, each with the dim of its input features.

    Raises:
        ValueError: a weight is too large for float16.
    """
    kept: dict[int, StoredWeight | None] = {}
    axes = {id(parameter): axis for parameter, axis in quantized}
    for layer in _all_layers(layers):
        names = {name: p for name, p in _own_parameters(layer) if p.dtype == paddle.float32}
        for name, parameter in names.items():
            if id(parameter) not in kept:
                kept[id(parameter)] = _stored(parameter, dtype, axes.get(id(parameter)))
            weight = kept[id(parameter)]
            if weight is not None:
                _replace(layer, name, weight)


def _all_layers(roots: Iterable[nn.Layer]) -> list[nn.Layer]:
    found = {id(one): one for root in roots for one in root.sublayers(include_self=True)}
    return list(found.values())


def _own_parameters(layer: nn.Layer) -> list[tuple[str, Tensor]]:
    """A layer's own parameters by name, with those of other layers that it holds as attributes."""
    held = [(name, value) for name, value in vars(layer).items() if _is_parameter(value)]
    return [(name, p) for name, p in layer._parameters.items() if p is not None] + held


def _is_parameter(value: Any) -> bool:
    return isinstance(value, EagerParamBase)


def _stored(parameter: Tensor, dtype: Any, input_axis: int | None) -> StoredWeight | None:
    if input_axis is not None:
        values, scale = quantize(parameter.numpy(), input_axis)
        return StoredWeight(
            _parameter(paddle.to_tensor(values)), _parameter(paddle.to_tensor(scale))
        )
    if dtype == "float32":
        return None
    if dtype == "float16" and float(parameter.abs().max()) > LARGEST_FLOAT16:
        raise ValueError(
            f"--dtype float16: weight {parameter.name} has values up to "
            f"{float(parameter.abs().max()):.3g}, above {LARGEST_FLOAT16:.0f}: use bfloat16"
        )
    return StoredWeight(_parameter(parameter.astype(dtype)), None)


def quantize(weight: np.ndarray, input_axis: int) -> tuple[np.ndarray, np.ndarray]:
    """int8 values and float32 scales, of size 1 along the input features."""
    largest = np.abs(weight).max(axis=input_axis, keepdims=True)
    scale = np.where(largest > 0, largest / 127, 1).astype(np.float32)
    return np.rint(weight / scale).clip(-127, 127).astype(np.int8), scale


def _parameter(value: Tensor) -> EagerParamBase:
    return EagerParamBase.from_tensor(value, trainable=False)


def _replace(layer: nn.Layer, name: str, weight: StoredWeight) -> None:
    """Give a layer the stored parameter, and its widened value under the parameter's name."""
    layer._parameters.pop(name, None)
    vars(layer).pop(name, None)
    layer.add_parameter(f"{name}_stored", weight.values)
    if weight.scale is not None:
        layer.add_parameter(f"{name}_scale", weight.scale)
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
        return StoredWeight(stored, parameters.get(f"{name}_scale")).widened()

    return value
