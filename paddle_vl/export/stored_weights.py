"""Weights in half precision, which the programs widen.

`paddle.jit.save` writes parameters as they are. Here each parameter of a layer is replaced by one
in the stored dtype, and the layer's attribute becomes the widened value, so that eager calls and
traced programs compute with the same rounded weights. In a program the widening is a cast. It
depends on parameters alone, so Paddle's predictor computes it once, at load: an answer costs what
it costs with float32 weights.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import paddle
from paddle import Tensor, nn
from paddle.base.framework import EagerParamBase

LARGEST_FLOAT16 = 65504.0
_WIDENED: dict[type, type] = {}
_computation: Any = "float32"


@contextmanager
def computing_in(dtype: str) -> Iterator[None]:
    """Inside the block stored weights are widened to this dtype; to float32 elsewhere."""
    global _computation
    before, _computation = _computation, dtype
    try:
        yield
    finally:
        _computation = before


def store_weights(layers: Iterable[nn.Layer], dtype: str) -> None:
    """Replace the float32 parameters of layers by ones in half precision.

    Args:
        layers: of all programs; a parameter that several have stays one parameter.

    Raises:
        ValueError: a weight is too large for float16.
    """
    kept: dict[int, Tensor] = {}
    for layer in _all_layers(layers):
        names = {name: p for name, p in _own_parameters(layer) if p.dtype == paddle.float32}
        for name, parameter in names.items():
            if id(parameter) not in kept:
                kept[id(parameter)] = _stored(parameter, dtype)
            _replace(layer, name, kept[id(parameter)])


def _all_layers(roots: Iterable[nn.Layer]) -> list[nn.Layer]:
    found = {id(one): one for root in roots for one in root.sublayers(include_self=True)}
    return list(found.values())


def _own_parameters(layer: nn.Layer) -> list[tuple[str, Tensor]]:
    """A layer's own parameters by name, with those of other layers that it holds as attributes."""
    held = [(name, value) for name, value in vars(layer).items() if _is_parameter(value)]
    return [(name, p) for name, p in layer._parameters.items() if p is not None] + held


def _is_parameter(value: Any) -> bool:
    return isinstance(value, EagerParamBase)


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
