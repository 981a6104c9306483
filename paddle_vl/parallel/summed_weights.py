"""All-reduces over dp of gradients without sharding, in place, in the backward pass or after it.

Fleet's own means do not fit. `FusedCommBuffer` would hold every gradient a second time, beside the
optimizer's flat buckets; Paddle's `DataParallel` hangs if ranks run different optional branches.
"""

import weakref
from collections.abc import Iterable, Sequence
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


class SummedWeights(MasterWeights):
    """Master weights whose optimizer's buckets are all-reduced over dp, from the model's last
    layers on; on CPUs a run has buckets only if `overlaps`.

    `FleetRanks.sum_gradients` reduces the rest: what ranks of mp, or pipeline stages, sum before.

    Attributes:
        bucket_elements: of a bucket, which is one collective.
        overlaps: whether a bucket is reduced once each of its tensors has the gradients of all
            micro-batches; otherwise after the last backward pass.

    Args:
        parameters: see `MasterWeights`.
        model: has them in the order of the forward pass.
        topology: with at least two dp ranks, and without sharding.
    """

    bucket_elements = BUCKET_ELEMENTS

    def __init__(
        self, parameters: Iterable[Tensor], model: nn.Layer, topology: Topology, overlaps: bool
    ):
        super().__init__(parameters)
        self.overlaps, self._topology = overlaps, topology
        self._table = model.placement.parameter_table
        self._places = {id(p): place for place, p in enumerate(model.parameters())}
        self._summed: list[FlatBucket] = []
        # By bucket, backward passes of the step that each of its tensors still needs.
        self._left: list[dict[int, int]] = []
        self._tasks: list[Any] = []
        self._order = InOrder([])

    def use_buckets(self, buckets: Sequence[FlatBucket]) -> None:
        super().use_buckets(buckets)
        # A backward pass ends with the first layers.
        first_last = [bucket for bucket in buckets if self._group_of(bucket) is not None]
        self._summed = sorted(first_last, key=self._first_place, reverse=True)
        starts = [(bucket, self._group_of(bucket), self._tasks) for bucket in self._summed]
        self._order = InOrder([partial(_start, *each) for each in starts])
        for number, bucket in enumerate(self._summed):
            bucket.values.is_summed = True
            for tensor, leaf in enumerate(bucket.leaves if self.overlaps else ()):
                # After the bucket's own hook, which takes the gradient in.
                leaf._register_backward_hook(partial(_arrived, weakref.ref(self), number, tensor))

    def begin_step(self, num_micro_batches: int) -> None:
        self._left = [dict.fromkeys(range(len(b.leaves)), num_micro_batches) for b in self._summed]
        for number, bucket in enumerate(self._summed):
            if self.overlaps and bucket.values.stop_gradient:
                self._order.complete(number)

    @paddle.no_grad()
    def end_backward(self) -> None:
        """After the last micro-batch: all-reduce the buckets in which a gradient is missing, zeros
        for these."""
        super().end_backward()
        for bucket in self._summed:
            # Gradients that no hook has seen.
            bucket.take_all()
            if not bucket.values.stop_gradient:
                bucket.fill()
        self._order.finish()
        while self._tasks:
            self._tasks.pop().wait()

    def arrived(self, number: int, tensor: int) -> None:
        """A backward pass has added to the gradient of a tensor.

        Raises:
            RuntimeError: it has more than one in a micro-batch, as a layer that is recomputed and
                runs twice.
        """
        left = self._left[number]
        if tensor not in left:
            leaf = self._summed[number].leaves[tensor]
            raise RuntimeError(
                f"{leaf.name} {list(leaf.shape)} got a gradient more often than once in a "
                "micro-batch, so its sum over dp ranks may be under way: set "
                "parallel.dp_comm_overlap=false"
            )
        left[tensor] -= 1
        if not left[tensor]:
            del left[tensor]
        if not left:
            self._order.complete(number)

    def _group_of(self, bucket: FlatBucket) -> Any:
        """The ranks that it is summed over here; None if others sum it before."""
        spec, topology = self._table[bucket.leaves[0]], self._topology
        group = topology.dp_group_of(spec)
        is_partial = spec.has_partial_gradient and topology.mp_group.nranks > 1
        return None if is_partial or spec.tie is not Tie.NONE or group.nranks == 1 else group

    def _first_place(self, bucket: FlatBucket) -> int:
        return min(self._places[id(leaf)] for leaf in bucket.leaves)


def _start(bucket: FlatBucket, group: Any, tasks: list[Any]) -> None:
    if not bucket.values.stop_gradient:
        tasks.append(dist.all_reduce(bucket.values.main_grad, group=group, sync_op=False))


def _arrived(store: "weakref.ref[SummedWeights]", number: int, tensor: int) -> None:
    """Hook of a tensor that has got its gradient."""
    if (own := store()) is not None:
        own.arrived(number, tensor)
