"""The collectives of a gloo group that a run uses, exact for every dtype, stride and size.

Each is composed of three that gloo computes correctly for contiguous, non-empty tensors: all_reduce
(not in float16), all_gather_into_tensor and broadcast. All are synchronous and return a finished
task. Only methods of ProcessGroupGloo are replaced.
"""

from collections.abc import Sequence

import paddle
from paddle import Tensor
from paddle.base import core

from paddle_vl.parallel.gloo_fleet.patch import NOT_IN_GLOO, Patch, group_method
from paddle_vl.parallel.gloo_fleet.peers import finish, unwrapped

_SUM = core.ReduceOp.SUM
_HALF = (paddle.float16, paddle.bfloat16)
# Gloo crashes the process for other dtypes.
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
    """The task of a finished operation."""

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
            f"A collective got a tensor of {tensor.dtype}; on CPU ranks they take {known}."
        )
    # Not Tensor.contiguous, which moves a view to other storage.
    return tensor if tensor.is_contiguous() else tensor.clone()


def write(values: Tensor, target: Tensor) -> None:
    """Copy values to the target, whatever its strides and shape, unless they are the same."""
    if values is not target and target.size > 0:
        # Paddle's assign would move a strided target to other storage.
        source = values.reshape(target.shape).astype(target.dtype)
        target.copy_(source, True)  # pyright: ignore[reportCallIssue]


@paddle.no_grad()
def all_reduce(group, tensor, op=_SUM, sync_op=True):
    """Reduce a tensor over the group, in place; half precision is reduced in float32."""
    if tensor.size == 0:
        return DONE
    result = contiguous(tensor)
    if tensor.dtype in _HALF:
        result = result.astype("float32")
    finish(group, "all_reduce", _raw.all_reduce, result, op, True)
    write(result, tensor)
    return DONE


@paddle.no_grad()
def _reduce_scatter_tensor(group, out, in_, op=_SUM, sync_op=True):
    """Slice `rank` of the reduced input; `out` may be a view of that slice of the input."""
    slices = _equal_slices(in_, group.size())
    _check_shapes(slices, [out.shape] * group.size(), "reduce_scatter")
    result = paddle.stack(slices) if out.size else out.clone()
    all_reduce(group, result, op)
    if out.size:
        write(result[group.rank()], out)
    return DONE


def _gather(group, tensor) -> Tensor:
    """All-gather of equally many elements per rank: `[size, elements]`."""
    rows = paddle.empty([group.size(), tensor.size], dtype=tensor.dtype)
    if tensor.size:
        flat = contiguous(tensor).reshape([-1])
        finish(group, "all_gather", _raw.all_gather_into_tensor, rows.reshape_([-1]), flat, True)
    return rows.reshape_([group.size(), tensor.size])


@paddle.no_grad()
def all_gather_into_tensor(group, out, in_, sync_op=True):
    """All ranks' tensors, concatenated."""
    if out.size != group.size() * in_.size:
        raise ValueError(
            f"all_gather of {in_.shape} over {group.size()} ranks needs an output of "
            f"{group.size() * in_.size} elements, got {out.shape}."
        )
    write(_gather(group, in_), out)
    return DONE


@paddle.no_grad()
def _all_gather(group, out, in_, sync_op=None):
    """All ranks' tensors, in one tensor or in a list of them."""
    if sync_op is None:
        # Paddle's older overload has them swapped.
        out, in_ = in_, out
    if isinstance(out, Tensor):
        return all_gather_into_tensor(group, out, in_)
    _check_shapes(out, [in_.shape] * group.size(), "all_gather")
    for row, target in zip(_gather(group, in_), out, strict=True):
        write(row, target)
    return DONE


@paddle.no_grad()
def _broadcast(group, tensor, src, sync_op=True):
    """Copy the tensor of rank `src` of the group to all of its ranks, in place."""
    if tensor.size:
        result = contiguous(tensor)
        finish(group, "broadcast", _raw.broadcast, result, src, True)
        write(result, tensor)
    return DONE


@paddle.no_grad()
def _all_to_all_single(group, out, in_, out_sizes, in_sizes, sync_op=True):
    """Slice j of rank i's input becomes slice i of rank j's output; slices may differ in length.

    Args:
        out_sizes, in_sizes: lengths of the slices along the first axis; empty for equal ones.
    """
    rank, size = group.rank(), group.size()
    sent = _equal_slices(in_, size) if not in_sizes else paddle.split(in_, list(in_sizes))
    lengths = list(out_sizes) or [out.shape[0] // size] * size
    received = [paddle.empty([length, *out.shape[1:]], dtype=out.dtype) for length in lengths]
    sizes_SS = _gather(group, paddle.to_tensor([part.size for part in sent], dtype="int64")).numpy()
    for source, part in enumerate(received):
        if part.size != sizes_SS[source, rank]:
            raise ValueError(
                f"all_to_all: rank {source} sends rank {rank} {sizes_SS[source, rank]} elements, "
                f"and the output has {part.size} for them: compare the sizes of both sides."
            )
    width = int(sizes_SS.sum(axis=1).max())
    padding = paddle.zeros([width - int(sizes_SS[rank].sum())], dtype=out.dtype)
    rows = _gather(group, paddle.concat([*(part.reshape([-1]) for part in sent), padding]))
    for source, part in enumerate(received):
        start = int(sizes_SS[source, :rank].sum())
        write(rows[source, start : start + part.size], part)
    write(paddle.concat(received), out)
    return DONE


def _barrier(group, device_id=-1):
    finish(group, "barrier", _raw.barrier)
    return DONE


def _equal_slices(tensor: Tensor, size: int) -> list[Tensor]:
    if tensor.shape[0] % size:
        raise ValueError(f"{tensor.shape[0]} rows cannot be divided over {size} ranks.")
    rows = tensor.shape[0] // size
    return [tensor[i * rows : (i + 1) * rows] for i in range(size)]


def _check_shapes(tensors: Sequence[Tensor], shapes: list, what: str) -> None:
    found = [tensor.shape for tensor in tensors]
    if found != shapes:
        raise ValueError(f"{what} needs one tensor of {shapes[0]} for each rank, got {found}.")


_PARTLY = "gloo refuses empty and non-contiguous tensors and crashes at unknown dtypes"
_REDUCE_REASON = "float16 sums give inf, bfloat16 ones round at each rank; " + _PARTLY
_BACKWARD_REASON = "the error of a collective in a backward pass is hidden in Paddle's traceback"
PATCHES = (
    group_method("all_reduce", _REDUCE_REASON, all_reduce),
    group_method("reduce_scatter_tensor", NOT_IN_GLOO, _reduce_scatter_tensor),
    group_method("all_gather", _PARTLY, _all_gather),
    group_method("all_gather_into_tensor", _PARTLY, all_gather_into_tensor),
    group_method("broadcast", _PARTLY, _broadcast),
    group_method("all_to_all_single", NOT_IN_GLOO, _all_to_all_single),
    group_method("barrier", "its error does not name the failed rank", _barrier),
    Patch(
        owner="paddle:Tensor",
        name="backward",
        reason=_BACKWARD_REASON,
        make=unwrapped,
    ),
    Patch(
        owner="paddle.autograd.backward_mode",
        name="backward",
        reason=_BACKWARD_REASON,
        make=unwrapped,
    ),
)
