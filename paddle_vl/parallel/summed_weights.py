"""Gradients without sharding that are all-reduced over dp during the backward pass.

Fleet's own means do not fit. `FusedCommBuffer` would hold every gradient a second time, beside the
optimizer's flat buckets; Paddle's `DataParallel` hangs if ranks run different optional branches.
"""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import Tensor, nn

from paddle_vl.nn.flat_buckets import FlatBucket
from paddle_vl.nn.master_weights import MasterWeights
from paddle_vl.nn.parameter_table import Tie
from paddle_vl.parallel.collectives import BUCKET_ELEMENTS, InOrder
from paddle_vl.parallel.topology import Topology


@dataclass
class _Piece:
    """Neighbouring tensors of a bucket, whose gradients are one collective.

    Attributes:
        first, last: its tensors are `first` to `last - 1` of the bucket.
        left: backward passes of the step that each of them still needs.
    """

    bucket: FlatBucket
    group: Any
    first: int
    last: int
    left: dict[int, int] = field(default_factory=dict)

    @property
    def is_frozen(self) -> bool:
        return self.bucket.values.stop_gradient

    def start(self, tasks: list[Any]) -> None:
        """Start the all-reduce, unless frozen, and add its task."""
        if not self.is_frozen:
            begin, end = self.bucket.begins[self.first], self.bucket.begins[self.last]
            part = self.bucket.values.main_grad._slice(begin, end)
            tasks.append(dist.all_reduce(part, group=self.group, sync_op=False))


class SummedWeights(MasterWeights):
    """Master weights, with the optimizer's buckets all-reduced in pieces, from the model's last
    layers on: a piece once every tensor of it has the gradients of all micro-batches.

    `FleetRanks.sum_gradients` reduces the rest: what ranks of mp, or pipeline stages, sum before.

    Args:
        parameters: see `MasterWeights`.
        model: has them in the order of the forward pass.
        topology: with at least two dp ranks, and without sharding.
    """

    def __init__(self, parameters: Iterable[Tensor], model: nn.Layer, topology: Topology):
        super().__init__(parameters)
        self._topology, self._table = topology, model.placement.parameter_table
        self._places = {id(p): place for place, p in enumerate(model.parameters())}
        self._pieces: list[_Piece] = []
        self._tasks: list[Any] = []
        self._order = InOrder([])

    def use_buckets(self, buckets: Sequence[FlatBucket]) -> None:
        super().use_buckets(buckets)
        self._pieces = [piece for bucket in buckets for piece in self._divided(bucket)]
        # A backward pass ends with the first layers.
        self._pieces.sort(key=self._first_place, reverse=True)
        self._order = InOrder([partial(piece.start, self._tasks) for piece in self._pieces])
        for number, piece in enumerate(self._pieces):
            piece.bucket.values.is_summed = True
            for tensor in range(piece.first, piece.last):
                # After the bucket's own hook, which takes the gradient in.
                arrived = partial(_arrived, weakref.ref(self), number, tensor)
                piece.bucket.leaves[tensor]._register_backward_hook(arrived)

    def begin_step(self, num_micro_batches: int) -> None:
        for number, piece in enumerate(self._pieces):
            piece.left = dict.fromkeys(range(piece.first, piece.last), num_micro_batches)
            if piece.is_frozen:
                self._order.complete(number)

    @paddle.no_grad()
    def end_backward(self) -> None:
        """After the last micro-batch: all-reduce the pieces in which a gradient is missing, zeros
        for these."""
        super().end_backward()
        for piece in self._pieces:
            if not piece.is_frozen:
                piece.bucket.fill()
        self._order.finish()
        while self._tasks:
            self._tasks.pop().wait()

    def arrived(self, number: int, tensor: int) -> None:
        """A backward pass has added to the gradient of a tensor.

        Raises:
            RuntimeError: it has more than one in a micro-batch, as a layer that is recomputed and
                runs twice.
        """
        piece = self._pieces[number]
        if tensor not in piece.left:
            leaf = piece.bucket.leaves[tensor]
            raise RuntimeError(
                f"{leaf.name} {list(leaf.shape)} got a gradient more often than once in a "
                "micro-batch, so its sum over dp ranks may be under way: set "
                "parallel.dp_comm_overlap=false"
            )
        piece.left[tensor] -= 1
        if not piece.left[tensor]:
            del piece.left[tensor]
        if not piece.left:
            self._order.complete(number)

    def _divided(self, bucket: FlatBucket) -> list[_Piece]:
        spec, topology = self._table[bucket.leaves[0]], self._topology
        group = topology.expert_dp_group if spec.is_expert else topology.dp_group
        is_partial = spec.has_partial_gradient and topology.mp_group.nranks > 1
        if is_partial or spec.tie is not Tie.NONE or group.nranks == 1:
            return []
        firsts = [0]
        for number, end in enumerate(bucket.begins[1:]):
            if end - bucket.begins[firsts[-1]] > BUCKET_ELEMENTS and number > firsts[-1]:
                firsts.append(number)
        lasts = [*firsts[1:], len(bucket.leaves)]
        return [_Piece(bucket, group, *ends) for ends in zip(firsts, lasts, strict=True)]

    def _first_place(self, piece: _Piece) -> int:
        leaves = piece.bucket.leaves[piece.first : piece.last]
        return min(self._places[id(leaf)] for leaf in leaves)


def _arrived(store: "weakref.ref[SummedWeights]", number: int, tensor: int) -> None:
    """Hook of a tensor that has got its gradient."""
    if (own := store()) is not None:
        own.arrived(number, tensor)
