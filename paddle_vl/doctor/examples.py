"""Example inputs of every operation of `paddle_vl.nn`, at sizes of real models.

Shapes: T token rows, D width, N query heads, K key heads, H head width, E experts. Sizes of the
text are those of Qwen3-VL-8B per rank; a CPU takes fewer rows. `tests/single_card_tests/doctor`
fails where an operation has no example.
"""

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import paddle
from paddle import Tensor

import paddle_vl.nn
from paddle_vl.doctor.check import Dtype
from paddle_vl.nn.attention import MASKED_SCORE, AttentionMask, PackedSamples
from paddle_vl.nn.operations import OPERATIONS, Operation
from paddle_vl.nn.rotary import RotaryTables, inverse_frequencies


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


def missing_examples() -> list[str]:
    """Operations without an example."""
    return [
        name_of(operation) for operation in own_operations() if name_of(operation) not in EXAMPLES
    ]


def own_operations() -> list[Operation]:
    """The operations of this package, not those that a user's code has added."""
    # An operation is registered when its module is imported.
    for module in pkgutil.walk_packages(paddle_vl.nn.__path__, "paddle_vl.nn."):
        import_module(module.name)
    return [op for op in OPERATIONS if op.__module__.startswith("paddle_vl.")]


def name_of(operation: Any) -> str:
    """The name of an operation's function."""
    return operation.__name__


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


@example("row_sum")
def _row_sum(rng: np.random.Generator, sizes: Sizes) -> Inputs:
    return Inputs((normal(rng, sizes.rows, sizes.width),), exact=lambda x: x.sum(-1, keepdims=True))


@example("column_sum")
def _column_sum(rng: np.random.Generator, sizes: Sizes) -> Inputs:
    return Inputs((normal(rng, sizes.rows, sizes.width),), exact=lambda x: x.sum(0))


def _norm_inputs(rng: np.random.Generator, sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
    return normal(rng, sizes.rows, sizes.width), 1 + normal(rng, sizes.width, scale=0.2)


def _quotient(x: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon)


@example("rms_norm")
def _rms_norm(rng: np.random.Generator, sizes: Sizes) -> Inputs:
    return Inputs((*_norm_inputs(rng, sizes), 1e-6), exact=lambda x, w, e: _quotient(x, e) * w)


@example("gemma_rms_norm")
def _gemma_rms_norm(rng: np.random.Generator, sizes: Sizes) -> Inputs:
    x, weight = _norm_inputs(rng, sizes)
    return Inputs((x, weight - 1, 1e-6), exact=lambda x, w, e: _quotient(x, e) * (1 + w))


@example("rms_quotient")
def _rms_quotient(rng: np.random.Generator, sizes: Sizes) -> Inputs:
    return Inputs((normal(rng, sizes.rows, sizes.width), 1e-6), exact=_quotient)


@example("layer_norm")
def _layer_norm(rng: np.random.Generator, sizes: Sizes) -> Inputs:
    def exact(x: np.ndarray, w: np.ndarray, b: np.ndarray, e: float) -> np.ndarray:
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + e) * w + b

    bias = normal(rng, sizes.width, scale=0.1)
    return Inputs((*_norm_inputs(rng, sizes), bias, 1e-6), exact=exact)


@example("biased_linear", has_products=True)
def _biased_linear(rng: np.random.Generator, sizes: Sizes) -> Inputs:
    inner = 3 * sizes.width
    weight = normal(rng, sizes.width, inner, scale=sizes.width**-0.5)
    return Inputs(
        (normal(rng, sizes.rows, sizes.width), weight, normal(rng, inner)),
        work=2 * sizes.rows * sizes.width * inner,
        exact=lambda x, w, b: x @ w + b,
    )


@example("apply_rotary")
def _apply_rotary(rng: np.random.Generator, sizes: Sizes) -> Inputs:
    q, k = (
        normal(rng, sizes.rows, heads, sizes.head_width) for heads in (sizes.heads, sizes.key_heads)
    )
    slots = sizes.head_width // 2
    angle = np.arange(sizes.rows, dtype=np.float32)[:, None] * inverse_frequencies(slots, 5e6)
    # Made anew for each device and dtype, which it keeps copies for.
    tables: Callable[[], RotaryTables] = lambda: RotaryTables.of_angles(  # noqa: E731
        paddle.to_tensor(angle)
    )
    return Inputs((q, k, tables))


