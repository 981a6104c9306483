"""Shards of parameters, and what travels between them and the whole in one collective.

Shapes: S ranks of the group; n elements of a parameter per rank; N those of a bucket, the sum of n.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import paddle
from paddle import Tensor
from paddle.base.framework import EagerParamBase

from paddle_vl.nn.master_weights import WideGradients, master_copy
from paddle_vl.parallel.collectives import BUCKET_ELEMENTS
from paddle_vl.parallel.sharding.pending import Pending, Reductions, gather_later


@dataclass(frozen=True, eq=False)
class Part:
    """A parameter and this rank's part of it.

    Attributes:
        parameter: as the model holds it, with or without storage.
        shard: `[n]`; of a trained parameter float32, what the optimizer updates; of a frozen one in
            its dtype.
    """

    parameter: Tensor
    shard: Tensor

    @classmethod
    @paddle.no_grad()
    def of(cls, parameter: Tensor, group) -> "Part":
        dtype = parameter.dtype if parameter.stop_gradient else paddle.float32
        own = own_values(parameter.detach(), group, dtype)
        if not parameter.stop_gradient:
            return cls(parameter, master_copy(parameter, own))
        return cls(parameter, EagerParamBase.from_tensor(own, trainable=False))

    @property
    def is_trained(self) -> bool:
        return not self.shard.stop_gradient


def own_values(whole: Tensor, group, dtype) -> Tensor:
    """`[n]`: this rank's row of `as_rows`, of that dtype, in storage of its own."""
    length = -(-whole.size // group.nranks)
    start = group.rank * length
    stop = min(start + length, whole.size)
    if stop <= start:
        return paddle.zeros([length], dtype=dtype)
    part = whole.reshape([-1])[start:stop]
    # A cast to the dtype that it has already would share the whole tensor's storage.
    own = part.clone() if part.dtype == dtype else part.astype(dtype)
    if stop - start == length:
        return own
    return paddle.concat([own, paddle.zeros([length - stop + start], dtype=dtype)])


def check_whole(whole: np.ndarray, parameter: Tensor) -> None:
    """Raise ValueError unless an array to take a shard of has the parameter's shape."""
    if whole.shape != tuple(parameter.shape):
        raise ValueError(
            f"an array {list(whole.shape)} to take a shard of does not have the shape "
            f"{list(parameter.shape)} of {parameter.name}"
        )


def as_rows(whole: Tensor, num_ranks: int) -> Tensor:
    """`[S, n]`: each rank's part of a tensor of any shape, the last ones filled up with zeros."""
    flat = whole.reshape([-1])
    missing = -flat.shape[0] % num_ranks
    if missing:
        flat = paddle.concat([flat, paddle.zeros([missing], dtype=flat.dtype)])
    return flat.reshape([num_ranks, -1])


def from_rows(rows: Tensor, parameter: Tensor) -> Tensor:
    """The parameter's shape from all ranks' parts of it, rank by rank."""
    return rows.reshape([-1])[: parameter.size].reshape(parameter.shape)


class Bucket:
    """Parts whose gradients are summed in one collective, and whose values come in one per dtype.

    No operation depends on which parameters have a gradient on this rank.

    Args:
        reductions: those of the group, of all its buckets.
    """

    def __init__(self, parts: Sequence[Part], group, reductions: Reductions):
        self.parts, self.group, self.reductions = list(parts), group, reductions
        self.trained = [part for part in parts if part.is_trained]
        halves = [p.parameter for p in self.trained if p.parameter.dtype != paddle.float32]
        self._wide = WideGradients(halves)
        self._coming: list[tuple[list[Part], Pending]] | None = None

    def gradient_sums(self) -> list[Tensor]:
        """Float32 sums of whole half-precision gradients that are held."""
        return self._wide.sums()

    def keep_gradients(self) -> None:
        """Add half-precision gradients up in float32 until they are reduced."""
        self._wide.take()

    @paddle.no_grad()
    def start_reduction(self) -> None:
        """Begin to add the group's gradients to this rank's sum, and drop the whole ones."""
        if not self.trained:
            return
        self.reductions.make_room()
        num_ranks, rows = self.group.nranks, []
        for part in self.trained:
            grad, total = part.parameter.grad, self._wide.give(part.parameter)
            if grad is None and total is None:
                shape = [num_ranks, part.shard.size]
                rows.append(paddle.zeros(shape, dtype=self.reductions.dtype))
                continue
            if total is None:
                total = grad
            elif grad is not None:
                total = total.add_(grad.astype("float32"))
            rows.append(as_rows(total.astype(self.reductions.dtype), num_ranks))
            part.parameter.clear_gradient(False)
        # A table has a bucket of its own, and needs no copy.
        packed_SN = rows[0] if len(rows) == 1 else paddle.concat(rows, axis=1)
        # Nothing but what travels is held meanwhile.
        grad = total = None
        rows.clear()
        self.reductions.start(self, packed_SN.reshape([-1]).contiguous())

    @paddle.no_grad()
    def hand_out_gradients(self) -> None:
        """The sum becomes the shards' gradients, float32; zeros if nothing was reduced."""
        if not self.trained:
            return
        lengths = [part.shard.size for part in self.trained]
        sum_N = self.reductions.total(self)
        if sum_N is None:
            sum_N = paddle.zeros([sum(lengths)], dtype="float32")
        for part, grad in zip(self.trained, paddle.split(sum_N, lengths), strict=True):
            # Paddle copies what is set here: no shard's gradient keeps the storage of all.
            part.shard.grad = grad

    @paddle.no_grad()
    def fill_parameters(self) -> None:
        """Write the gathered shards into the parameters' own storage."""
        for part, whole in self._gathered_parts():
            parameter = part.parameter
            paddle.assign(whole[: parameter.size].reshape(parameter.shape), parameter)

    @paddle.no_grad()
    def start_gather(self) -> None:
        """Begin to gather the values; one collective per dtype."""
        if self._coming is not None:
            return
        self._coming = []
        for dtype in dict.fromkeys(part.parameter.dtype for part in self.parts):
            parts = [part for part in self.parts if part.parameter.dtype == dtype]
            # What travels is rounded already.
            own = [part.shard.detach().astype(dtype) for part in parts]
            own_N = own[0] if len(own) == 1 else paddle.concat(own)
            self._coming.append((parts, gather_later(own_N, self.group)))

    def drop_gather(self) -> None:
        """Forget what `start_gather` brings."""
        coming, self._coming = self._coming or [], None
        for _, pending in coming:
            pending.result()

    @paddle.no_grad()
    def give_storage(self) -> None:
        """Parameters get storage that holds the gathered shards, also for a graph that saved them.

        The tensors that autograd saved share the parameter's tensor object, not its storage of the
        forward pass. Where a parameter is alone, its storage is what was gathered.
        """
        for part, whole in self._gathered_parts():
            # This leaves the parameter's shape, whatever there is beyond its last element.
            whole._share_buffer_to(part.parameter)

    def take_storage(self) -> None:
        """Parameters keep shape and dtype only; Paddle raises when one is computed with."""
        for part in self.parts:
            part.parameter._clear_data()

    def _gathered_parts(self) -> Iterator[tuple[Part, Tensor]]:
        """Each part with its whole values, flat, zeros behind them."""
        self.start_gather()
        coming, self._coming = self._coming, None
        while coming:
            parts, pending = coming.pop(0)
            all_SN = pending.result()
            if len(parts) == 1:
                yield parts[0], all_SN
                continue
            all_SN = all_SN.reshape([self.group.nranks, -1])
            start = 0
            for part in parts:
                stop = start + part.shard.size
                # A copy, so that no part keeps the storage of all.
                yield part, all_SN[:, start:stop].clone().reshape([-1])
                start = stop


def buckets_of(parts: Sequence[Part], group, reductions: Reductions) -> Iterator[Bucket]:
    """In order, each of at most `BUCKET_ELEMENTS`, or of one parameter that has more."""
    taken: list[Part] = []
    filled = 0
    for part in parts:
        if taken and filled + part.parameter.size > BUCKET_ELEMENTS:
            yield Bucket(taken, group, reductions)
            taken, filled = [], 0
        taken.append(part)
        filled += part.parameter.size
    if taken:
        yield Bucket(taken, group, reductions)
