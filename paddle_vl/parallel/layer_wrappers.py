"""Layers whose forward runs inside of wrappers: activation recomputation, around it sharding.

The order does not depend on which was applied first. As torch's `fully_shard` does, wrapping makes
the class of the instance a subclass of what it was. Parameters keep their names, attributes and
`isinstance` work as before, and lists of layers that were made earlier have the wrapped ones.
"""

from collections.abc import Callable
from enum import IntEnum
from functools import cache, partial
from typing import Any

from paddle import nn

# Called with the forward to wrap and the layer's positional arguments.
Wrapper = Callable[..., Any]


class Level(IntEnum):
    """The order of wrappers, from the layer outwards."""

    # Recomputes inside of a sharding unit, whose backward pass has the parameters for it.
    RECOMPUTE = 1
    SHARDING = 2


class WrappedLayer(nn.Layer):
    """The class of a wrapped layer, mixed with the one it had.

    Attributes:
        wrappers: by level.
    """

    wrappers: dict[int, Wrapper]

    def forward(self, *inputs: Any) -> Any:
        """The layer's own forward in all of its wrappers."""
        forward = super().forward
        for level in sorted(self.wrappers):
            forward = partial(self.wrappers[level], forward)
        return forward(*inputs)


def wrap_layer(layer: nn.Layer, level: int, wrapper: Wrapper) -> None:
    """Run each forward of a layer as `wrapper(forward, *inputs)`.

    Args:
        level: a `Level`; wrappers of higher levels are outside.

    Raises:
        ValueError: the layer has a wrapper of this level.
    """
    if not isinstance(layer, WrappedLayer):
        layer.__class__ = _wrapped_class(type(layer))
        layer.wrappers = {}
    if level in layer.wrappers:
        raise ValueError(f"{layer.full_name()} is wrapped by {layer.wrappers[level]} already")
    layer.wrappers[level] = wrapper


@cache
def _wrapped_class(kind: type[nn.Layer]) -> type[nn.Layer]:
    return type(f"Wrapped{kind.__name__}", (WrappedLayer, kind), {"__module__": kind.__module__})
