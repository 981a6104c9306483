"""A process group whose collectives are computed from all ranks' tensors in this process.

It has the methods of Paddle's process groups that fleet's layers and `paddle.distributed` call.
Each describes itself, gets what every rank contributes from an `Exchange`, and writes this rank's
result. What an accelerator would refuse or do silently wrong (shards of different length, an output
of another size or dtype) is refused here.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import paddle
from paddle import Tensor
from paddle.base import core
from paddle.distributed.communication.group import Group

from paddle_vl.parallel.gloo_fleet.process_group import DONE, DoneTask, write
from paddle_vl.parallel.recorder import Collective, described_call
from paddle_vl.parallel.simulated.current import SimulatedRank, current_rank

_SUM = core.ReduceOp.SUM
_HALF = (paddle.float16, paddle.bfloat16)


class Call(NamedTuple):
    """A collective as one rank issues it.

    Attributes:
        collective: kind, ranks, dtype and shape.
        detail: what else must agree, such as the operation of a reduction.
    """

    collective: Collective
    detail: str = ""

    @property
    def agreed(self) -> tuple:
        return (*self.collective.agreed, self.detail)

    def describe(self) -> str:
        """E.g. `all_reduce (MAX) of float32 [12, 1] in backward`."""
        text = self.collective.describe()
        kind = self.collective.kind
        return f"{kind} ({self.detail}){text.removeprefix(kind)}" if self.detail else text


class Exchange(Protocol):
    """Gives each collective the tensors of all its ranks."""

    def exchange(self, rank: int, call: Call, tensor: Tensor | None) -> list[Tensor]:
        """What each rank of the group contributes, in the group's order; empty for a barrier.

        Args:
            rank: the calling rank.
            tensor: what it contributes; None for a barrier.
        """
        ...


class SimulatedProcessGroup:
    """One rank's process group. Methods take their arguments as Paddle's own do.

    Raises, by every method:
        ValueError: shapes or dtypes that the collective does not take.
        RuntimeError: called outside of the simulation, or ranks disagree; see `Exchange`.
    """

    def __init__(self, own: SimulatedRank, rank: int, ranks: Sequence[int], exchange: Exchange):
        self._own, self._rank, self._ranks = own, rank, tuple(ranks)
        self._exchange = exchange

    def rank(self) -> int:
        return self._ranks.index(self._rank)

    def size(self) -> int:
        return len(self._ranks)

    def name(self) -> str:
        return "SIMULATED"

    @paddle.no_grad()
    def all_reduce(self, tensor: Tensor, op: Any = _SUM, sync_op: bool = True) -> DoneTask:
        write(_reduced(self._everyones("all_reduce", tensor, _name(op)), op), tensor)
        return DONE

    allreduce = all_reduce

    def all_reduce_on_calc_stream(self, tensor: Tensor, op: Any = _SUM) -> DoneTask:
        return self.all_reduce(tensor, op)

    @paddle.no_grad()
    def all_gather_into_tensor(self, out: Tensor, in_: Tensor, sync_op: bool = True) -> DoneTask:
        if out.size != self.size() * in_.size or out.dtype != in_.dtype:
            raise ValueError(
                f"all_gather of {in_.dtype} {in_.shape} over {self.size()} ranks needs an output "
                f"of {self.size() * in_.size} elements of that dtype, got {out.dtype} {out.shape}"
            )
        write(paddle.concat([x.reshape([-1]) for x in self._everyones("all_gather", in_)]), out)
        return DONE

    def all_gather_into_tensor_on_calc_stream(self, out: Tensor, in_: Tensor) -> DoneTask:
        return self.all_gather_into_tensor(out, in_)

    @paddle.no_grad()
    def all_gather(self, out: Any, in_: Any, sync_op: bool | None = None) -> DoneTask:
        if sync_op is None:
            # Paddle's older overload has them swapped.
            out, in_ = in_, out
        if isinstance(out, Tensor):
            return self.all_gather_into_tensor(out, in_)
        self._check_list(out, in_.shape, "all_gather")
        for value, target in zip(self._everyones("all_gather", in_), out, strict=True):
            write(value, target)
        return DONE

    def all_gather_on_calc_stream(self, out: Any, in_: Tensor) -> DoneTask:
        return self.all_gather(out, in_, True)

    @paddle.no_grad()
    def reduce_scatter_tensor(
        self, out: Tensor, in_: Tensor, op: Any = _SUM, sync_op: bool = True
    ) -> DoneTask:
        own = self._slices(in_, "reduce_scatter")[self.rank()]
        if own.shape != out.shape or out.dtype != in_.dtype:
            raise ValueError(
                f"reduce_scatter of {in_.dtype} {in_.shape} over {self.size()} ranks needs an "
                f"output of {own.shape} of that dtype, got {out.dtype} {out.shape}"
            )
        total = _reduced(self._everyones("reduce_scatter", in_, _name(op)), op)
        write(self._slices(total, "reduce_scatter")[self.rank()], out)
        return DONE

    def reduce_scatter_tensor_on_calc_stream(
        self, out: Tensor, in_: Tensor, op: Any = _SUM
    ) -> DoneTask:
        return self.reduce_scatter_tensor(out, in_, op)

    def reduce_scatter(
        self, out: Tensor, in_: Any, op: Any = _SUM, sync_op: bool = True
    ) -> DoneTask:
        self._check_list(in_, out.shape, "reduce_scatter")
        return self.reduce_scatter_tensor(out, paddle.concat(list(in_)), op)

    @paddle.no_grad()
    def broadcast(self, tensor: Tensor, src: int, sync_op: bool = True) -> DoneTask:
        write(self._everyones("broadcast", tensor, f"from rank {self._ranks[src]}")[src], tensor)
        return DONE

    @paddle.no_grad()
    def all_to_all_single(
        self,
        out: Tensor,
        in_: Tensor,
        out_sizes: Sequence[int] = (),
        in_sizes: Sequence[int] = (),
        sync_op: bool = True,
    ) -> DoneTask:
        """Slice j of rank i's input becomes slice i of rank j's output."""
        size = self.size()
        sent = list(in_sizes) or [len(part) for part in self._slices(in_, "all_to_all")]
        wanted = list(out_sizes) or [len(part) for part in self._slices(out, "all_to_all")]
        for sizes, tensor in ((sent, in_), (wanted, out)):
            if len(sizes) != size or sum(sizes) != tensor.shape[0]:
                raise ValueError(
                    f"all_to_all over {size} ranks: slices of {sizes} do not make up the "
                    f"{tensor.shape[0]} rows"
                )
        # The sizes travel along, to compare both sides.
        sizes_SS = self._everyones("all_gather", paddle.to_tensor(sent, dtype="int64"))
        rows, me = self._everyones("alltoall_single", in_), self.rank()
        parts = []
        for source, (sizes_S, tensor) in enumerate(zip(sizes_SS, rows, strict=True)):
            lengths: list[int] = sizes_S.numpy().tolist()
            if lengths[me] != wanted[source]:
                raise ValueError(
                    f"all_to_all: rank {self._ranks[source]} sends rank {self._rank} "
                    f"{lengths[me]} rows, which expects {wanted[source]}"
                )
            start = sum(lengths[:me])
            parts.append(tensor[start : start + lengths[me]])
        write(paddle.concat(parts), out)
        return DONE

    def barrier(self, device_id: int = -1) -> DoneTask:
        self._everyones("barrier", None)
        return DONE

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"simulated ranks have no {name}: they run collectives of tensor, sequence and expert "
            "parallelism; test the rest with several processes"
        )

    def _everyones(self, kind: str, tensor: Tensor | None, detail: str = "") -> list[Tensor]:
        if current_rank() is not self._own:
            raise RuntimeError(
                f"{kind} of simulated rank {self._rank} was called outside of its simulation: "
                "run forward, backward and everything collective inside"
            )
        call = Call(described_call(kind, self._ranks, tensor), detail)
        for observe in list(self._own.observers):
            observe(call.collective)
        return self._exchange.exchange(self._rank, call, tensor)

    def _slices(self, tensor: Tensor, kind: str) -> list[Tensor]:
        rows, rest = divmod(tensor.shape[0], self.size())
        if rest:
            raise ValueError(f"{kind}: {tensor.shape[0]} rows do not divide by {self.size()} ranks")
        return [tensor[i * rows : (i + 1) * rows] for i in range(self.size())]

    def _check_list(self, tensors: Sequence[Tensor], shape: list[int], kind: str) -> None:
        found = [tensor.shape for tensor in tensors]
        if found != [shape] * self.size():
            raise ValueError(f"{kind} needs {self.size()} tensors of {shape}, got {found}")


def simulated_group(
    own: SimulatedRank, rank: int, ranks: Sequence[int], exchange: Exchange
) -> Group:
    """A group of `paddle.distributed` for one rank of a simulation."""
    # A group of one rank has no connection, as in `paddle_vl.parallel.topology`.
    connection: Any = None
    if len(ranks) > 1:
        connection = SimulatedProcessGroup(own, rank, ranks, exchange)
    return Group(list(ranks).index(rank), -1, list(ranks), connection, "simulated")


def _name(op: Any) -> str:
    return getattr(op, "name", str(op))


def _reduced(tensors: Sequence[Tensor], op: Any) -> Tensor:
    """The reduction over ranks; half precision is summed in float32."""
    dtype = tensors[0].dtype
    stacked = paddle.stack([x.astype("float32") if dtype in _HALF else x for x in tensors])
    reduce = {"SUM": paddle.sum, "AVG": paddle.mean, "MAX": paddle.max, "MIN": paddle.min}
    reduce["PROD"] = paddle.prod
    return reduce[_name(op)](stacked, axis=0).astype(dtype)
