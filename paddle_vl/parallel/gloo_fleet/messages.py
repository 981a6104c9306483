"""Point-to-point messages of gloo groups, and the creation of groups.

A gloo group numbers its operations: after a message between two members of a larger group their
numbers would be ahead, and the next collective would hang. Messages therefore use groups of two,
created at first use. A send returns when the peer has received, so several messages are sent in an
order that all ranks share.
"""

import os
from collections.abc import Callable

import paddle
import paddle.distributed
from paddle.base import core
from paddle.distributed.fleet.meta_parallel.pp_utils import p2p_communication

from paddle_vl.parallel.gloo_fleet.patch import NOT_IN_GLOO, Patch, group_method
from paddle_vl.parallel.gloo_fleet.peers import (
    finish,
    id_of,
    make_group,
    ranks_of,
    register_group,
)
from paddle_vl.parallel.gloo_fleet.process_group import DONE, contiguous, write
from paddle_vl.parallel.store.rendezvous import meet, store_of

_DEFAULT_GROUP_ID = 0
# Paddle's group ids are 32-bit; fleet's count up from 10, those of pairs start far above.
_FIRST_PAIR_ID = 1 << 20
_MAX_RANKS = 1 << 10

_raw = core.ProcessGroup
_pairs: dict[tuple[int, int, int], core.ProcessGroup] = {}
# Groups live as long as the process, and the store of a group as long as the group.
_alive: list[object] = []


@paddle.no_grad()
def send(group, tensor, dst, sync_op=True):
    """Send a tensor to rank `dst` of the group."""
    if tensor.size:
        pair = _pair_group(group, dst)
        finish(pair, "send", _raw.send, contiguous(tensor), 1 - pair.rank(), True)
    return DONE


@paddle.no_grad()
def recv(group, tensor, src, sync_op=True):
    """Receive a tensor from rank `src` of the group, in place."""
    if tensor.size:
        pair = _pair_group(group, src)
        result = contiguous(tensor)
        finish(pair, "recv", _raw.recv, result, 1 - pair.rank(), True)
        write(result, tensor)
    return DONE


def _pair_group(group: core.ProcessGroup, peer: int) -> core.ProcessGroup:
    """The group of this rank and `peer` (a rank within `group`), made at the first use.

    Both ranks must ask for it; the smaller rank within `group` is rank 0 of the pair.

    Raises:
        RuntimeError: the group was made before install().
    """
    if group.size() == 2:
        return group
    group_id = id_of(group)
    if group_id is None:
        raise RuntimeError(
            "This process group was made before the CPU fleet was installed: call install() "
            "before fleet.init or init_parallel_env."
        )
    low, high = sorted((group.rank(), peer))
    pair = (group_id, low, high)
    if pair not in _pairs:
        rank = 0 if group.rank() == low else 1
        pair_id = (group_id * _MAX_RANKS + low) * _MAX_RANKS + high
        pair_id += _FIRST_PAIR_ID
        _pairs[pair] = _new_gloo_group(f"{group_id}/{low}-{high}", rank, 2, pair_id)
        ranks = ranks_of(group)
        register_group(_pairs[pair], pair_id, [ranks[low], ranks[high]])
    return _pairs[pair]


def _new_gloo_group(name: str, rank: int, size: int, group_id: int) -> core.ProcessGroup:
    """Create a gloo group whose ranks find each other under its own keys in the store."""
    store = store_of(f"gloo group {name}")
    _alive.append(store)
    group = make_group(
        f"group {name} of {size} ranks",
        lambda: core.ProcessGroupGloo.create(store, rank, size, group_id),
    )
    _alive.append(group)
    return group


def _batch_isend_irecv(p2p_op_list):
    ordered = _in_shared_order(p2p_op_list, paddle.distributed.isend)
    tasks = [each.op(each.tensor, each.peer, each.group) for each in ordered]
    return [task for task in tasks if task is not None]


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


def _new_process_group(paddles_own: Callable) -> Callable:
    def _new_process_group_impl(
        backend, store, rank, world_size, *options, group_id=_DEFAULT_GROUP_ID, **others
    ):
        if backend == "gloo" and group_id != _DEFAULT_GROUP_ID:
            # All ranks make all groups in the same order, so the id names the group.
            group = _new_gloo_group(str(group_id), rank, world_size, group_id)
        else:
            group = paddles_own(
                backend, store, rank, world_size, *options, group_id=group_id, **others
            )
        if isinstance(group, core.ProcessGroupGloo):
            register_group(group, group_id)
            _alive.append(group)
        return group

    return _new_process_group_impl


def _init_parallel_env(paddles_own: Callable) -> Callable:
    def init_parallel_env(nccl_config=None):
        if int(os.environ.get("PADDLE_TRAINERS_NUM", "1")) > 1:
            meet()
        return paddles_own(nccl_config)

    return init_parallel_env


_IN_STEP = "in a group of more than two the next collective hangs for 30 seconds"
PATCHES = (
    group_method("send", _IN_STEP, send),
    group_method("recv", _IN_STEP, recv),
    group_method("send_on_calc_stream", NOT_IN_GLOO, send),
    group_method("recv_on_calc_stream", NOT_IN_GLOO, recv),
    Patch(
        owner="paddle.distributed.communication.batch_isend_irecv",
        name="batch_isend_irecv",
        reason="gloo's isend blocks: two ranks that send to each other first wait for ever",
        make=lambda _: _batch_isend_irecv,
    ),
    Patch(
        owner="paddle.distributed.fleet.meta_parallel.pp_utils.p2p_communication",
        name="batch_send_recv_on_calc_stream",
        reason="gloo's send blocks: two stages that send to each other first wait for ever",
        make=lambda _: _batch_send_recv,
    ),
    Patch(
        owner="paddle.distributed.parallel",
        name="init_parallel_env",
        reason="rank 0 listens on all addresses of its machine",
        make=_init_parallel_env,
    ),
    Patch(
        owner="paddle.distributed.collective",
        name="_new_process_group_impl",
        reason="groups made at the same time by different ranks, as fleet.init makes them, race "
        "in the shared store: connection refused, or a hang",
        make=_new_process_group,
    ),
)
