"""Comparison of the compiled kernels with the plain operations, run once when they are loaded.

Small inputs of odd sizes: rows longer than a block of attention, grouped key heads, masked and
packed keys. A few milliseconds.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.nn.attention import (
    PackedSamples,
    RotaryTables,
    apply_rotary,
    causal_attention,
    eager_or_sdpa_attention,
    equal_segments_attention,
)
from paddle_vl.nn.attention_masks import MASKED_SCORE, AttentionMask, BlockMask
from paddle_vl.nn.cpu import kernels
from paddle_vl.nn.operations import (
    Operation,
    dropout,
    gemma_rms_norm,
    layer_norm,
    rms_norm,
    rms_quotient,
    use_kernels,
)

# Most error of values and gradients, relative to the largest one of a tensor.
TOLERANCE = 1e-5


class Case(NamedTuple):
    """One call: the operation, what is shown, its tensors that get gradients, and the rest.

    Attributes:
        reference: None for the plain operation.
    """

    operation: Operation
    name: str
    tensors: Sequence[Tensor]
    rest: Sequence[Any] = ()
    reference: Callable[..., Any] | None = None


def differences() -> str:
    """Names of the operations whose chosen kernels' values or gradients differ from the plain ones;
    empty if none does."""
    wrong = []
    for case in cases():
        error = largest_error(case)
        # A comparison with NaN is false.
        if not error <= TOLERANCE:
            wrong.append(f"{case.name} by {error:.1e}")
    return ", ".join(wrong)


def largest_error(case: Case) -> float:
    """Largest relative error of values and gradients, from the same random state."""
    results, state = [], paddle.get_rng_state()
    for device in ("plain", "cpu"):
        call = case.reference if device == "plain" and case.reference else case.operation
        try:
            with use_kernels(device):
                results.append(_values_and_gradients(case, call))
        finally:
            paddle.set_rng_state(state)
    errors = [
        float(np.abs(found - wanted).max() / (np.abs(wanted).max() + 1e-30))
        for wanted, found in zip(*results, strict=True)
    ]
    return float(np.max(errors))


def _values_and_gradients(case: Case, call: Callable[..., Any]) -> list[np.ndarray]:
    tensors = [x.detach() for x in case.tensors]
    for x in tensors:
        x.stop_gradient = False
    with paddle.enable_grad():
        out = call(*tensors, *case.rest)
        outputs = list(out) if isinstance(out, tuple | list) else [out]
        weights = [_draw(*y.shape, seed=50 + n) for n, y in enumerate(outputs)]
        paddle.autograd.backward(outputs, weights)
    grads = [cast(Tensor, x.grad) for x in tensors]
    return [x.numpy() for x in (*outputs, *grads)]


def _draw(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    values = np.random.default_rng(seed).normal(size=shape) * scale
    return paddle.to_tensor(values.astype(np.float32), place=paddle.CPUPlace())


def cases() -> Iterator[Case]:
    """Calls of every compiled operation."""
    rows = _draw(9, 50, seed=2)
    # Entries of several blocks of draws. Paddle's own kernel drops others.
    yield Case(dropout, "dropout", [_draw(9, 77, seed=9)], [0.4], kernels.dropout)
    weight, bias = _draw(50, seed=4), _draw(50, seed=5)
    yield Case(rms_norm, "rms_norm", [rows, weight], [1e-6])
    yield Case(gemma_rms_norm, "gemma_rms_norm", [rows, weight], [1e-6])
    yield Case(rms_quotient, "rms_quotient", [rows], [1e-6])
    yield Case(layer_norm, "layer_norm", [rows, weight, bias], [1e-6])
    angle = _draw(2, 3, 5, seed=6)
    tables = RotaryTables.of_angles(angle)
    heads = [_draw(2, 3, 4, 10, seed=7), _draw(2, 3, 2, 10, seed=8)]
    yield Case(apply_rotary, "apply_rotary", heads, [tables])
    yield from _attention_cases()


def _attention_cases() -> Iterator[Case]:
    length, keys = 150, 163

    def heads(rows: Sequence[int], scale: float = 2.0) -> list[Tensor]:
        return [
            _draw(*rows[:-1], count, num, 12, seed=10 + n, scale=scale)
            for n, (count, num) in enumerate([(rows[-1], 4), (rows[-1], 2), (rows[-1], 2)])
        ]

    yield Case(causal_attention, "causal attention", heads([2, length]))
    q, *_ = heads([2, length])
    _, k, v = heads([2, keys])
    hidden = np.zeros([2, keys], np.float32)
    hidden[1, -20:] = MASKED_SCORE
    masked = [q, k, v]
    yield Case(causal_attention, "causal attention with masked keys", masked,
               [paddle.to_tensor(hidden, place=paddle.CPUPlace())])  # fmt: skip
    packed = PackedSamples(np.array([0, 140, 141, 150, 220, 300]), length)
    yield Case(causal_attention, "packed attention", heads([2, length]), [None, packed])
    q, k, v = (_draw(2 * length, 3, 12, seed=20 + n) for n in range(3))
    yield Case(equal_segments_attention, "segment attention", [q, k, v], [2, length])
    visible = np.random.default_rng(30).random([2, length, keys]) < 0.5
    visible[1, 7] = False
    masks = {"masked attention": AttentionMask(paddle.to_tensor(visible, place=paddle.CPUPlace()))}
    # Blocks that see different numbers of keys; the last block sees none in one sample.
    real = np.ones([2, keys], dtype=bool)
    real[0, 30:60] = real[1, 120:] = False
    marks = np.random.default_rng(31).random([2, keys]) < 0.7
    masks["attention by blocks"] = BlockMask(*map(paddle.to_tensor, (real, marks)))
    for name, mask in masks.items():
        queries = masked if name == "masked attention" else heads([2, keys])
        for implementation in ("eager", "sdpa"):
            yield Case(eager_or_sdpa_attention, f"{name}, {implementation}", queries,
                       [mask, 0.2, implementation])  # fmt: skip
