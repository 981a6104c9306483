"""Gloo groups that meet in a store of their own, and the two-rank groups for point-to-point."""

import socket
from collections.abc import Callable

import paddle
import paddle.distributed
from paddle.base import core
from paddle.distributed import collective

from paddle_vl.parallel.gloo_fleet.patch import Patch

# Seconds that a store waits for its peers: Paddle's own default.
_STORE_TIMEOUT = 900
_DEFAULT_GROUP_ID = 0
# Paddle keeps groups by 32-bit number: fleet's count from 10 up, those of pairs come far behind.
_FIRST_PAIR_ID = 1 << 20
_MOST_RANKS = 1 << 10

_group_ids: dict[int, int] = {}
_pairs: dict[tuple[int, int, int], core.ProcessGroup] = {}
# Groups live as long as the process, and a group's store as long as the group.
_alive: list[object] = []


def pair_group(group: core.ProcessGroup, peer: int) -> core.ProcessGroup:
    """The group of this rank and `peer` (a rank within `group`), made at the first use.

    Both ends must ask for it; the smaller rank within `group` is rank 0 of the pair.

    Raises:
        RuntimeError: the group was made before install().
    """
    if group.size() == 2:
        return group
    group_id = _group_ids.get(id(group))
    if group_id is None:
        raise RuntimeError(
            "This process group was made before the CPU fleet was installed: call install() "
            "before fleet.init or init_parallel_env."
        )
    low, high = sorted((group.rank(), peer))
    pair = (group_id, low, high)
    if pair not in _pairs:
        rank = 0 if group.rank() == low else 1
        pair_id = (group_id * _MOST_RANKS + low) * _MOST_RANKS + high
        _pairs[pair] = _meet(f"{group_id}/{low}-{high}", rank, 2, pair_id + _FIRST_PAIR_ID)
    return _pairs[pair]


def _meet(name: str, rank: int, size: int, group_id: int) -> core.ProcessGroup:
    """Make a gloo group whose ranks find each other through a store that only they use."""
    key = f"gloo_fleet/{name}"
    default_store = collective._default_store
    if rank == 0:
        host = paddle.distributed.ParallelEnv().current_endpoint.rpartition(":")[0] or "127.0.0.1"
        # The store aborts the process when its port is taken. A socket that is bound and does not
        # listen keeps the port from everybody but the store, whose sockets reuse addresses.
        with socket.socket() as placeholder:
            placeholder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            placeholder.bind(("", 0))
            port = placeholder.getsockname()[1]
            # Of size 1, or it would wait here for the others, who do not know the port yet.
            store = core.TCPStore(host, port, True, 1, _STORE_TIMEOUT)
        default_store.set(key, f"{host}:{port}")
    else:
        default_store.wait(key)
        host, _, port = bytes(default_store.get(key)).decode().rpartition(":")
        store = core.TCPStore(host, int(port), False, 1, _STORE_TIMEOUT)
    group = core.ProcessGroupGloo.create(store, rank, size, group_id)
    _alive.extend((store, group))
    return group


def _new_process_group(paddles_own: Callable) -> Callable:
    def _new_process_group_impl(
        backend,
        store,
        rank,
        world_size,
        group_name,
        pg_options,
        group_id=_DEFAULT_GROUP_ID,
        nccl_comm_init_option=0,
        nccl_config=None,
    ):
        if backend == "gloo" and group_id != _DEFAULT_GROUP_ID:
            # All processes make all groups in the same order, so the number names the group.
            group = _meet(str(group_id), rank, world_size, group_id)
        else:
            group = paddles_own(
                backend,
                store,
                rank,
                world_size,
                group_name,
                pg_options,
                group_id,
                nccl_comm_init_option,
                nccl_config,
            )
        if isinstance(group, core.ProcessGroupGloo):
            _group_ids[id(group)] = group_id
            _alive.append(group)
        return group

    return _new_process_group_impl


PATCHES = (
    Patch(
        owner="paddle.distributed.collective",
        name="_new_process_group_impl",
        parameters=(
            "backend",
            "store",
            "rank",
            "world_size",
            "group_name",
            "pg_options",
            "group_id",
            "nccl_comm_init_option",
            "nccl_config",
        ),
        reason="groups made at the same time by different ranks, as fleet.init makes them, race "
        "in the shared store: connection refused, or a hang",
        make=_new_process_group,
    ),
)
