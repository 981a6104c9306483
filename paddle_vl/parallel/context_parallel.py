"""Context parallelism: ranks with slices of the same samples, also in attention.

A rank's queries are its rows of a slice, and its keys and values those of all ranks: they are
all-gathered before attention, in backward their gradients are reduce-scattered. Which rows see a
key is known from the batch (`paddle_vl.batch.row_slices`), so keys keep the order of the gather.

Sent per rank and layer: `(C - 1) / C * T * 2 K H` values in forward and as many in backward; again
as many as in forward if attention is recomputed.

Shapes: C ranks, T token rows of a micro-batch, Q = T / C; K key heads of this rank, H head width.
"""

from typing import Any

import paddle
import paddle.distributed as dist
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_vl.nn.attention import PackedSamples, masked_attention
from paddle_vl.nn.attention_masks import SliceMask
from paddle_vl.nn.placement import Context
from paddle_vl.parallel.collectives import all_reduced
from paddle_vl.parallel.sharding.buckets import Pending


class ContextGroup(Context):
    """One rank of a group that has the rows of the same samples between them.

    Args:
        group: of these ranks.
        cp_mp_group: those and their mp groups.
    """

    def __init__(self, group: Any, cp_mp_group: Any):
        self.group, self.cp_mp_group = group, cp_mp_group
        self.rank, self.size = group.rank, group.nranks

    def attend(
        self,
        q_BLNH: Tensor,
        k_BLKH: Tensor,
        v_BLKH: Tensor,
        key_bias_BS: Tensor | None = None,
        packed: PackedSamples | SliceMask | None = None,
    ) -> Tensor:
        if not isinstance(packed, SliceMask):
            return super().attend(q_BLNH, k_BLKH, v_BLKH, key_bias_BS, packed)
        k_1TKH, v_1TKH = _GatherKeys.apply(k_BLKH, v_BLKH, self.group)
        scale = q_BLNH.shape[-1] ** -0.5
        return masked_attention(q_BLNH, k_1TKH, v_1TKH, packed, scale, "sdpa")

    def total(self, x: Tensor) -> Tensor:
        return all_reduced(x, self.group) if x.stop_gradient else _Total.apply(x, self.group)


class _GatherKeys(PyLayer):
    """Keys and values of all ranks, `[1, T, K, H]`, rank after rank; ranks use them differently."""

    @staticmethod
    def forward(ctx, k_1QKH, v_1QKH, group):
        ctx.group, ctx.needs = group, [not x.stop_gradient for x in (k_1QKH, v_1QKH)]
        # Both under way at once.
        started = [
            _started(dist.stream.all_gather, x, group, group.nranks) for x in (k_1QKH, v_1QKH)
        ]
        return tuple(pending.result().unsqueeze(0) for pending in started)

    @staticmethod
    def backward(ctx, *grads):
        group = ctx.group
        started = [
            _started(dist.stream.reduce_scatter, grad, group, 1 / group.nranks) if needed else None
            for grad, needed in zip(grads, ctx.needs, strict=True)
        ]
        return tuple(pending and pending.result().unsqueeze(0) for pending in started)


def _started(collective: Any, x_1RKH: Tensor, group: Any, factor: float) -> Pending:
    """A collective of rows under way; its result has `factor` times as many."""
    sent = x_1RKH.reshape(x_1RKH.shape[1:]).contiguous()
    received = paddle.empty([round(sent.shape[0] * factor), *sent.shape[1:]], sent.dtype)
    task = collective(received, sent, group=group, sync_op=False)
    return Pending(collective.__name__, task, received, sent)


class _Total(PyLayer):
    """All-reduce; identity in backward, since each rank goes on alike from the total."""

    @staticmethod
    def forward(ctx, x, group):
        return all_reduced(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad.clone()
