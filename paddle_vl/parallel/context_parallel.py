"""Context parallelism: ranks with slices of the same samples, also in attention.

A rank's queries are its rows of a slice. Two ways to attend to the rows of the others:

- `gather`: keys and values of all ranks are all-gathered before attention, in backward their
  gradients are reduce-scattered. Which rows see a key is known from the batch
  (`paddle_vl.batch.row_slices`), so keys keep the order of the gather.
- `ulysses`: each rank attends for a part of the heads, with all rows in their order. Queries, keys
  and values go to the ranks of their heads, outputs return to the ranks of their rows.

Sent per rank and layer: `(C - 1) / C * T * 2 K H` values in forward by the first way, `(C - 1) / C
* Q * (2 N + 2 K) H` by the second; as many in backward, and as in forward if attention is
recomputed.

Shapes: C ranks, T token rows of a micro-batch, Q = T / C; N query heads and K key heads of this
rank's matrices, H head width.
"""

from collections.abc import Sequence
from contextlib import nullcontext
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
        exchanges_heads: `ulysses` in place of `gather`.
        hides_gather: attend with half of the key heads while those of the others are gathered.
    """

    def __init__(
        self,
        group: Any,
        cp_mp_group: Any,
        exchanges_heads: bool = False,
        hides_gather: bool = False,
    ):
        self.group, self.cp_mp_group = group, cp_mp_group
        self.rank, self.size = group.rank, group.nranks
        self.exchanges_heads, self._hides_gather = exchanges_heads, hides_gather

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
        q, k, v, heads, group = q_BLNH, k_BLKH, v_BLKH, k_BLKH.shape[2], self.group
        if not self.exchanges_heads:
            # The first part waits for its keys, and should be the smaller one.
            parts = [heads // 2, heads - heads // 2] if self._hides_gather else [heads]
            parts = [part for part in parts if part]
            return _AttendToAll.apply(q, k, v, packed, group, parts, paddle.is_grad_enabled())
        if heads < self.size:
            # Several ranks have query heads of one key head.
            k, v = (x.repeat_interleave(self.size // heads, axis=2) for x in (k, v))
        q, k, v = _Exchange.apply(packed, group, True, q, k, v)
        return _Exchange.apply(packed, group, False, _attended(q, k, v, packed))[0]

    def total(self, x: Tensor) -> Tensor:
        return all_reduced(x, self.group) if x.stop_gradient else _Total.apply(x, self.group)


class _AttendToAll(PyLayer):
    """Attention to the keys and values of all ranks, gathered rank after rank, by parts of the key
    heads: those of later parts arrive while earlier ones attend, and gradients of earlier parts
    leave while those of later ones are computed.

    Each part has a graph of its own, so that its backward pass ends before the next one begins.

    Args of `apply`:
        parts: number of key heads of each part.
        records: whether a backward pass may follow.
    """

    @staticmethod
    def forward(ctx, q_1QNH, k_1QKH, v_1QKH, mask, group, parts, records):
        groups = q_1QNH.shape[2] // k_1QKH.shape[2]
        ctx.group, ctx.parts, ctx.heads = group, [], [groups * part for part in parts]
        needs = [records and not x.stop_gradient for x in (q_1QNH, k_1QKH, v_1QKH)]
        queries, outputs = paddle.split(q_1QNH, ctx.heads, axis=2), []
        pairs = zip(*(paddle.split(x, parts, axis=2) for x in (k_1QKH, v_1QKH)), strict=True)
        # All under way at once, those of the first part first.
        started = [
            [_started(dist.stream.all_gather, x.squeeze(0), group, group.nranks) for x in pair]
            for pair in pairs
        ]
        for q, pair in zip(queries, started, strict=True):
            inputs = [q.detach(), *(pending.result().unsqueeze(0) for pending in pair)]
            for x, is_needed in zip(inputs, needs, strict=True):
                x.stop_gradient = not is_needed
            with paddle.enable_grad() if records else nullcontext():
                output = _attended(inputs[0], inputs[1], inputs[2], mask)
            outputs.append(output.detach())
            ctx.parts.append((inputs, output))
        return _joined(outputs)

    @staticmethod
    def backward(ctx, grad_1QNH):
        group, of_queries, started = ctx.group, [], []
        for grad in paddle.split(grad_1QNH, ctx.heads, axis=2):
            inputs, output = ctx.parts.pop(0)
            paddle.autograd.backward([output], [grad])
            of_query, *of_pair = (x.grad for x in inputs)
            of_queries.append(of_query)
            started.append(
                [
                    None
                    if x is None
                    else _started(dist.stream.reduce_scatter, x[0], group, 1 / group.nranks)
                    for x in of_pair
                ]
            )
            del inputs, output, of_query, of_pair
        of_pairs = [[one and one.result().unsqueeze(0) for one in pair] for pair in started]
        return tuple(
            None if of_parts[0] is None else _joined(of_parts)
            for of_parts in (of_queries, *zip(*of_pairs, strict=True))
        )


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """All heads of the parts."""
    return parts[0] if len(parts) == 1 else paddle.concat(list(parts), axis=2)


class _Exchange(PyLayer):
    """`[1, Q, N, H]`, own rows of all heads, to `[1, T, N / C, H]`, all rows of own heads; or back.

    Args of `apply`:
        mask: with the orders of the rows.
        to_heads: the direction.
        tensors: exchanged at once.
    """

    @staticmethod
    def forward(ctx, mask, group, to_heads, *tensors):
        ctx.settings = mask, group, not to_heads
        ctx.needs = [not x.stop_gradient for x in tensors]
        return tuple(_exchanged(tensors, mask, group, to_heads))

    @staticmethod
    def backward(ctx, *grads):
        needed = [grad for grad, is_needed in zip(grads, ctx.needs, strict=True) if is_needed]
        found = iter(_exchanged(needed, *ctx.settings))
        return tuple(next(found) if is_needed else None for is_needed in ctx.needs)


def _exchanged(
    tensors: Sequence[Tensor], mask: SliceMask, group: Any, to_heads: bool
) -> list[Tensor]:
    size, width = group.nranks, tensors[0].shape[-1] if tensors else 0
    (to_batch_T, to_slices_T), started = mask.orders, []
    for x in tensors:
        if to_heads:
            own_QCNH = x.reshape([x.shape[1], size, -1, width])
            sent = own_QCNH.transpose([1, 0, 2, 3])
        else:
            all_TNH = paddle.index_select(x.squeeze(0), to_slices_T)
            sent = all_TNH.reshape([size, -1, x.shape[2], width])
        started.append(_started(dist.stream.alltoall_single, sent, group))
    found = []
    for pending in started:
        rows_CQNH = pending.result()
        if to_heads:
            rows_TNH = rows_CQNH.flatten(0, 1)
            found.append(paddle.index_select(rows_TNH, to_batch_T).unsqueeze(0))
        else:
            found.append(rows_CQNH.transpose([1, 0, 2, 3]).flatten(1, 2).unsqueeze(0))
    return found


def _attended(q_1LNH: Tensor, k_1TKH: Tensor, v_1TKH: Tensor, mask: SliceMask) -> Tensor:
    return masked_attention(q_1LNH, k_1TKH, v_1TKH, mask, q_1LNH.shape[-1] ** -0.5, "sdpa")


def _started(collective: Any, x: Tensor, group: Any, factor: float = 1) -> Pending:
    """A collective of rows under way; its result has `factor` times as many."""
    sent = x.contiguous()
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
