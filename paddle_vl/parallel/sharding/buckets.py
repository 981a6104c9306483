"""Shards of parameters, and the buckets that are all-gathered and reduce-scattered together.

Experts are sharded over a group of their own, so a layer's bucket may have two groups, which are
communicated one after the other in the order of its parameters. A group of one rank has whole
parameters, and communicates nothing.

Shapes: S ranks of a sharding group; n elements of a parameter per rank; N of a bucket and group per
rank, the sum of n.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import Tensor
from paddle.base.framework import EagerParamBase

from paddle_vl.nn.master_weights import WideGradients, master_copy
from paddle_vl.parallel.collectives import BUCKET_ELEMENTS


class Pending:
    """A collective in flight.

    Args:
        kind: its name.
        task: Paddle's task; waiting for it blocks the compute stream, not the host.
        received: the output.
        sent: the input, kept alive until the collective ends.
    """

    def __init__(self, kind: str, task: Any, received: Tensor, sent: Tensor):
        self.kind, self._task = kind, task
        self._received, self._sent = received, sent

    def result(self) -> Tensor:
        """The output, valid for kernels launched from now on."""
        self._task.wait()
        self._sent = None
        return self._received


class Reductions:
    """Reduce-scatters of the gradients of all buckets, one of each group in flight, and all-reduces
    of their sums over dp.

    One overlaps with the backward pass of the next unit. More would only keep more packed
    gradients, as a group runs one collective at a time. The sum of a step's last one is all-reduced
    beside the following ones.

    Args:
        dp_groups: by sharding group, the ranks that have the same shards; none by default.

    Attributes:
        dtype: dtype of the messages; sums are float32.
    """

    def __init__(
        self, dtype: Literal["float32", "bfloat16"], dp_groups: Mapping[Any, Any] | None = None
    ):
        self.dtype: Literal["float32", "bfloat16"] = dtype
        self._dp_groups = dp_groups or {}
        self._in_flight: dict[Any, tuple[Hashable, Pending, bool]] = {}
        self._sums: dict[tuple[Hashable, Any], Tensor] = {}
        # All-reduces in flight, of sums.
        self._tasks: dict[tuple[Hashable, Any], Any] = {}

    @paddle.no_grad()
    def make_room(self, group: Any = None) -> None:
        """Wait until another one may start and reuse the memory of an earlier input.

        Args:
            group: of the one to start; None for any.
        """
        for own in list(self._in_flight) if group is None else [group]:
            if own in self._in_flight:
                owner, pending, is_last = self._in_flight.pop(own)
                self._add(owner, own, pending.result().astype("float32"), is_last)

    def start(self, owner: Hashable, group: Any, packed_SN: Tensor, is_last: bool = False) -> None:
        """Start a reduce-scatter, after `make_room`; its output is added to the owner's sum.

        Args:
            is_last: whether it is the owner's last one of the step.
        """
        if group.nranks == 1:
            self._add(owner, group, packed_SN, is_last)
            return
        own_N = paddle.empty([packed_SN.shape[0] // group.nranks], dtype=packed_SN.dtype)
        task = dist.stream.reduce_scatter(own_N, packed_SN, group=group, sync_op=False)
        pending = Pending("reduce_scatter", task, own_N, packed_SN)
        self._in_flight[group] = owner, pending, is_last

    def pop_sum(self, owner: Hashable, group: Any) -> Tensor | None:
        """Remove and return the sum of an owner's outputs, `[N]` float32; None without any."""
        if group in self._in_flight and self._in_flight[group][0] is owner:
            self.make_room(group)
        key = owner, group
        if key not in self._tasks:
            self._sum_over_dp(key)
        task = self._tasks.pop(key, None)
        if task is not None:
            task.wait()
        return self._sums.pop(key, None)

    def _add(self, owner: Hashable, group: Any, own_N: Tensor, is_last: bool) -> None:
        total_N = self._sums.get((owner, group))
        self._sums[owner, group] = own_N if total_N is None else total_N.add_(own_N)
        if is_last:
            self._sum_over_dp((owner, group))

    def _sum_over_dp(self, key: tuple[Hashable, Any]) -> None:
        """Start the all-reduce of a sum, in place; of none all ranks have none."""
        group, total_N = self._dp_groups.get(key[1]), self._sums.get(key)
        if group is not None and total_N is not None:
            self._tasks[key] = dist.all_reduce(total_N, group=group, sync_op=False)


