"""Counts the operations of every matrix product that a model runs, forward and backward.

It is independent of `paddle_vl.families.flops`: it reads the shapes of the products as they run,
and for attention the masks that the kernel gets.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import paddle
import paddle.nn.functional as F

from paddle_vl.nn import attention, experts
from paddle_vl.nn.attention_masks import MASKED_SCORE
from paddle_vl.nn.linear import biased_linear
from paddle_vl.nn.operations import Kernel


@dataclass
class Counts:
    """Operations of the products so far.

    Attributes:
        backward: operations for the gradients that are needed.
        is_in_backward: whether a backward pass is running.
    """

    forward: int = 0
    backward: int = 0
    is_in_backward: bool = False


@contextmanager
def counted_products(monkeypatch) -> Iterator[Counts]:
    """Count while the block runs."""
    counts, matmul, run_backward = Counts(), paddle.matmul, paddle.Tensor.backward

    def counting(x, y, transpose_x=False, transpose_y=False, **settings):
        out = matmul(x, y, transpose_x, transpose_y, **settings)
        operations = _operations(x, y, transpose_x, transpose_y)
        # Hand-written backward passes call matmul; those of autograd are computed from the forward.
        if counts.is_in_backward:
            counts.backward += operations
        else:
            counts.forward += operations
            _count_gradients(counts, out, operations * sum(not t.stop_gradient for t in (x, y)))
        return out

    def counting_linear(x, weight, bias):
        return counting(x, weight) + bias

    def backward(*args, **kwargs):
        counts.is_in_backward = True
        run_backward(*args, **kwargs)
        counts.is_in_backward = False

    with monkeypatch.context() as patch:
        patch.setattr(biased_linear, "kernels", ())
        patch.setattr(F, "linear", counting_linear)
        for name, visible in _VISIBLE.items():
            run = partial(_attend, counts, matmul, visible)
            patch.setattr(getattr(attention, name), "kernels", [Kernel("cpu", "Paddle", run)])
        patch.setattr(experts, "unpermute_rows", _weighted_sum)
        patch.setattr(paddle, "matmul", counting)
        patch.setattr(paddle.Tensor, "backward", backward)
        yield counts


def _causal(q, k, v, key_bias=None, packed=None):
    assert key_bias is None
    if packed is not None:
        return packed.mask_B1LL[:, 0] == 0
    return paddle.tril(paddle.ones([*q.shape[:2], k.shape[1]]), k.shape[1] - q.shape[1]) == 1


# Which keys each query sees, `[B, L, S]`, by operation.
_VISIBLE = {
    "causal_attention": _causal,
    "equal_segments_attention": lambda q, k, v, count, length: paddle.ones(
        [count, length, length], dtype="bool"
    ),
    "masked_attention": lambda q, k, v, mask, *others: mask.visible_BLS,
}


def _attend(counts: Counts, matmul, visible, q, k, v, *others, **settings):
    """Attention by plain operations, which counts only the visible pairs. (Its scale is that of
    most models: numbers do not matter.)"""
    visible_BLS, shape = visible(q, k, v, *others, **settings), q.shape
    q, k, v = (x.reshape([visible_BLS.shape[0], -1, *x.shape[-2:]]) for x in (q, k, v))
    groups = q.shape[2] // k.shape[2]
    k_all, v_all = (x.repeat_interleave(groups, axis=2).transpose([0, 2, 1, 3]) for x in (k, v))
    scores = matmul(q.transpose([0, 2, 1, 3]), k_all, transpose_y=True) * q.shape[-1] ** -0.5
    scores = paddle.where(visible_BLS.unsqueeze(1), scores, paddle.full([], MASKED_SCORE))
    out = matmul(F.softmax(scores), v_all).transpose([0, 2, 1, 3]).reshape(shape)
    product = 2 * q.shape[-1] * q.shape[2] * int(visible_BLS.sum())
    counts.forward += 2 * product
    needs_q, needs_k, needs_v = (not x.stop_gradient for x in (q, k, v))
    gradients = (needs_q or needs_k) + needs_q + needs_k + needs_v
    _count_gradients(counts, out, product * gradients)
    return out


def _count_gradients(counts: Counts, out, operations: int) -> None:
    if out.stop_gradient:
        return

    def count(grad):
        counts.backward += operations

    out.register_hook(count)


def _weighted_sum(y_ND, dispatch, weights_TK):
    y_TKD = experts.reorder_rows(y_ND, dispatch[1], dispatch[0]).reshape([*weights_TK.shape, -1])
    return (weights_TK.unsqueeze(-1) * y_TKD).sum(axis=1)


def _operations(x, y, transpose_x: bool, transpose_y: bool) -> int:
    inner = x.shape[-2 if transpose_x else -1]
    rows, columns = x.shape[-1 if transpose_x else -2], y.shape[-2 if transpose_y else -1]
    many = max(np.prod(x.shape[:-2]), np.prod(y.shape[:-2]))
    return 2 * int(many * rows * inner * columns)
