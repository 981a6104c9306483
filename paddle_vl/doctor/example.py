"""Example inputs of an operation: sizes, arguments, bounds, and the table of all examples.

Shapes: T token rows, D width, N query heads, K key heads, H head width, E experts. Sizes of the
text are those of Qwen3-VL-8B per rank; a CPU takes fewer rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.doctor.check import Dtype


@dataclass(frozen=True)
class Sizes:
    """Sizes of the examples.

    Attributes:
        rows: token rows of pointwise operations and products.
        length: tokens of attention.
        width: channels of a token row.
        heads, key_heads, head_width: of attention.
    """

    rows: int
    length: int
    width: int
    heads: int
    key_heads: int
    head_width: int
    experts: int = 8


# For a comparison with the host in float32, and for timing on a GPU.
COMPARED = Sizes(512, 256, 1024, 8, 2, 128)
QUICK = Sizes(64, 48, 128, 4, 2, 32)
TIMED = Sizes(8192, 2048, 4096, 32, 8, 128)


@dataclass(frozen=True)
class Inputs:
    """Arguments of one call.

    Attributes:
        args: arrays become tensors; those of floats get gradients and the dtype under test.
        tables: places in `args` whose floats stay float32 and get no gradient.
        work: operations of products in the forward pass; 0 where memory is the limit.
        exact: the forward result from float64 arrays, where that is cheap.
    """

    args: tuple[Any, ...]
    tables: tuple[int, ...] = ()
    work: int = 0
    exact: Callable[..., np.ndarray] | None = None


@dataclass(frozen=True)
class Bounds:
    """Largest error relative to the largest entry of the reference, forward and backward."""

    float32: float = 2e-5
    bfloat16: float = 2e-2
    # Products in TF32 keep 10 bits; only of operations whose float32 uses them.
    tf32: float = 5e-3

    def of(self, dtype: str, uses_tf32: bool) -> float:
        if dtype == "bfloat16":
            return self.bfloat16
        return self.tf32 if uses_tf32 else self.float32


@dataclass(frozen=True)
class Example:
    """How to call an operation.

    Attributes:
        make: the inputs of these sizes.
        has_products: whether its float32 may run in TF32 on a GPU.
        dtypes: that it is called with; None for float32 and bfloat16.
    """

    make: Callable[[np.random.Generator, Sizes], Inputs]
    has_products: bool = False
    bounds: Bounds = Bounds()
    dtypes: tuple[Dtype, ...] | None = None


EXAMPLES: dict[str, Example] = {}


def example(name: str, **settings: Any) -> Callable:
    """Decorator: the maker of an operation's inputs, by the operation's name."""

    def add(make: Callable[[np.random.Generator, Sizes], Inputs]) -> Callable:
        EXAMPLES[name] = Example(make, **settings)
        return make

    return add


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    return np.float32(scale) * rng.standard_normal(shape, dtype=np.float32)


def tensors(inputs: Inputs, dtype: Dtype, needs_gradient: bool = True) -> list[Any]:
    """The arguments as tensors on Paddle's device."""
    made = []
    for place, value in enumerate(inputs.args):
        if isinstance(value, np.ndarray):
            is_float = value.dtype == np.float32 and place not in inputs.tables
            value = paddle.to_tensor(value)
            if is_float:
                value = value.astype(dtype)
                value.stop_gradient = not needs_gradient
        elif callable(value):
            value = value()
        made.append(value)
    return made


def nbytes(tensors_of_call: list[Tensor]) -> int:
    """Bytes of these tensors."""
    return sum(int(np.prod(x.shape)) * x.element_size() for x in tensors_of_call)
