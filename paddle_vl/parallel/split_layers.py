"""Layers that hold one model-parallel rank's part, and the marks of what is split.

See `paddle_vl.parallel.tensor`; what the ranks exchange stands in `mp_ops`.
"""

import paddle
import paddle.distributed as dist
from paddle import Tensor, nn
from paddle.autograd import PyLayer

from paddle_vl.nn.experts import Experts
from paddle_vl.nn.linear import AdaptableLinear, Embedding, Linear, linear
from paddle_vl.nn.loss import IGNORE_INDEX
from paddle_vl.parallel.mp_ops import sum_over_group, sum_scatter_rows, summed


def split_axis(parameter: Tensor) -> int | None:
    """The dim of a parameter that is split over the group; None when every rank has all of it."""
    return getattr(parameter, "split_axis", None) if parameter.is_distributed else None


def num_blocks(parameter: Tensor) -> int:
    return getattr(parameter, "split_blocks", 1)


def mark_split(parameter: Tensor, axis: int, blocks: int = 1) -> None:
    """Ranks have parts along that axis, of each of several equal blocks that lie behind each other:
    gate and up in one tensor."""
    # Fleet's clipping and its checkpoints read the first of these.
    parameter.is_distributed = True
    parameter.split_axis = axis
    parameter.split_blocks = blocks


class RowLinear(AdaptableLinear):
    def __init__(self, in_features, out_features, init_std, group, sequence_parallel):
        super().__init__()
        self.weight = Linear(in_features, out_features, False, init_std).weight
        mark_split(self.weight, axis=0)
        self.group = group
        self.leave = sum_scatter_rows if sequence_parallel else sum_over_group

    def forward(self, x: Tensor) -> Tensor:
        # The adapter's product is a part of the same sum.
        return self.leave(self.adapted(linear(x, self.weight), x), self.group)


class SplitExperts(Experts):
    """Some inner features of every expert; their outputs are parts of a sum over the ranks."""

    def __init__(self, num_experts, width, inner, init_std, group, sequence_parallel):
        super().__init__(num_experts, width, inner, init_std)
        mark_split(self.gate_up_proj, axis=2, blocks=2)
        mark_split(self.down_proj, axis=1)
        self.group = group
        self.leave = sum_scatter_rows if sequence_parallel else sum_over_group

    def forward(self, x_TD: Tensor, indices_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return self.leave(super().forward(x_TD, indices_TK, weights_TK), self.group)


class SharedHeadLinear(AdaptableLinear):
    """All heads on every rank, of which this one uses a single head that others use too."""

    def __init__(self, in_features, out_features, init_std, num_heads, own_head):
        super().__init__()
        self.weight = Linear(in_features, out_features, False, init_std).weight
        self.weight.is_partial = True
        width = out_features // num_heads
        self.own = slice(own_head * width, (own_head + 1) * width)

    def forward(self, x: Tensor) -> Tensor:
        return self.adapted(linear(x, self.weight[:, self.own]), x, self.own)


class VocabParallelEmbedding(nn.Layer):
    """Rows of this rank; ids of others contribute zero, and the sum is the embedding."""

    def __init__(self, num_own, dim, init_std, group):
        super().__init__()
        self.weight = Embedding(num_own, dim, init_std).weight
        mark_split(self.weight, axis=0)
        self.first, self.num_own, self.group = group.rank * num_own, num_own, group

    def forward(self, ids: Tensor) -> Tensor:
        local = ids - self.first
        is_own = (local >= 0) & (local < self.num_own)
        rows = paddle.nn.functional.embedding(local * is_own.astype(local.dtype), self.weight)
        return sum_over_group(rows * is_own.astype(rows.dtype).unsqueeze(-1), self.group)


class ParallelCrossEntropy(PyLayer):
    """Cross entropy over a split vocabulary: `[T]`, 0 where the target is ignored."""

    @staticmethod
    def forward(ctx, logits_TV, targets_T, group):
        num_own = logits_TV.shape[1]
        largest_T1 = logits_TV.max(axis=1, keepdim=True)
        dist.all_reduce(largest_T1, op=dist.ReduceOp.MAX, group=group)
        shifted_TV = logits_TV - largest_T1
        local_T = targets_T - group.rank * num_own
        is_own_T = (local_T >= 0) & (local_T < num_own)
        index_T1 = (local_T * is_own_T.astype("int64")).unsqueeze(1)
        own_T = paddle.take_along_axis(shifted_TV, index_T1, axis=1).squeeze(1)
        exponent_TV = shifted_TV.exp()
        # One sum for both: the partition function, and the target's logit from whoever holds it.
        total_2T = paddle.stack([exponent_TV.sum(axis=1), own_T * is_own_T.astype("float32")])
        partition_T, target_T = summed(total_2T, group)
        is_target_T = (targets_T != IGNORE_INDEX).astype("float32")
        ctx.save_for_backward(
            exponent_TV / partition_T.unsqueeze(1), index_T1, is_own_T, is_target_T
        )
        return (partition_T.log() - target_T) * is_target_T

    @staticmethod
    def backward(ctx, grad_T):
        softmax_TV, index_T1, is_own_T, is_target_T = ctx.saved_tensor()
        chosen = paddle.put_along_axis(
            paddle.zeros_like(softmax_TV),
            index_T1,
            is_own_T.astype("float32").unsqueeze(1),
            axis=1,
            broadcast=False,
        )
        return (softmax_TV - chosen) * (grad_T * is_target_T).unsqueeze(1), None
