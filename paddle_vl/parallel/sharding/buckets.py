"""Shards of parameters, and what travels between them and the whole in one collective.

Shapes: S ranks of the group; n elements of a parameter per rank; N those of a bucket, the sum of n.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import paddle
from paddle import Tensor
from paddle.base.framework import EagerParamBase

from paddle_vl.nn.master_weights import WideGradients, master_copy
from paddle_vl.parallel.gradients import BUCKET_ELEMENTS
from paddle_vl.parallel.mp_ops import gathered, sum_scattered


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
    """

    def __init__(self, parts: Sequence[Part], group):
        self.parts, self.group = list(parts), group
        self.trained = [part for part in parts if part.is_trained]
        halves = [p.parameter for p in self.trained if p.parameter.dtype != paddle.float32]
        self._wide = WideGradients(halves)
        self._sum_N: Tensor | None = None

    def gradient_sums(self) -> list[Tensor]:
        """What is held of gradients beside those of parameters and shards."""
        reduced = [] if self._sum_N is None else [self._sum_N]
        return [*self._wide.sums(), *reduced]

    def keep_gradients(self) -> None:
        """Add half-precision gradients up in float32 until they are reduced."""
        self._wide.take()

    @paddle.no_grad()
    def reduce_gradients(self) -> None:
        """Add the group's gradients to this rank's sum, float32, and drop the whole ones."""
        if not self.trained:
            return
        num_ranks, rows = self.group.nranks, []
        self._wide.take()
        for part in self.trained:
            grad = self._wide.give(part.parameter)
            grad = part.parameter.grad if grad is None else grad
            if grad is None:
                rows.append(paddle.zeros([num_ranks, part.shard.size], dtype="float32"))
            else:
                rows.append(as_rows(grad.astype("float32"), num_ranks))
                part.parameter.clear_gradient(False)
        # A table has a bucket of its own, and needs no copy.
        packed_SN = rows[0] if len(rows) == 1 else paddle.concat(rows, axis=1)
        del rows, grad
        own_N = sum_scattered(packed_SN.reshape([-1]), self.group)
        self._sum_N = own_N if self._sum_N is None else self._sum_N.add_(own_N)

    @paddle.no_grad()
    def hand_out_gradients(self) -> None:
        """The sum becomes the shards' gradients, float32; zeros if nothing was reduced."""
        if not self.trained:
            return
        lengths = [part.shard.size for part in self.trained]
        sum_N, self._sum_N = self._sum_N, None
        if sum_N is None:
            sum_N = paddle.zeros([sum(lengths)], dtype="float32")
        for part, grad in zip(self.trained, paddle.split(sum_N, lengths), strict=True):
            # Paddle copies what is set here: no shard's gradient keeps the storage of all.
            part.shard.grad = grad

    @paddle.no_grad()
    def fill_parameters(self) -> None:
        """Write the gathered shards into the parameters' own storage."""
        for part, whole in zip(self.parts, self._gathered_parts(), strict=True):
            paddle.assign(whole, part.parameter)

    @paddle.no_grad()
    def give_storage(self) -> None:
        """Parameters get storage that holds the gathered shards, also for a graph that saved them.

        The tensors that autograd saved share the parameter's tensor object, not its storage of the
        forward pass.
        """
        for part, whole in zip(self.parts, self._gathered_parts(), strict=True):
            whole._share_buffer_to(part.parameter)

    def take_storage(self) -> None:
        """Parameters keep shape and dtype only; Paddle raises when one is computed with."""
        for part in self.parts:
            part.parameter._clear_data()

    def _gathered_parts(self) -> list[Tensor]:
        """Whole values in the parameters' order and shapes."""
        wholes: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(part.parameter.dtype for part in self.parts):
            parts = [part for part in self.parts if part.parameter.dtype == dtype]
            # What travels is rounded already.
            own_N = paddle.concat([part.shard.astype(dtype) for part in parts])
            all_SN = gathered(own_N, self.group).reshape([self.group.nranks, -1])
            columns = paddle.split(all_SN, [part.shard.size for part in parts], axis=1)
            for part, rows in zip(parts, columns, strict=True):
                wholes[id(part)] = from_rows(rows, part.parameter)
        return [wholes[id(part)] for part in self.parts]


def buckets_of(parts: Sequence[Part], group) -> Iterator[Bucket]:
    """In order, each of at most `BUCKET_ELEMENTS`, or of one parameter that has more."""
    taken: list[Part] = []
    filled = 0
    for part in parts:
        if taken and filled + part.parameter.size > BUCKET_ELEMENTS:
            yield Bucket(taken, group)
            taken, filled = [], 0
        taken.append(part)
        filled += part.parameter.size
    if taken:
        yield Bucket(taken, group)
