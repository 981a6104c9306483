"""The collectives and messages of gloo groups that a run uses, and the creation of groups.

Collectives are exact for every dtype, stride and size. Each is composed of three that gloo computes
correctly for contiguous, non-empty tensors: all_reduce (not in float16), all_gather_into_tensor and
broadcast. All are synchronous and return a finished task. Only methods of ProcessGroupGloo are
replaced.

A gloo group numbers its operations: after a message between two members of a larger group their
numbers would be ahead, and the next collective would hang. Messages therefore use groups of two,
created at first use. A send returns when the peer has received, so several messages are sent in an
order that all ranks share.
"""

from collections.abc import Callable, Sequence

import paddle
import paddle.distributed
from paddle import Tensor
from paddle.base import core
from paddle.distributed.fleet.meta_parallel.pp_utils import p2p_communication

from paddle_vl.parallel.gloo_fleet.groups import (
    id_of,
    make_gloo_group,
    ranks_of,
    register_group,
)
from paddle_vl.parallel.gloo_fleet.patch import NOT_IN_GLOO, group_method, replaces

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
_DEFAULT_GROUP_ID = 0
# Paddle's group ids are 32-bit; fleet's count up from 10, those of pairs start far above.
_FIRST_PAIR_ID = 1 << 20
_MAX_RANKS = 1 << 10
_pairs: dict[tuple[int, int, int], core.ProcessGroup] = {}

_PARTLY = "gloo refuses empty and non-contiguous tensors and crashes at unknown dtypes"
_IN_STEP = "in a group of more than two the next collective hangs for 30 seconds"


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


@group_method("all_reduce", "float16 sums give inf, bfloat16 ones round at each rank; " + _PARTLY)
@paddle.no_grad()
def all_reduce(group, tensor, op=_SUM, sync_op=True):
    """Reduce a tensor over the group, in place; half precision is reduced in float32."""
    if tensor.size == 0:
        return DONE
    result = contiguous(tensor)
    if tensor.dtype in _HALF:
        result = result.astype("float32")
    _raw.all_reduce(group, result, op, True).wait()
    write(result, tensor)
    return DONE


@group_method("reduce_scatter_tensor", NOT_IN_GLOO)
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
        _raw.all_gather_into_tensor(group, rows.reshape_([-1]), flat, True).wait()
    return rows.reshape_([group.size(), tensor.size])


@group_method("all_gather_into_tensor", _PARTLY)
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


@group_method("all_gather", _PARTLY)
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


@group_method("broadcast", _PARTLY)
@paddle.no_grad()
def _broadcast(group, tensor, src, sync_op=True):
    """Copy the tensor of rank `src` of the group to all of its ranks, in place."""
    if tensor.size:
        result = contiguous(tensor)
        _raw.broadcast(group, result, src, True).wait()
        write(result, tensor)
    return DONE


@group_method("all_to_all_single", NOT_IN_GLOO)
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


def _equal_slices(tensor: Tensor, size: int) -> list[Tensor]:
    if tensor.shape[0] % size:
        raise ValueError(f"{tensor.shape[0]} rows cannot be divided over {size} ranks.")
    rows = tensor.shape[0] // size
    return [tensor[i * rows : (i + 1) * rows] for i in range(size)]


def _check_shapes(tensors: Sequence[Tensor], shapes: list, what: str) -> None:
    found = [tensor.shape for tensor in tensors]
    if found != shapes:
        raise ValueError(f"{what} needs one tensor of {shapes[0]} for each rank, got {found}.")


@group_method("send", _IN_STEP)
@group_method("send_on_calc_stream", NOT_IN_GLOO)
@paddle.no_grad()
def send(group, tensor, dst, sync_op=True):
    """Send a tensor to rank `dst` of the group."""
    if tensor.size:
        pair = _pair_group(group, dst)
        _raw.send(pair, contiguous(tensor), 1 - pair.rank(), True).wait()
    return DONE


@group_method("recv", _IN_STEP)
@group_method("recv_on_calc_stream", NOT_IN_GLOO)
@paddle.no_grad()
def recv(group, tensor, src, sync_op=True):
    """Receive a tensor from rank `src` of the group, in place."""
    if tensor.size:
        pair = _pair_group(group, src)
        result = contiguous(tensor)
        _raw.recv(pair, result, 1 - pair.rank(), True).wait()
        write(result, tensor)
    return DONE


def _pair_group(group: core.ProcessGroup, peer: int) -> core.ProcessGroup:
    """The group of this rank and `peer` (a rank within `group`), made at the first use.

    Both ranks must ask for it; the smaller rank within `group` is rank 0 of the pair.
    """
    if group.size() == 2:
        return group
    group_id = id_of(group)
    low, high = sorted((group.rank(), peer))
    pair = (group_id, low, high)
    if pair not in _pairs:
        rank = 0 if group.rank() == low else 1
        pair_id = (group_id * _MAX_RANKS + low) * _MAX_RANKS + high
        pair_id += _FIRST_PAIR_ID
        _pairs[pair] = make_gloo_group(f"{group_id}/{low}-{high}", rank, 2, pair_id)
        ranks = ranks_of(group)
        register_group(_pairs[pair], pair_id, [ranks[low], ranks[high]])
    return _pairs[pair]


@replaces(
    "paddle.distributed.communication.batch_isend_irecv",
    "batch_isend_irecv",
    "gloo's isend blocks: two ranks that send to each other first wait for ever",
)
def _batch_isend_irecv(p2p_op_list):
    ordered = _in_shared_order(p2p_op_list, paddle.distributed.isend)
    tasks = [each.op(each.tensor, each.peer, each.group) for each in ordered]
    return [task for task in tasks if task is not None]


@replaces(
    p2p_communication.__name__,
    "batch_send_recv_on_calc_stream",
    "gloo's send blocks: two stages that send to each other first wait for ever",
)
def _batch_send_recv(p2p_op_list):
    for each in _in_shared_order(p2p_op_list, p2p_communication._send_on_calc_stream):
        each.op(each.tensor, each.group, each.peer, each.nranks, each.rank_id)


def _in_shared_order(operations, send: Callable) -> list:
    """Messages sorted by sender and receiver; the sort is stable."""
    rank = paddle.distributed.get_rank()
    return sorted(
        operations,
        key=lambda each: (rank, each.peer) if each.op == send else (each.peer, rank),
    )


@replaces(
    "paddle.distributed.collective",
    "_new_process_group_impl",
    "groups made at the same time by different ranks, as fleet.init makes them, race in the shared "
    "store: connection refused, or a hang",
    makes=True,
)
def _new_process_group(paddles_own: Callable) -> Callable:
    def _new_process_group_impl(
        backend, store, rank, world_size, *options, group_id=_DEFAULT_GROUP_ID, **others
    ):
        if backend == "gloo" and group_id != _DEFAULT_GROUP_ID:
            # All ranks make all groups in the same order, so the id names the group.
            group = make_gloo_group(str(group_id), rank, world_size, group_id)
        else:
            group = paddles_own(
                backend, store, rank, world_size, *options, group_id=group_id, **others
            )
        if isinstance(group, core.ProcessGroupGloo):
            register_group(group, group_id)
        return group

    return _new_process_group_impl
