"""Outputs and inputs of layers, recorded with forward hooks."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from paddle import nn

Own = TypeVar("Own", bound="Recording")


def unchanged(value: Any) -> Any:
    return value


class Recording:
    """Context manager that records outputs and inputs of layers, in call order.

    Args:
        layers: by name; `NAME input` are the inputs.
        kept: makes what is kept of an output or of inputs, at once.
    """

    def __init__(self, layers: Mapping[str, nn.Layer], kept: Callable[[Any], Any] = unchanged):
        self.calls: dict[str, list[Any]] = {}
        self._layers, self._kept = layers, kept

    def __enter__(self: Own) -> Own:
        self._hooks: list[Any] = []
        for name, layer in self._layers.items():
            # Paddle's type stub has no hooks that return None.
            post: Any = lambda layer, inputs, output, name=name: self._keep(name, output)  # noqa: E731
            pre: Any = lambda layer, inputs, name=name: self._keep(f"{name} input", inputs)  # noqa: E731
            self._hooks += [
                layer.register_forward_post_hook(post), layer.register_forward_pre_hook(pre),
            ]  # fmt: skip
        return self

    def _keep(self, name: str, value: Any) -> None:
        self.calls.setdefault(name, []).append(self._kept(value))

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()
