"""Tensor and sequence parallelism: a placement whose layers hold one rank's part.

Column layers hold some output features (whole attention heads), row layers the matching input
features; what the ranks exchange stands in `mp_ops`. With sequence parallelism each rank keeps
`T / mp` of the token rows between those layers.

Gradients that come out as one rank's part although the parameter is whole on every rank are marked
`is_partial`, and summed over the group before they are used, see `parallel.gradients`.
"""

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import Tensor, nn
from paddle.autograd import PyLayer

from paddle_vl.batch.visual_index import RowPart
from paddle_vl.nn.experts import Experts
from paddle_vl.nn.linear import AdaptableLinear, Embedding, Linear, VocabHead, linear
from paddle_vl.nn.lora import LowRankSettings
from paddle_vl.nn.loss import IGNORE_INDEX
from paddle_vl.nn.placement import Encoder, HeldLayers, SingleDevicePlacement, Writers
from paddle_vl.parallel.mp_ops import (
    copy_to_group,
    divide_gradient,
    gather_rows,
    scatter_rows,
    sum_over_group,
    sum_scatter_rows,
    summed,
)
from paddle_vl.parallel.random_state import split_random
from paddle_vl.parallel.vision_spread import encode_spread


class FleetPlacement(SingleDevicePlacement):
    """One rank of a model-parallel group.

    Args:
        mp_group: a `paddle.distributed` group.
        sequence_parallel: keep `T / mp` token rows per rank between the split layers.
        vision: `spread` encodes each image on one rank; `replicate` all of them on every rank.
        held: the layers of this rank's pipeline stage.
        writers: those that write the model together; the group's ranks when left out.
    """

    splits_parameters = True

    def __init__(
        self,
        mp_group,
        sequence_parallel: bool = False,
        vision: str = "spread",
        held: HeldLayers | None = None,
        writers: Writers | None = None,
    ):
        super().__init__(held, writers or Writers(mp_group.rank, mp_group.nranks))
        if vision not in ("spread", "replicate"):
            raise ValueError(f"parallel.vision is {vision!r}; use 'spread' or 'replicate'")
        self.mp_group, self.sequence_parallel, self.vision = mp_group, sequence_parallel, vision
        self.tower_parameters: list[Tensor] = []

    @property
    def row_part(self) -> RowPart:
        return super().row_part if self.sequence_parallel else RowPart()

    def column_linear(
        self, in_features: int, out_features: int, init_std: float = 0.02, num_heads: int = 0
    ) -> nn.Layer:
        """Output features of this rank: an equal part, or, with fewer heads than ranks, one head.

        Raises:
            ValueError: neither divides the other.
        """
        size, units = self.mp_group.nranks, num_heads or out_features
        if units % size == 0:
            layer = Linear(in_features, out_features // size, False, init_std)
            _mark_split(layer.weight, axis=1)
            return layer
        if size % units:
            raise ValueError(
                f"{units} heads or features over {size} model-parallel ranks: neither divides the "
                "other; choose another parallel.mp_degree"
            )
        return _SharedHeadLinear(
            in_features, out_features, init_std, units, self.mp_group.rank * units // size
        )

    def row_linear(self, in_features: int, out_features: int, init_std: float = 0.02) -> nn.Layer:
        size = self.mp_group.nranks
        if in_features % size:
            raise ValueError(
                f"{in_features} input features do not divide by the model-parallel degree {size}"
            )
        return _RowLinear(
            in_features // size, out_features, init_std, self.mp_group, self.sequence_parallel
        )

    def vocab_embedding(self, vocab_size: int, dim: int, init_std: float = 0.02) -> nn.Layer:
        return _VocabParallelEmbedding(self._vocab_part(vocab_size), dim, init_std, self.mp_group)

    def vocab_head(
        self, dim: int, vocab_size: int, init_std: float = 0.02, tied_weight: Tensor | None = None
    ) -> nn.Layer:
        head = VocabHead(dim, self._vocab_part(vocab_size), init_std, tied_weight)
        _mark_split(head.weight, axis=0)
        return head

    def router(self, width: int, num_experts: int, init_std: float = 0.02) -> nn.Layer:
        # Each rank routes all rows; its part of the experts gives the weights a part of a gradient.
        router = super().router(width, num_experts, init_std)
        router.weight.is_partial = True
        return router

    def experts(self, num_experts: int, width: int, inner: int, init_std: float = 0.02) -> Experts:
        size = self.mp_group.nranks
        if inner % size:
            raise ValueError(
                f"text_config.moe_intermediate_size {inner} does not divide by the model-parallel "
                f"degree {size}; choose another parallel.mp_degree"
            )
        return _SplitExperts(
            num_experts, width, inner // size, init_std, self.mp_group, self.sequence_parallel
        )

    def enter_replicated(self, x: Tensor) -> Tensor:
        return divide_gradient(x, self.mp_group.nranks)

    def head_norm(self, size: int, epsilon: float) -> nn.Layer:
        # Each rank normalises its own heads with the one weight.
        norm = super().head_norm(size, epsilon)
        norm.weight.is_partial = True
        return norm

    def rms_norm(self, size: int, epsilon: float) -> nn.Layer:
        norm = super().rms_norm(size, epsilon)
        norm.weight.is_partial = self.sequence_parallel
        return norm

    def enter_rows(self, x_TD: Tensor) -> Tensor:
        return scatter_rows(x_TD, self.mp_group) if self.sequence_parallel else x_TD

    def enter_columns(self, x_TD: Tensor) -> Tensor:
        enter = gather_rows if self.sequence_parallel else copy_to_group
        return enter(x_TD, self.mp_group)

    def encode_visual(
        self, encode: Encoder, pixels: Tensor, grid_thw: np.ndarray, **sizes: int
    ) -> tuple[Tensor, list[Tensor]]:
        if self.vision == "spread":
            return encode_spread(
                encode,
                pixels,
                grid_thw,
                group=self.mp_group,
                gradients_are_parts=self.sequence_parallel,
                takes_gradient=any(not p.stop_gradient for p in self.tower_parameters),
                layers_are_collective=self.layers_are_collective,
                **sizes,
            )
        merged, levels = encode(pixels, grid_thw)
        if not self.sequence_parallel:
            return merged, levels
        # Each rank uses only its own rows; one sum makes the gradient of all levels whole.
        packed_MC = copy_to_group(paddle.concat([merged, *levels], axis=1), self.mp_group)
        merged, *levels = paddle.split(packed_MC, 1 + len(levels), axis=1)
        return merged, levels

    def mark_tower(self, parameters: list[Tensor]) -> None:
        self.tower_parameters = parameters
        for parameter in parameters:
            parameter.is_partial = self.vision == "spread"

    def add_low_rank(self, layer: AdaptableLinear, settings: LowRankSettings) -> None:
        super().add_low_rank(layer, settings)
        weight, lora = layer.weight, layer.lora
        axis = split_axis(weight)
        in_tower = any(weight is parameter for parameter in self.tower_parameters)
        if axis is None:
            lora.A.is_partial = lora.B.is_partial = getattr(weight, "is_partial", False)
        elif axis == layer.input_axis:
            # Every rank's rows of A make a part of x A, and so of what B multiplies.
            _mark_split(lora.A, axis=0)
            lora.B.is_partial = True
        else:
            _mark_split(lora.B, axis=1)
            lora.A.is_partial = True
        if axis == layer.input_axis or (in_tower and self.vision == "spread"):
            lora.random = split_random

    def token_loss(self, logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
        loss_T = _ParallelCrossEntropy.apply(logits_TV.astype("float32"), targets_T, self.mp_group)
        return loss_T.sum(), (targets_T != IGNORE_INDEX).astype("float32").sum()

    def whole_shape(self, parameter: Tensor) -> tuple[int, ...]:
        shape = list(parameter.shape)
        if (axis := split_axis(parameter)) is not None:
            shape[axis] *= self.mp_group.nranks
        return tuple(shape)

    def own_part(self, parameter: Tensor, whole: np.ndarray) -> np.ndarray:
        axis = split_axis(parameter)
        if axis is None:
            return whole
        ranks, rank = self.mp_group.nranks, self.mp_group.rank
        blocks = np.split(whole, _num_blocks(parameter), axis=axis)
        return np.concatenate([np.split(b, ranks, axis=axis)[rank] for b in blocks], axis=axis)

    def whole_value(self, parameter: Tensor, value: Tensor | None = None) -> np.ndarray:
        value, axis = self._local_value(parameter, value), split_axis(parameter)
        if axis is None:
            return value.numpy()
        parts: list[Tensor] = []
        dist.all_gather(parts, value.detach(), group=self.mp_group)
        blocks = [np.split(part.numpy(), _num_blocks(parameter), axis=axis) for part in parts]
        return np.concatenate([part[b] for b in range(len(blocks[0])) for part in blocks], axis)

    def _vocab_part(self, vocab_size: int) -> int:
        size = self.mp_group.nranks
        if vocab_size % size:
            raise ValueError(
                f"text_config.vocab_size {vocab_size} does not divide by the model-parallel degree "
                f"{size}; pad the vocabulary to {-(-vocab_size // size) * size}"
            )
        return vocab_size // size


def split_axis(parameter: Tensor) -> int | None:
    """The dim of a parameter that is split over the group; None when every rank has all of it."""
    return getattr(parameter, "split_axis", None) if parameter.is_distributed else None


def _num_blocks(parameter: Tensor) -> int:
    return getattr(parameter, "split_blocks", 1)


def _mark_split(parameter: Tensor, axis: int, blocks: int = 1) -> None:
    """Ranks have parts along that axis, of each of several equal blocks that lie behind each other:
    gate and up in one tensor."""
    # Fleet's clipping and its checkpoints read the first of these.
    parameter.is_distributed = True
    parameter.split_axis = axis
    parameter.split_blocks = blocks


class _RowLinear(AdaptableLinear):
    def __init__(self, in_features, out_features, init_std, group, sequence_parallel):
        super().__init__()
        self.weight = Linear(in_features, out_features, False, init_std).weight
        _mark_split(self.weight, axis=0)
        self.group = group
        self.leave = sum_scatter_rows if sequence_parallel else sum_over_group

    def forward(self, x: Tensor) -> Tensor:
        # The adapter's product is a part of the same sum.
        return self.leave(self.adapted(linear(x, self.weight), x), self.group)


class _SplitExperts(Experts):
    """Some inner features of every expert; their outputs are parts of a sum over the ranks."""

    def __init__(self, num_experts, width, inner, init_std, group, sequence_parallel):
        super().__init__(num_experts, width, inner, init_std)
        _mark_split(self.gate_up_proj, axis=2, blocks=2)
        _mark_split(self.down_proj, axis=1)
        self.group = group
        self.leave = sum_scatter_rows if sequence_parallel else sum_over_group

    def forward(self, x_TD: Tensor, indices_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return self.leave(super().forward(x_TD, indices_TK, weights_TK), self.group)


class _SharedHeadLinear(AdaptableLinear):
    """All heads on every rank, of which this one uses a single head that others use too."""

    def __init__(self, in_features, out_features, init_std, num_heads, own_head):
        super().__init__()
        self.weight = Linear(in_features, out_features, False, init_std).weight
        self.weight.is_partial = True
        width = out_features // num_heads
        self.own = slice(own_head * width, (own_head + 1) * width)

    def forward(self, x: Tensor) -> Tensor:
        return self.adapted(linear(x, self.weight[:, self.own]), x, self.own)


class _VocabParallelEmbedding(nn.Layer):
    """Rows of this rank; ids of others contribute zero, and the sum is the embedding."""

    def __init__(self, num_own, dim, init_std, group):
        super().__init__()
        self.weight = Embedding(num_own, dim, init_std).weight
        _mark_split(self.weight, axis=0)
        self.first, self.num_own, self.group = group.rank * num_own, num_own, group

    def forward(self, ids: Tensor) -> Tensor:
        local = ids - self.first
        is_own = (local >= 0) & (local < self.num_own)
        rows = paddle.nn.functional.embedding(local * is_own.astype(local.dtype), self.weight)
        return sum_over_group(rows * is_own.astype(rows.dtype).unsqueeze(-1), self.group)


class _ParallelCrossEntropy(PyLayer):
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
