"""Wrappers of a layer's forward: activation recomputation inside, sharding outside.

The order does not depend on which was applied first. As in torch's `fully_shard`, wrapping replaces
the class of the instance by a subclass: names of parameters, attributes and `isinstance` do not
change, and existing lists of layers contain the wrapped ones.
"""

from collections.abc import Callable
from enum import IntEnum
from functools import cache, partial
from typing import Any

from paddle import nn

# Called with the forward to wrap and the layer's positional arguments.
Wrapper = Callable[..., Any]


class Level(IntEnum):
    """The order of wrappers, inner ones first."""

    # Inside a sharding unit, whose backward pass has the parameters unsharded.
    RECOMPUTE = 1
    SHARDING = 2


class WrappedLayer(nn.Layer):
    """Mixin of a wrapped layer's class.

    Attributes:
        wrappers: by level.
    """

    wrappers: dict[int, Wrapper]

    def forward(self, *inputs: Any) -> Any:
        """The layer's own forward inside all of its wrappers."""
        forward = super().forward
        for level in sorted(self.wrappers):
            forward = partial(self.wrappers[level], forward)
        return forward(*inputs)


def wrap_layer(layer: nn.Layer, level: int, wrapper: Wrapper) -> None:
    """Run each forward of a layer as `wrapper(forward, *inputs)`.

    Args:
        level: a `Level` that the layer has no wrapper of; higher levels are outside.
    """
    if not isinstance(layer, WrappedLayer):
        layer.__class__ = _wrapped_class(type(layer))
        layer.wrappers = {}
    assert level not in layer.wrappers, f"{layer.full_name()} is wrapped already"
    layer.wrappers[level] = wrapper


@cache
def _wrapped_class(kind: type[nn.Layer]) -> type[nn.Layer]:
    return type(f"Wrapped{kind.__name__}", (WrappedLayer, kind), {"__module__": kind.__module__})
