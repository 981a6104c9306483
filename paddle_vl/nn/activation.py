"""Activation functions by the names that checkpoints use, and the gated one of the decoder."""

from collections.abc import Callable

import paddle.nn.functional as F
from paddle import Tensor

_BY_NAME: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate=True),
    "silu": F.silu,
}
ACTIVATIONS = tuple(_BY_NAME)


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function a configuration's `hidden_act` names.

    Raises:
        ValueError: an unknown name, with the known ones.
    """
    if name not in _BY_NAME:
        raise ValueError(f"hidden_act is {name!r}; this package has {sorted(_BY_NAME)}")
    return _BY_NAME[name]


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """`silu(gate) * up`, in one kernel; without `up` both are halves of `gate`'s last axis."""
    return F.swiglu(gate, up)
