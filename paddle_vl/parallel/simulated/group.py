"""Process groups of simulated ranks: collectives computed from all ranks' tensors in this process.

A group has the methods of Paddle's process groups that fleet's layers and `paddle.distributed`
call. Each describes itself, gets what every rank contributes from an `Exchange`, and writes this
rank's result. What an accelerator would refuse or do silently wrong (shards of different length, an
output of another size or dtype) is refused here.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import paddle
from paddle import Tensor
from paddle.base import core
from paddle.distributed.communication.group import Group

from paddle_vl.parallel.gloo_fleet.process_group import DONE, DoneTask, write
from paddle_vl.parallel.recorder import (
    Collective,
    described_call,
    is_in_backward,
    observers_of_thread,
)

_SUM = core.ReduceOp.SUM
_HALF = (paddle.float16, paddle.bfloat16)
_REDUCE = {
    "SUM": paddle.sum, "AVG": paddle.mean, "MAX": paddle.max, "MIN": paddle.min,
    "PROD": paddle.prod,
}  # fmt: skip
_local = threading.local()


# Gives a collective of a rank (in phase `forward` or `backward`) the tensors of all its ranks, in
# the group's order. The tensor is what the rank contributes; a barrier has none.
Exchange = Callable[[int, Collective, Tensor | None], list[Tensor]]


class SimulatedRank:
    """One rank of a simulated mp group of `size` ranks.

    Attributes:
        mp_group: a `paddle.distributed` group, with `rank` and `nranks`.
        observers: called with each collective before it runs.
    """

    def __init__(self, rank: int, size: int, exchange: Exchange):
        self.rank, self.size, self.exchange = rank, size, exchange
        self.observers: list[Callable[[Any], object]] = []
        # A group of one rank has no connection, as in `paddle_vl.parallel.topology`.
        connection: Any = SimulatedProcessGroup(self) if size > 1 else None
        self.mp_group: Any = Group(rank, -1, list(range(size)), connection, "simulated")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Be this rank in this thread."""
        _local.rank = self
        try:
            with observers_of_thread(self.observers):
                yield
        finally:
            _local.rank = None


def current_rank() -> SimulatedRank | None:
    """The simulated rank of this thread; None outside of a simulation."""
    return getattr(_local, "rank", None)


class SimulatedProcessGroup:
    """One rank's process group. Methods take their arguments as Paddle's own do.

    Raises, by every method:
        ValueError: shapes or dtypes that the collective does not take.
        RuntimeError: called outside of the simulation, or ranks disagree; see `Exchange`.
    """

    def __init__(self, own: SimulatedRank):
        self._own, self._rank, self._size = own, own.rank, own.size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return "SIMULATED"

    @paddle.no_grad()
    def all_reduce(self, tensor: Tensor, op: Any = _SUM, sync_op: bool = True) -> DoneTask:
        write(_reduced(self._everyones("all_reduce", tensor, _name(op)), op), tensor)
        return DONE

    allreduce = all_reduce

    @paddle.no_grad()
    def all_gather_into_tensor(self, out: Tensor, in_: Tensor, sync_op: bool = True) -> DoneTask:
        if out.size != self._size * in_.size or out.dtype != in_.dtype:
            raise ValueError(
                f"all_gather of {in_.dtype} {in_.shape} over {self._size} ranks needs an output "
                f"of {self._size * in_.size} elements of that dtype, got {out.dtype} {out.shape}"
            )
        write(paddle.concat([x.reshape([-1]) for x in self._everyones("all_gather", in_)]), out)
        return DONE

    @paddle.no_grad()
    def all_gather(self, out: Any, in_: Any, sync_op: bool | None = None) -> DoneTask:
        if sync_op is None:
            # Paddle's older overload has them swapped.
            out, in_ = in_, out
        return self.all_gather_on_calc_stream(out, in_)

    @paddle.no_grad()
    def all_gather_on_calc_stream(self, out: Any, in_: Tensor) -> DoneTask:
        if isinstance(out, Tensor):
            return self.all_gather_into_tensor(out, in_)
        found = [tensor.shape for tensor in out]
        if found != [in_.shape] * self._size:
            raise ValueError(f"all_gather needs {self._size} tensors of {in_.shape}, got {found}")
        for value, target in zip(self._everyones("all_gather", in_), out, strict=True):
            write(value, target)
        return DONE

    @paddle.no_grad()
    def reduce_scatter_tensor(
        self, out: Tensor, in_: Tensor, op: Any = _SUM, sync_op: bool = True
    ) -> DoneTask:
        own = self._slices(in_, "reduce_scatter")[self._rank]
        if own.shape != out.shape or out.dtype != in_.dtype:
            raise ValueError(
                f"reduce_scatter of {in_.dtype} {in_.shape} over {self._size} ranks needs an "
                f"output of {own.shape} of that dtype, got {out.dtype} {out.shape}"
            )
        total = _reduced(self._everyones("reduce_scatter", in_, _name(op)), op)
        write(self._slices(total, "reduce_scatter")[self._rank], out)
        return DONE

    @paddle.no_grad()
    def broadcast(self, tensor: Tensor, src: int, sync_op: bool = True) -> DoneTask:
        write(self._everyones("broadcast", tensor, f"from rank {src}")[src], tensor)
        return DONE

    def barrier(self, device_id: int = -1) -> DoneTask:
        self._everyones("barrier", None)
        return DONE

    def __getattr__(self, name: str) -> Any:
        plain = name.removesuffix("_on_calc_stream")
        if plain != name and hasattr(type(self), plain):
            return getattr(self, plain)
        raise AttributeError(
            f"simulated ranks have no {name}: they run collectives of tensor and sequence "
            "parallelism; test the rest with several processes"
        )

    def _everyones(self, kind: str, tensor: Tensor | None, detail: str = "") -> list[Tensor]:
        if current_rank() is not self._own:
            raise RuntimeError(
                f"{kind} of simulated rank {self._rank} was called outside of its simulation: "
                "run forward, backward and everything collective inside"
            )
        call = described_call(kind, tuple(range(self._size)), tensor)
        for observe in list(self._own.observers):
            observe(call)
        phase = "backward" if is_in_backward() else "forward"
        call = call._replace(phase=phase, detail=detail)
        return self._own.exchange(self._rank, call, tensor)

    def _slices(self, tensor: Tensor, kind: str) -> list[Tensor]:
        rows, rest = divmod(tensor.shape[0], self._size)
        if rest:
            raise ValueError(f"{kind}: {tensor.shape[0]} rows do not divide by {self._size} ranks")
        return [tensor[i * rows : (i + 1) * rows] for i in range(self._size)]


def _name(op: Any) -> str:
    return getattr(op, "name", str(op))


def _reduced(tensors: Sequence[Tensor], op: Any) -> Tensor:
    """The reduction over ranks; half precision is summed in float32."""
    dtype = tensors[0].dtype
    stacked = paddle.stack([x.astype("float32") if dtype in _HALF else x for x in tensors])
    return _REDUCE[_name(op)](stacked, axis=0).astype(dtype)
