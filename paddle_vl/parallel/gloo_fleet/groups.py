"""Groups of gloo: their creation and ranks."""

from paddle.base import core
from paddle.distributed import collective

from paddle_vl.parallel.store import rendezvous
from paddle_vl.parallel.store.membership import of_this_process, ranks_text

# Global ranks of groups that are missing in Paddle's own list of groups.
_ranks: dict[int, list[int]] = {}
_ids: dict[int, int] = {}
# Groups live as long as the process, and the store of a group as long as the group.
_alive: list[object] = []


def register_group(group: core.ProcessGroup, group_id: int, ranks: list[int] | None = None) -> None:
    """Register a new group.

    Args:
        ranks: global ranks, if Paddle does not know the group.
    """
    _ids[id(group)] = group_id
    _alive.append(group)
    if ranks is not None:
        _ranks[id(group)] = ranks


def id_of(group: core.ProcessGroup) -> int:
    """The id of a group, which was made after install()."""
    return _ids[id(group)]


def ranks_of(group: core.ProcessGroup) -> list[int]:
    """The global ranks of a group, in its order."""
    if id(group) in _ranks:
        return _ranks[id(group)]
    known = collective._get_group_map().get(_ids.get(id(group)))
    return list(range(group.size())) if known is None else list(known.ranks)


def make_gloo_group(name: str, rank: int, size: int, group_id: int) -> core.ProcessGroup:
    """Make a group whose ranks find each other under its own keys in the store.

    Raises:
        RuntimeError: a rank has ended, which `PeerWatch` names.
    """
    told = f"gloo group {name} of {size} ranks could not be made"
    store = rendezvous.store_of(f"gloo group {name}")
    # Gloo would wait minutes for a rank that left its address in the store before it ended.
    if ended := of_this_process[0].state()["ended"]:
        raise RuntimeError(f"{told}: {ranks_text(ended)} ended meanwhile")
    try:
        group = core.ProcessGroupGloo.create(store, rank, size, group_id)
    except (RuntimeError, ValueError) as error:
        raise RuntimeError(f"{told}: {error}") from error
    _alive.extend((store, group))
    return group
