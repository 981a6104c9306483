"""Outputs and inputs of layers, recorded with forward hooks, and gradients."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import paddle
from paddle import nn

from paddle_vl.checkpoint import reading

Own = TypeVar("Own", bound="Recording")


def array(value: Any) -> Any:
    """Tensors as arrays, half precision as float32; containers and tuples of them likewise."""
    if isinstance(value, paddle.Tensor):
        is_half = value.dtype in (paddle.bfloat16, paddle.float16)
        return (value.astype("float32") if is_half else value).numpy()
    if isinstance(value, dict):
        return {name: array(inner) for name, inner in value.items()}
    if hasattr(value, "_asdict"):
        return type(value)(*map(array, value))
    return type(value)(map(array, value)) if isinstance(value, tuple | list) else value


def gradients(model: Any) -> tuple[dict[str, np.ndarray], float]:
    """Every gradient of a model by its stored key, and the norm of all of them."""
    found = {
        item.key: item.layout.to_stored(item.of_own(array(item.parameter.grad)))
        for item in model.stored_parameters()
        if item.parameter.grad is not None
    }
    return found, sum(float(np.square(g, dtype=np.float64).sum()) for g in found.values()) ** 0.5


def weights(model: Any) -> dict[str, np.ndarray]:
    """Every parameter of a model by its stored key."""
    return {
        item.key: item.layout.to_stored(item.of_own(array(item.parameter)))
        for item in model.stored_parameters()
    }


@contextmanager
def noisy_weights(seed: int) -> Iterator[None]:
    """Inside the block every weight that is read is off by a factor of 1 + 1e-7 times noise."""
    rng, own = np.random.default_rng(seed), reading.own_value

    def noisy(*args: Any) -> np.ndarray:
        value = own(*args)
        return (value * (1 + 1e-7 * rng.standard_normal(value.shape))).astype(value.dtype)

    with mock.patch.object(reading, "own_value", noisy):
        yield


class Recording:
    """Context manager that records outputs and inputs of layers, in call order.

    Args:
        layers: by name; `NAME input` are the inputs.
        kept: makes what is kept of an output or of inputs, at once.
    """

    def __init__(
        self, layers: Mapping[str, nn.Layer], kept: Callable[[Any], Any] = lambda value: value
    ):
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
