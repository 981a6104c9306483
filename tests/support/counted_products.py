"""Counts the operations of every matrix product that a model runs, forward and backward.

It is independent of `paddle_vl.families.flops`: it reads the shapes of the products as they run,
and for attention the masks that the kernel gets.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import paddle
import paddle.nn.functional as F

from paddle_vl.nn import experts
from paddle_vl.nn.attention import apply_rotary
from paddle_vl.nn.cpu import attention
from paddle_vl.nn.operations import column_sum, gemma_rms_norm, rms_norm, rms_quotient, row_sum


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

    def counting_sum(bias, x, y):
        return counting(x, y) + bias

    def backward(*args, **kwargs):
        counts.is_in_backward = True
        run_backward(*args, **kwargs)
        counts.is_in_backward = False

    with monkeypatch.context() as patch:
        # Sums, rotations and norms are matrix products only on CPUs; run their plain forms instead.
        norms = (rms_norm, gemma_rms_norm, rms_quotient)
        for operation in (row_sum, column_sum, apply_rotary, *norms):
            patch.setattr(operation, "kernels", ())
        patch.setattr(experts, "unpermute_rows", _weighted_sum)
        patch.setattr(paddle, "matmul", counting)
        patch.setattr(paddle, "addmm", counting_sum)
        patch.setattr(paddle.Tensor, "backward", backward)
        patch.setattr(attention, "SoftmaxAttention", _Attention(counts, matmul))
        yield counts


class _Attention:
    """Replaces `SoftmaxAttention` by plain operations, and counts only the visible pairs."""

    def __init__(self, counts: Counts, matmul):
        self.counts, self.matmul = counts, matmul

    def apply(self, q_ZRH, k_ZSH, v_ZSH, parts, key_bias_Z1S):
        assert key_bias_Z1S is None
        outputs, size = [], q_ZRH.shape[0] // len(parts)
        for number, blocks in enumerate(parts):
            q, k, v = (x[number * size : (number + 1) * size] for x in (q_ZRH, k_ZSH, v_ZSH))
            of_part = [self._block(b, b.rows(q), b.keys(k), b.keys(v)) for b in blocks]
            outputs.append(paddle.concat(of_part, axis=1))
        return paddle.concat(outputs, axis=0)

    def _block(self, block, q, k, v):
        bias = paddle.zeros([q.shape[0], q.shape[1], k.shape[1]])
        if block.bias is not None:
            bias = bias + block.bias()
        out = self.matmul(
            F.softmax(self.matmul(q * q.shape[-1] ** -0.5, k, transpose_y=True) + bias), v
        )
        product = 2 * q.shape[-1] * np.count_nonzero(bias.numpy() == 0)
        self.counts.forward += 2 * product
        needs_q, needs_k, needs_v = (not x.stop_gradient for x in (q, k, v))
        gradients = (needs_q or needs_k) + needs_q + needs_k + needs_v
        _count_gradients(self.counts, out, product * gradients)
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
