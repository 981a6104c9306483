"""Sending between two ranks of a gloo group.

A gloo group numbers its operations, so a message between two members of a larger group puts these
two ahead of the others and the next collective hangs; messages therefore go through groups of two.
A send returns when the peer has received, so several are done in one order that all ranks share.
"""

from collections.abc import Callable

import paddle
import paddle.distributed
from paddle.base import core
from paddle.distributed.fleet.meta_parallel.pp_utils import p2p_communication

from paddle_vl.parallel.gloo_fleet.patch import NOT_IN_GLOO, Patch, group_method
from paddle_vl.parallel.gloo_fleet.peers import finish
from paddle_vl.parallel.gloo_fleet.process_group import DONE, contiguous, flat_part, write
from paddle_vl.parallel.gloo_fleet.rendezvous import pair_group

_raw = core.ProcessGroup


@paddle.no_grad()
def _send(group, tensor, dst, sync_op=True):
    if tensor.size:
        pair = pair_group(group, dst)
        finish(pair, "send", _raw.send, contiguous(tensor), 1 - pair.rank(), True)
    return DONE


@paddle.no_grad()
def _recv(group, tensor, src, sync_op=True):
    if tensor.size:
        pair = pair_group(group, src)
        result = contiguous(tensor)
        finish(pair, "recv", _raw.recv, result, 1 - pair.rank(), True)
        write(result, tensor)
    return DONE


def _send_partial(group, tensor, dst, num, id, sync_op=True):
    return _send(group, flat_part(tensor, num, id), dst)


@paddle.no_grad()
def _recv_partial(group, tensor, src, num, id, sync_op=True):
    part = flat_part(tensor, num, id).clone()
    _recv(group, part, src)
    parts = [part if i == id else flat_part(tensor, num, i) for i in range(num)]
    write(paddle.concat(parts), tensor)
    return DONE


def _batch_isend_irecv(paddles_own: Callable) -> Callable:
    def batch_isend_irecv(p2p_op_list):
        if not _on_gloo(p2p_op_list):
            return paddles_own(p2p_op_list)
        ordered = _in_shared_order(p2p_op_list, paddle.distributed.isend)
        tasks = [each.op(each.tensor, each.peer, each.group) for each in ordered]
        return [task for task in tasks if task is not None]

    return batch_isend_irecv


def _batch_send_recv(paddles_own: Callable) -> Callable:
    def batch_send_recv_on_calc_stream(p2p_op_list):
        if not _on_gloo(p2p_op_list):
            return paddles_own(p2p_op_list)
        for each in _in_shared_order(p2p_op_list, p2p_communication._send_on_calc_stream):
            each.op(each.tensor, each.group, each.peer, each.nranks, each.rank_id)
        return None

    return batch_send_recv_on_calc_stream


def _on_gloo(operations) -> bool:
    """Whether the first operation of a list (as Paddle takes the rest to be) is of a gloo group."""
    return bool(operations) and isinstance(operations[0].group.process_group, core.ProcessGroupGloo)


def _in_shared_order(operations, send: Callable) -> list:
    """By sender and receiver; several between the same two keep their order."""
    rank = paddle.distributed.get_rank()
    return sorted(
        operations,
        key=lambda each: (rank, each.peer) if each.op == send else (each.peer, rank),
    )


_TAGS = "in a group of more than two the next collective hangs for 30 seconds"


PATCHES = (
    group_method("send", "tensor dst sync_op", _TAGS, _send),
    group_method("recv", "tensor src sync_op", _TAGS, _recv),
    group_method("send_on_calc_stream", "tensor dst", NOT_IN_GLOO, _send),
    group_method("recv_on_calc_stream", "tensor src", NOT_IN_GLOO, _recv),
    group_method("send_partial", "tensor dst num id sync_op", NOT_IN_GLOO, _send_partial),
    group_method("recv_partial", "tensor src num id sync_op", NOT_IN_GLOO, _recv_partial),
    group_method("send_partial_on_calc_stream", "tensor dst num id", NOT_IN_GLOO, _send_partial),
    group_method("recv_partial_on_calc_stream", "tensor src num id", NOT_IN_GLOO, _recv_partial),
    Patch(
        owner="paddle.distributed.communication.batch_isend_irecv",
        name="batch_isend_irecv",
        parameters=("p2p_op_list",),
        reason="gloo's isend blocks: two ranks that send to each other first wait for ever",
        make=_batch_isend_irecv,
    ),
    Patch(
        owner="paddle.distributed.fleet.meta_parallel.pp_utils.p2p_communication",
        name="batch_send_recv_on_calc_stream",
        parameters=("p2p_op_list",),
        reason="gloo's send blocks: two stages that send to each other first wait for ever",
        make=_batch_send_recv,
    ),
)
