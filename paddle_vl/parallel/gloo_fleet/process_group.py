"""The collectives of a gloo group, exact for every operation, dtype, stride and size.

Each is made of three that gloo does right for contiguous tensors of at least one element:
all_reduce (not in float16), all_gather_into_tensor and broadcast. All run to the end before they
return, so the tasks that they return are done. The methods are set on ProcessGroupGloo alone:
groups of other backends keep Paddle's own.
"""

from collections.abc import Sequence

import paddle
from paddle import Tensor
from paddle.base import core

from paddle_vl.parallel.gloo_fleet.patch import NOT_IN_GLOO, Patch, group_method
from paddle_vl.parallel.gloo_fleet.peers import finish, unwrapped

_SUM, _AVG = core.ReduceOp.SUM, core.ReduceOp.AVG
_HALF = (paddle.float16, paddle.bfloat16)
# Gloo ends the process at any other.
_DTYPES = (
    *_HALF,
    paddle.float32,
    paddle.float64,
    paddle.int64,
    paddle.int32,
    paddle.int8,
    paddle.uint8,
    paddle.bool,
)
_raw = core.ProcessGroup


class DoneTask:
    """What a finished operation returns."""

    def wait(self, timeout=None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


DONE = DoneTask()


def contiguous(tensor: Tensor) -> Tensor:
    """The tensor, or a contiguous copy; ValueError for a dtype that gloo cannot send."""
    if tensor.dtype not in _DTYPES:
        known = ", ".join(str(dtype).removeprefix("paddle.") for dtype in _DTYPES)
        raise ValueError(
            f"A collective got a tensor of {tensor.dtype}; on CPU processes they take {known}."
        )
    # Not Tensor.contiguous, which gives the view itself storage of its own.
    return tensor if tensor.is_contiguous() else tensor.clone()


def write(values: Tensor, target: Tensor) -> None:
    """Put values in the target, whatever its strides and shape, if it has not got them already."""
    if values is not target and target.size > 0:
        # Paddle's assign would give a strided target storage of its own.
        target.copy_(values.reshape(target.shape).astype(target.dtype), True)


@paddle.no_grad()
def _all_reduce(group, tensor, op=_SUM, sync_op=True):
    if tensor.size == 0:
        return DONE
    if op == _AVG and not tensor.is_floating_point():
        raise ValueError(f"ReduceOp.AVG got a tensor of {tensor.dtype}; it takes floating point.")
    result = contiguous(tensor)
    if tensor.dtype in _HALF:
        result = result.astype("float32")
    finish(group, "all_reduce", _raw.all_reduce, result, _SUM if op == _AVG else op, True)
    if op == _AVG:
        result = result / group.size()
    write(result, tensor)
    return DONE


@paddle.no_grad()
def _reduce(group, tensor, dst, op=_SUM, sync_op=True):
    result = tensor.clone()
    _all_reduce(group, result, op)
    if group.rank() == dst:
        write(result, tensor)
    return DONE


@paddle.no_grad()
def _reduce_scatter_tensor(group, out, in_, op=_SUM, sync_op=True):
    """Row part `rank` of the reduced input; `out` may be a view of that part of the input."""
    parts = _even_parts(in_, group.size())
    return _reduce_scatter(group, out, parts, op)


@paddle.no_grad()
def _reduce_scatter(group, out, in_, op=_SUM, sync_op=True):
    _check_parts(in_, [out.shape] * group.size(), "reduce_scatter")
    result = paddle.stack(list(in_)) if out.size else out.clone()
    _all_reduce(group, result, op)
    if out.size:
        write(result[group.rank()], out)
    return DONE


def _gather(group, tensor) -> Tensor:
    """[size, elements] of the same number of elements from every rank."""
    rows = paddle.empty([group.size(), tensor.size], dtype=tensor.dtype)
    if tensor.size:
        flat = contiguous(tensor).reshape([-1])
        finish(group, "all_gather", _raw.all_gather_into_tensor, rows.reshape_([-1]), flat, True)
    return rows.reshape_([group.size(), tensor.size])


@paddle.no_grad()
def _all_gather_into_tensor(group, out, in_, sync_op=True):
    if out.size != group.size() * in_.size:
        raise ValueError(
            f"all_gather of {in_.shape} over {group.size()} ranks needs an output of "
            f"{group.size() * in_.size} elements, got {out.shape}."
        )
    write(_gather(group, in_), out)
    return DONE


@paddle.no_grad()
def _all_gather(group, out, in_, sync_op=None):
    if sync_op is None:
        # Paddle's older overload, the other way round.
        out, in_ = in_, out
    return _all_gather_now(group, out, in_)


@paddle.no_grad()
def _all_gather_now(group, out, in_):
    if isinstance(out, Tensor):
        return _all_gather_into_tensor(group, out, in_)
    _check_parts(out, [in_.shape] * group.size(), "all_gather")
    for row, part in zip(_gather(group, in_), out, strict=True):
        write(row, part)
    return DONE


@paddle.no_grad()
def _all_gather_partial(group, out, in_, num, id):
    """Part `id` of `num` equal flat parts of the input, gathered from all ranks."""
    return _all_gather_into_tensor(group, out, flat_part(in_, num, id))


@paddle.no_grad()
def _broadcast(group, tensor, src, sync_op=True):
    if tensor.size:
        result = contiguous(tensor)
        finish(group, "broadcast", _raw.broadcast, result, src, True)
        write(result, tensor)
    return DONE


@paddle.no_grad()
def _scatter_tensor(group, out, in_, src, sync_op=True):
    parts = _even_parts(in_, group.size()) if group.rank() == src else None
    return _scatter_now(group, out, parts, src)


@paddle.no_grad()
def _scatter(group, out, in_, src, sync_op=None):
    if sync_op is None:
        # Paddle's older overload, the other way round.
        out, in_ = in_, out
    return _scatter_now(group, out, in_, src)


@paddle.no_grad()
def _scatter_now(group, out, in_, src):
    if isinstance(in_, Tensor):
        return _scatter_tensor(group, out, in_, src)
    rows = paddle.empty([group.size(), out.size], dtype=out.dtype)
    if group.rank() == src:
        _check_parts(in_, [out.shape] * group.size(), "scatter")
        rows = paddle.stack([part.reshape([-1]) for part in in_]) if out.size else rows
    _broadcast(group, rows, src)
    write(rows[group.rank()], out)
    return DONE


@paddle.no_grad()
def _gather_to(group, in_, out, dst, sync_op=True, use_calc_stream=False):
    rows = _gather(group, in_)
    if group.rank() == dst:
        _check_parts(out, [in_.shape] * group.size(), "gather")
        for row, part in zip(rows, out, strict=True):
            write(row, part)
    return DONE


@paddle.no_grad()
def _all_to_all(group, out, in_, sync_op=True):
    """Part j of rank i's input becomes part i of rank j's output; parts may differ in size."""
    rank, size = group.rank(), group.size()
    if len(in_) != size or len(out) != size:
        raise ValueError(f"all_to_all over {size} ranks got {len(in_)} parts for {len(out)}.")
    sizes_SS = _gather(group, paddle.to_tensor([part.size for part in in_], dtype="int64")).numpy()
    for source, part in enumerate(out):
        if part.size != sizes_SS[source, rank]:
            raise ValueError(
                f"all_to_all: rank {source} sends rank {rank} {sizes_SS[source, rank]} elements, "
                f"and its place there has {part.size}: compare the sizes of both sides."
            )
    width = int(sizes_SS.sum(axis=1).max())
    padding = paddle.zeros([width - int(sizes_SS[rank].sum())], dtype=out[0].dtype)
    rows = _gather(group, paddle.concat([*(part.reshape([-1]) for part in in_), padding]))
    for source, part in enumerate(out):
        start = int(sizes_SS[source, :rank].sum())
        write(rows[source, start : start + part.size], part)
    return DONE


@paddle.no_grad()
def _all_to_all_single(group, out, in_, out_sizes, in_sizes, sync_op=True):
    size = group.size()
    parts = _even_parts(in_, size) if not in_sizes else paddle.split(in_, list(in_sizes))
    rows = list(out_sizes) or [out.shape[0] // size] * size
    results = [paddle.empty([count, *out.shape[1:]], dtype=out.dtype) for count in rows]
    _all_to_all(group, results, parts)
    write(paddle.concat(results), out)
    return DONE


def _all_to_all_tensor(group, out, in_, sync_op=True):
    return _all_to_all_single(group, out, in_, [], [])


def _barrier(group, device_id=-1):
    finish(group, "barrier", _raw.barrier)
    return DONE


def _even_parts(tensor: Tensor, size: int) -> list[Tensor]:
    if tensor.shape[0] % size:
        raise ValueError(f"{tensor.shape[0]} rows cannot be divided over {size} ranks.")
    rows = tensor.shape[0] // size
    return [tensor[i * rows : (i + 1) * rows] for i in range(size)]


def flat_part(tensor: Tensor, num: int, id: int) -> Tensor:
    if tensor.size % num:
        raise ValueError(f"{tensor.shape} cannot be divided into {num} equal parts.")
    length = tensor.size // num
    return tensor.reshape([-1])[id * length : (id + 1) * length]


def _check_parts(parts: Sequence[Tensor], shapes: list, what: str) -> None:
    found = [part.shape for part in parts]
    if found != shapes:
        raise ValueError(f"{what} needs one tensor of {shapes[0]} for each rank, got {found}.")


_PARTLY = "gloo refuses empty and non-contiguous tensors and ends the process at unknown dtypes"


# Below it Paddle scales the output of a reduce_scatter before reducing the input.
_NCCL_WITH_AVERAGE = 21000
_BACKWARD_REASON = "the error of a collective in a backward pass is hidden in Paddle's trace"
_REDUCE_REASON = "float16 sums give inf, bfloat16 ones round at each rank, AVG fails; " + _PARTLY
PATCHES = (
    group_method("all_reduce", "tensor op sync_op", _REDUCE_REASON, _all_reduce),
    group_method("all_reduce_on_calc_stream", "tensor op", NOT_IN_GLOO, _all_reduce),
    group_method("allreduce", "tensor op", _REDUCE_REASON, _all_reduce),
    group_method("reduce", "tensor dst op sync_op", _REDUCE_REASON, _reduce),
    group_method("reduce_on_calc_stream", "tensor dst op", NOT_IN_GLOO, _reduce),
    group_method("reduce_scatter", "out in op sync_op", NOT_IN_GLOO, _reduce_scatter),
    group_method("reduce_scatter_on_calc_stream", "out in op", NOT_IN_GLOO, _reduce_scatter),
    group_method("reduce_scatter_tensor", "out in op sync_op", NOT_IN_GLOO, _reduce_scatter_tensor),
    group_method(
        "reduce_scatter_tensor_on_calc_stream", "out in op", NOT_IN_GLOO, _reduce_scatter_tensor
    ),
    group_method("all_gather", "out in sync_op", _PARTLY, _all_gather),
    group_method("all_gather_on_calc_stream", "out in", NOT_IN_GLOO, _all_gather_now),
    group_method("all_gather_into_tensor", "out in sync_op", _PARTLY, _all_gather_into_tensor),
    group_method(
        "all_gather_into_tensor_on_calc_stream", "out in", NOT_IN_GLOO, _all_gather_into_tensor
    ),
    group_method("all_gather_partial", "out in num id", NOT_IN_GLOO, _all_gather_partial),
    group_method(
        "all_gather_partial_on_calc_stream", "out in num id", NOT_IN_GLOO, _all_gather_partial
    ),
    group_method("broadcast", "tensor src sync_op", _PARTLY, _broadcast),
    group_method("broadcast_on_calc_stream", "tensor src", NOT_IN_GLOO, _broadcast),
    group_method("scatter", "out in src sync_op", _PARTLY, _scatter),
    group_method("scatter_on_calc_stream", "out in src", NOT_IN_GLOO, _scatter_now),
    group_method("scatter_tensor", "out in src sync_op", _PARTLY, _scatter_tensor),
    group_method("scatter_tensor_on_calc_stream", "out in src", NOT_IN_GLOO, _scatter_tensor),
    group_method("gather", "in out dst sync_op use_calc_stream", _PARTLY, _gather_to),
    group_method("all_to_all", "out in sync_op", NOT_IN_GLOO, _all_to_all),
    group_method("all_to_all_on_calc_stream", "out in", NOT_IN_GLOO, _all_to_all),
    group_method("all_to_all_tensor", "out in sync_op", NOT_IN_GLOO, _all_to_all_tensor),
    group_method("all_to_all_tensor_on_calc_stream", "out in", NOT_IN_GLOO, _all_to_all_tensor),
    group_method(
        "all_to_all_single",
        "out in out_sizes in_sizes sync_op",
        NOT_IN_GLOO,
        _all_to_all_single,
    ),
    group_method(
        "all_to_all_single_on_calc_stream",
        "out in out_sizes in_sizes",
        NOT_IN_GLOO,
        _all_to_all_single,
    ),
    group_method("barrier", "device_id", "its failure does not say whose it is", _barrier),
    # The average of all_reduce and reduce_scatter asks for NCCL's version before it gets here.
    Patch(
        owner="paddle.base.core",
        name="nccl_version",
        parameters=None,
        reason="ReduceOp.AVG fails with an AttributeError",
        make=lambda _: lambda: _NCCL_WITH_AVERAGE,
    ),
    Patch(
        owner="paddle:Tensor",
        name="backward",
        parameters=("self", "grad_tensor", "retain_graph"),
        reason=_BACKWARD_REASON,
        make=unwrapped,
    ),
    Patch(
        owner="paddle.autograd.backward_mode",
        name="backward",
        parameters=("tensors", "grad_tensors", "retain_graph"),
        reason=_BACKWARD_REASON,
        make=unwrapped,
    ),
)