@dataclass(frozen=True, eq=False)
class BucketEntry:
    """A parameter and this rank's shard of it.

    Attributes:
        parameter: the model's, with or without storage; always with, if one rank has all of it.
        shard: `[n]`; float32 for a trained parameter, which the optimizer updates; in the
            parameter's dtype for a frozen one.
        group: the ranks that shard it.
    """

    parameter: Tensor
    shard: Tensor
    group: Any

    @classmethod
    @paddle.no_grad()
    def of(cls, parameter: Tensor, group) -> "BucketEntry":
        dtype = parameter.dtype if parameter.stop_gradient else paddle.float32
        own = local_shard(parameter.detach(), group, dtype)
        if not parameter.stop_gradient:
            return cls(parameter, master_copy(parameter, own), group)
        return cls(parameter, EagerParamBase.from_tensor(own, trainable=False), group)

    @property
    def is_trained(self) -> bool:
        return not self.shard.stop_gradient


def local_shard(full: Tensor, group, dtype) -> Tensor:
    """`[n]`: a copy of this rank's row of `padded_rows` in this dtype."""
    length = -(-full.size // group.nranks)
    start = group.rank * length
    stop = min(start + length, full.size)
    if stop <= start:
        return paddle.zeros([length], dtype=dtype)
    view = full.reshape([-1])[start:stop]
    # A cast to the same dtype would share the full tensor's storage.
    own = view.clone() if view.dtype == dtype else view.astype(dtype)
    if stop - start == length:
        return own
    return paddle.concat([own, paddle.zeros([length - stop + start], dtype=dtype)])


def own_slice(full: np.ndarray, parameter: Tensor, begin: int, end: int) -> np.ndarray:
    """Elements `begin` to `end` of an array in the parameter's shape, flat, padded with zeros.

    Raises:
        ValueError: the array has another shape.
    """
    if full.shape != tuple(parameter.shape):
        raise ValueError(
            f"an array {list(full.shape)} to take a shard of does not have the shape "
            f"{list(parameter.shape)} of {parameter.name}"
        )
    own = np.zeros([max(end - begin, 0)], full.dtype)
    values = full.reshape(-1)[begin : max(end, begin)]
    own[: values.size] = values
    return own


def padded_rows(full: Tensor, num_ranks: int) -> Tensor:
    """`[S, n]`: a tensor of any shape, flat, padded with zeros, one row per rank."""
    flat = full.reshape([-1])
    missing = -flat.shape[0] % num_ranks
    if missing:
        flat = paddle.concat([flat, paddle.zeros([missing], dtype=flat.dtype)])
    return flat.reshape([num_ranks, -1])


class Bucket:
    """Parameters that are reduce-scattered and all-gathered together.

    Per group one reduce-scatter, and one all-gather per dtype, whichever parameters have a gradient
    on this rank, so that all ranks issue the same collectives.

    Args:
        reductions: shared by all buckets.

    Attributes:
        trained: entries of trained parameters.
        by_group: these by group.
    """

    def __init__(self, entries: Sequence[BucketEntry], reductions: Reductions):
        self.entries, self.reductions = list(entries), reductions
        self.trained = [entry for entry in entries if entry.is_trained]
        self.by_group: dict[Any, list[BucketEntry]] = {}
        for entry in self.trained:
            self.by_group.setdefault(entry.group, []).append(entry)
        halves = [e.parameter for e in self.trained if e.parameter.dtype != paddle.float32]
        self._wide = WideGradients(halves)
        self._in_flight: list[tuple[list[BucketEntry], Pending]] | None = None

    def accumulate_gradients(self) -> None:
        """Add half-precision gradients to float32 sums, until they are reduced."""
        self._wide.take()

    @paddle.no_grad()
    def start_reduction(self, is_last: bool = False) -> None:
        """Start the reduce-scatter of the gradients, zeros for missing ones, and free them.

        Args:
            is_last: whether it is this bucket's last one of the step.
        """
        for group, entries in self.by_group.items():
            self.reductions.make_room(group)
            self.reductions.start(self, group, self._packed(entries, group.nranks), is_last)

    def _packed(self, entries: Sequence[BucketEntry], num_ranks: int) -> Tensor:
        """`[S * N]`: the gradients of parameters, which are freed."""
        # What is not sent is not rounded.
        dtype = self.reductions.dtype if num_ranks > 1 else "float32"
        rows = []
        for entry in entries:
            grad, total = entry.parameter.grad, self._wide.give(entry.parameter)
            if grad is not None:
                total = grad if total is None else total.add_(grad.astype("float32"))
            if total is None:
                shape = [num_ranks, entry.shard.size]
                rows.append(paddle.zeros(shape, dtype=dtype))
                continue
            rows.append(padded_rows(total.astype(dtype), num_ranks))
            entry.parameter.clear_gradient(False)
        # A table is alone in its bucket and needs no copy.
        packed_SN = rows[0] if len(rows) == 1 else paddle.concat(rows, axis=1)
        return packed_SN.reshape([-1]).contiguous()

    @paddle.no_grad()
    def assign_gradients(self) -> None:
        """Give each shard its reduced gradient, float32; zeros if nothing was reduced."""
        for group, entries in self.by_group.items():
            lengths = [entry.shard.size for entry in entries]
            sum_N = self.reductions.pop_sum(self, group)
            if sum_N is None:
                sum_N = paddle.zeros([sum(lengths)], dtype="float32")
            for entry, grad in zip(entries, paddle.split(sum_N, lengths), strict=True):
                # Paddle copies, so no gradient keeps the bucket's storage alive.
                entry.shard.grad = grad

    @paddle.no_grad()
    def all_gather_parameters(self) -> None:
        """All-gather the shards into the parameters' existing storage."""
        self.assign_whole()
        for entry, full in self._gathered_entries():
            parameter = entry.parameter
            paddle.assign(full[: parameter.size].reshape(parameter.shape), parameter)

    @paddle.no_grad()
    def assign_whole(self) -> None:
        """Copy the values of parameters that one rank has all of."""
        for entry in self.entries:
            if entry.group.nranks == 1:
                parameter = entry.parameter
                own = entry.shard.astype(parameter.dtype).reshape(parameter.shape)
                paddle.assign(own, parameter)

    @paddle.no_grad()
    def start_all_gather(self) -> None:
        """Start the all-gather of the values; one per group and dtype."""
        if self._in_flight is not None:
            return
        self._in_flight, kinds = [], {}
        for entry in self._sharded:
            kinds.setdefault((entry.group, entry.parameter.dtype), []).append(entry)
        for (group, dtype), entries in kinds.items():
            # Rounded before it is communicated.
            own = [entry.shard.detach().astype(dtype) for entry in entries]
            own_N = own[0] if len(own) == 1 else paddle.concat(own)
            all_SN = paddle.empty([own_N.shape[0] * group.nranks], dtype=dtype)
            task = dist.stream.all_gather(all_SN, own_N, group=group, sync_op=False)
            self._in_flight.append((entries, Pending("all_gather", task, all_SN, own_N)))

    def discard_all_gather(self) -> None:
        """Finish what `start_all_gather` started, and drop the result."""
        in_flight, self._in_flight = self._in_flight or [], None
        for _, pending in in_flight:
            pending.result()

    @paddle.no_grad()
    def unshard(self) -> None:
        """Give the parameters storage with the all-gathered values.

        Tensors saved by autograd refer to the parameter's tensor object, not its storage, so graphs
        of earlier forward passes see the values too.
        """
        for entry, full in self._gathered_entries():
            # The parameter keeps its shape and ignores the padding. A parameter alone in its bucket
            # takes the gathered tensor itself as storage.
            full._share_buffer_to(entry.parameter)

    def reshard(self) -> None:
        """Free the parameters' storage; only shape and dtype stay, and Paddle raises on use."""
        for entry in self._sharded:
            entry.parameter._clear_data()

    @property
    def _sharded(self) -> list[BucketEntry]:
        return [entry for entry in self.entries if entry.group.nranks > 1]

    def _gathered_entries(self) -> Iterator[tuple[BucketEntry, Tensor]]:
        """Each entry with its full values, flat and padded with zeros."""
        self.start_all_gather()
        in_flight, self._in_flight = self._in_flight, None
        while in_flight:
            entries, pending = in_flight.pop(0)
            all_SN = pending.result()
            if len(entries) == 1:
                yield entries[0], all_SN
                continue
            all_SN = all_SN.reshape([entries[0].group.nranks, -1])
            start = 0
            for entry in entries:
                stop = start + entry.shard.size
                # A copy, so that no parameter keeps the bucket's storage alive.
                yield entry, all_SN[:, start:stop].clone().reshape([-1])
                start = stop


def buckets_of(entries: Sequence[BucketEntry], reductions: Reductions) -> Iterator[Bucket]:
    """Buckets in order, each of at most `BUCKET_ELEMENTS` elements or one larger parameter."""
    taken: list[BucketEntry] = []
    filled = 0
    for entry in entries:
        if taken and filled + entry.parameter.size > BUCKET_ELEMENTS:
            yield Bucket(taken, reductions)
            taken, filled = [], 0
        taken.append(entry)
        filled += entry.parameter.size
    if taken:
        yield Bucket(taken, reductions)
