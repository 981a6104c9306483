"""Gloo groups with keys of their own in the store, and the two-rank groups for point-to-point."""

import os
from collections.abc import Callable

from paddle.base import core

from paddle_vl.parallel.gloo_fleet.patch import Patch
from paddle_vl.parallel.gloo_fleet.peers import id_of, know_group, make_group, ranks_of
from paddle_vl.parallel.store.rendezvous import meet, store_of

_DEFAULT_GROUP_ID = 0
# Paddle keeps groups by 32-bit number: fleet's count from 10 up, those of pairs come far behind.
_FIRST_PAIR_ID = 1 << 20
_MOST_RANKS = 1 << 10

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
        pair_id = (group_id * _MOST_RANKS + low) * _MOST_RANKS + high
        pair_id += _FIRST_PAIR_ID
        name = f"{group_id}/{low}-{high}"
        _pairs[pair] = _meet(name, rank, 2, pair_id)
        ranks = ranks_of(group)
        know_group(_pairs[pair], pair_id, [ranks[low], ranks[high]])
    return _pairs[pair]


def _meet(name: str, rank: int, size: int, group_id: int) -> core.ProcessGroup:
    """Make a gloo group whose ranks find each other under keys that only they use."""
    store = store_of(f"gloo group {name}")
    _alive.append(store)
    group = make_group(
        f"group {name} of {size} ranks",
        lambda: core.ProcessGroupGloo.create(store, rank, size, group_id),
    )
    _alive.append(group)
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
            know_group(group, group_id)
            _alive.append(group)
        return group

    return _new_process_group_impl


def _init_parallel_env(paddles_own: Callable) -> Callable:
    def init_parallel_env(nccl_config=None):
        if int(os.environ.get("PADDLE_TRAINERS_NUM", "1")) > 1:
            meet()
        return paddles_own(nccl_config)

    return init_parallel_env


PATCHES = (
    Patch(
        owner="paddle.distributed.parallel",
        name="init_parallel_env",
        parameters=("nccl_config",),
        reason="rank 0 listens on all addresses of its machine",
        make=_init_parallel_env,
    ),
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
