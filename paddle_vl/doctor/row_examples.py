"""Examples of operations on token rows: sums, norms, products, rotary embedding, experts."""

from collections.abc import Callable

import numpy as np
import paddle

from paddle_vl.doctor.example import Inputs, Sizes, example, normal
from paddle_vl.nn.experts import GroupSizes
from paddle_vl.nn.rotary import RotaryTables, inverse_frequencies


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


@example("add_rms_norm")
def _add_rms_norm(rng: np.random.Generator, sizes: Sizes) -> Inputs:
    x, weight = _norm_inputs(rng, sizes)
    return Inputs((x, normal(rng, sizes.rows, sizes.width), weight, 1e-6))


@example("gelu")
def _gelu(rng: np.random.Generator, sizes: Sizes) -> Inputs:
    return Inputs((normal(rng, sizes.rows, sizes.width), False))


@example("gelu.tanh")
def _gelu_tanh(rng: np.random.Generator, sizes: Sizes) -> Inputs:
    return Inputs((normal(rng, sizes.rows, sizes.width), True))


@example("swiglu")
def _swiglu(rng: np.random.Generator, sizes: Sizes) -> Inputs:
    def exact(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        return gate / (1 + np.exp(-gate)) * up

    gate, up = (normal(rng, sizes.rows, 3 * sizes.width) for _ in range(2))
    return Inputs((gate, up), exact=exact)


@example("swiglu.halves")
def _swiglu_of_halves(rng: np.random.Generator, sizes: Sizes) -> Inputs:
    return Inputs((normal(rng, sizes.rows, 6 * sizes.width),))


@example("geglu")
def _geglu(rng: np.random.Generator, sizes: Sizes) -> Inputs:
    return Inputs(tuple(normal(rng, sizes.rows, 3 * sizes.width) for _ in range(2)))


@example("geglu.halves")
def _geglu_of_halves(rng: np.random.Generator, sizes: Sizes) -> Inputs:
    return Inputs((normal(rng, sizes.rows, 6 * sizes.width),))


@example("times_constant")
def _times_constant(rng: np.random.Generator, sizes: Sizes) -> Inputs:
    x, constant = normal(rng, sizes.rows, sizes.width), rng.random([sizes.rows, 1], np.float32)
    return Inputs((x, constant), tables=(1,), exact=np.multiply)


@example("split_columns")
def _split_columns(rng: np.random.Generator, sizes: Sizes) -> Inputs:
    widths = [sizes.width, sizes.width // 2, sizes.width // 2]
    return Inputs((normal(rng, sizes.rows, sum(widths)), widths))


@example("dropout")
def _dropout(rng: np.random.Generator, sizes: Sizes) -> Inputs:
    # Devices drop other entries, so what can be compared is that none is dropped.
    return Inputs((normal(rng, sizes.rows, sizes.width), 0.0), exact=lambda x, p: x)


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
    group_sizes: Callable[[], GroupSizes] = lambda: GroupSizes(  # noqa: E731
        paddle.to_tensor(counts.astype(np.int64))
    )
    return Inputs(
        (normal(rng, sizes.rows, sizes.width), weight, group_sizes),
        work=2 * sizes.rows * sizes.width * inner,
    )