def _heads(rng: np.random.Generator, sizes: Sizes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q_BLNH, k_BLKH, v_BLKH of a batch of two."""
    q = normal(rng, 2, sizes.length, sizes.heads, sizes.head_width)
    k, v = (normal(rng, 2, sizes.length, sizes.key_heads, sizes.head_width) for _ in range(2))
    return q, k, v


def _scores_work(sizes: Sizes, share: float = 1.0) -> int:
    return int(2 * 4 * sizes.length**2 * sizes.heads * sizes.head_width * share)


@example("causal_attention", has_products=True)
def _causal_attention(rng: np.random.Generator, sizes: Sizes) -> Inputs:
    return Inputs(_heads(rng, sizes), work=_scores_work(sizes, 0.5))


@example("causal_attention.packed", has_products=True)
def _packed_attention(rng: np.random.Generator, sizes: Sizes) -> Inputs:
    length = sizes.length
    offsets = np.array([0, length // 3, length, length + length // 2, 2 * length])
    # Made anew for each dtype: its masks are tensors on the device.
    packed: Callable[[], PackedSamples] = lambda: PackedSamples(offsets, length)  # noqa: E731
    shares = np.diff(offsets) / length
    work = _scores_work(sizes, 0.25 * float((shares**2).sum()))
    return Inputs((*_heads(rng, sizes), None, packed), work=work)


@example("causal_attention.padded", has_products=True)
def _padded_attention(rng: np.random.Generator, sizes: Sizes) -> Inputs:
    bias = np.zeros([2, sizes.length], np.float32)
    bias[1, : sizes.length // 4] = MASKED_SCORE
    # Queries that see no key have no defined result, so the second row starts with its first key.
    bias[1, 0] = 0.0
    return Inputs((*_heads(rng, sizes), bias), tables=(3,), work=_scores_work(sizes, 0.5))


@example("causal_attention.cached", has_products=True)
def _cached_attention(rng: np.random.Generator, sizes: Sizes) -> Inputs:
    q, k, v = _heads(rng, sizes)
    return Inputs((q[:, -4:].copy(), k, v), work=_scores_work(sizes, 4 / sizes.length))


@example("equal_segments_attention", has_products=True)
def _segments(rng: np.random.Generator, sizes: Sizes) -> Inputs:
    count, rows = 4, sizes.length // 4
    q, k, v = (normal(rng, count * rows, sizes.heads, sizes.head_width) for _ in range(3))
    work = 4 * count * rows**2 * sizes.heads * sizes.head_width
    return Inputs((q, k, v, count, rows), work=work)


def _masked(rng: np.random.Generator, sizes: Sizes, implementation: str) -> Inputs:
    visible = rng.random([2, sizes.length, sizes.length]) < 0.7
    visible[:, :, 0] = True
    mask: Callable[[], AttentionMask] = lambda: AttentionMask(paddle.to_tensor(visible))  # noqa: E731
    args = (*_heads(rng, sizes), mask, sizes.head_width**-0.5, implementation)
    return Inputs(args, work=_scores_work(sizes))


@example("eager_or_sdpa_attention", has_products=True)
def _eager(rng: np.random.Generator, sizes: Sizes) -> Inputs:
    return _masked(rng, sizes, "eager")


@example("eager_or_sdpa_attention.sdpa", has_products=True)
def _sdpa(rng: np.random.Generator, sizes: Sizes) -> Inputs:
    return _masked(rng, sizes, "sdpa")


def _permutation(rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    order = rng.permutation(rows)
    return order, np.argsort(order)


@example("reorder_rows")
def _reorder_rows(rng: np.random.Generator, sizes: Sizes) -> Inputs:
    order, inverse = _permutation(rng, sizes.rows)
    return Inputs((normal(rng, sizes.rows, sizes.width), order, inverse))


@example("_permuted")
def _permuted(rng: np.random.Generator, sizes: Sizes) -> Inputs:
    copies = 2
    order, place = _permutation(rng, sizes.rows * copies)
    return Inputs((normal(rng, sizes.rows, sizes.width), order, place, copies))


@example("grouped_linear", has_products=True)
def _grouped_linear(rng: np.random.Generator, sizes: Sizes) -> Inputs:
    inner = sizes.width // 2
    counts = rng.multinomial(sizes.rows, np.full(sizes.experts, 1 / sizes.experts))
    # An expert without rows, as happens.
    counts[1], counts[0] = 0, counts[0] + counts[1]
    weight = normal(rng, sizes.experts, sizes.width, inner, scale=sizes.width**-0.5)
    return Inputs(
        (normal(rng, sizes.rows, sizes.width), weight, counts.astype(np.int64)),
        work=2 * sizes.rows * sizes.width * inner,
    )


def variants(operation: Operation) -> Mapping[str, Example]:
    """The operation's examples: its own, and further forms of the call as `NAME.FORM`."""
    name = name_of(operation)
    return {key: value for key, value in EXAMPLES.items() if key.split(".")[0] == name}


def nbytes(tensors_of_call: list[Tensor]) -> int:
    """Bytes of these tensors."""
    return sum(int(np.prod(x.shape)) * x.element_size() for x in tensors_of_call)
