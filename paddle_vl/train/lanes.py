"""Loaders of a rank's data lane, and of other lanes that its encoder lane serves (fan-out).

The order of samples is a function of the seed and the lane. On each machine one rank reads for all
that take batches of the same lane (`paddle_vl.data.lane_share`). A rank that encodes images of
other data lanes too takes their batches beside its own.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from tempfile import TemporaryDirectory
from typing import Any

from paddle_vl.batch.schema import OTHER_LANES, HostBatch
from paddle_vl.data.lane_share import LaneShare, local_socket, machine
from paddle_vl.data.loader import PrefetchLoader
from paddle_vl.families.base import RankInfo
from paddle_vl.parallel.ranks import SingleRank
from paddle_vl.parallel.topology import Topology


def lane_loaders(
    make: Callable[[RankInfo], Mapping[str, PrefetchLoader]],
    ranks: SingleRank,
    topology: Topology,
    idle: Callable[[], HostBatch] | None = None,
) -> dict[str, Any]:
    """The loaders of this rank's data lane, or of all lanes that its encoder lane serves, by name;
    each lane is read at most once per machine. Called by all ranks.

    Args:
        make: the loaders of one data lane. May be collective.
        idle: makes the batch of an ended lane of an evaluation, which goes on until all lanes have
            ended; None for training data, which has no end.
    """
    groups, lanes = topology.encoder, (ranks.data_rank,)
    if groups is not None and len(groups.role.served_lanes) > 1:
        lanes = groups.role.served_lanes
    by_lane = {}
    for lane in lanes:
        # This rank as a member of that data lane.
        member = copy(ranks)
        member.data_rank = lane
        by_lane[lane] = dict(make(member))
    for lane, share in _lane_shares(ranks, lanes).items():
        for loader in by_lane[lane].values():
            loader.share = share
    own = by_lane.pop(ranks.data_rank)
    if not by_lane:
        return own
    return {
        name: LanesLoader(loader, [other[name] for other in by_lane.values()], idle)
        for name, loader in own.items()
    }


def _lane_shares(ranks: SingleRank, lanes: Sequence[int]) -> dict[int, LaneShare]:
    """This rank's part in the reading of the lanes that several ranks of this machine take. Called
    by all ranks."""
    here, shares = machine(), {}
    seats = ranks.gathered([here, ranks.data_rank, list(lanes)])
    takers = {}
    for lane in lanes:
        near = [rank for rank, (where, *_) in enumerate(seats) if where == here]
        takers[lane] = [rank for rank in near if lane in seats[rank][2]]
        # A rank of the lane itself is first, so that ranks share the reading.
        takers[lane].sort(key=lambda rank: seats[rank][1] != lane)
    with TemporaryDirectory(prefix="paddle-vl-") as folder, ExitStack() as stack:
        listeners = {}
        for lane, (first, *others) in takers.items():
            if first == ranks.rank and others:
                listeners[lane] = stack.enter_context(local_socket())
                listeners[lane].bind(f"{folder}/{lane}")
                listeners[lane].listen(len(others))
        folders = ranks.gathered(folder)
        for lane, (first, *_) in takers.items():
            if first != ranks.rank:
                to_first = local_socket()
                to_first.connect(f"{folders[first]}/{lane}")
                shares[lane] = LaneShare(first, [to_first], reads=False)
        ranks.wait()
        for lane, listener in listeners.items():
            connections = [listener.accept()[0] for _ in takers[lane][1:]]
            shares[lane] = LaneShare(ranks.rank, connections, reads=True)
    return shares


class LanesLoader:
    """Batches of this rank's lane, with those of other lanes as their `OTHER_LANES`.

    Further attributes, such as `epoch`, are those of its own lane's loader.

    Args:
        own: loader of this rank's data lane.
        others: loaders of the other lanes, in the order of the lanes.
        idle: see `lane_loaders`.
    """

    def __init__(
        self,
        own: PrefetchLoader,
        others: list[PrefetchLoader],
        idle: Callable[[], HostBatch] | None,
    ):
        self.own, self.loaders, self.idle = own, [own, *others], idle
        self._iterators: list[Iterator[Any]] = list(map(iter, self.loaders))

    def __iter__(self) -> "LanesLoader":
        self._iterators = list(map(iter, self.loaders))
        return self

    def __next__(self) -> Any:
        batches: list[Any] = [next(each, None) for each in self._iterators]
        if all(batch is None for batch in batches):
            # Loaders begin a new epoch after their end.
            raise StopIteration
        self._iterators = [
            each if batch is not None else itertools.repeat(None)
            for each, batch in zip(self._iterators, batches, strict=True)
        ]
        own, *others = batches
        if own is None:
            assert self.idle is not None, "training data has no end"
            own = self.idle()
        return own | {OTHER_LANES: [other or {} for other in others]}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    @property
    def while_waiting(self) -> Callable[[], None]:
        return self.own.while_waiting

    @while_waiting.setter
    def while_waiting(self, call: Callable[[], None]) -> None:
        for loader in self.loaders:
            loader.while_waiting = call

    def __len__(self) -> int:
        return len(self.own)

    def load_state_dict(self, state: dict[str, Any], batches: int | None = None) -> None:
        """Continue all lanes at the position of this rank's, which is the same on every lane."""
        for loader in self.loaders:
            loader.load_state_dict(state, batches)

    def waiting_for(self) -> str:
        return "; ".join(loader.waiting_for() for loader in self.loaders)

    def close(self) -> None:
        for loader in self.loaders:
            loader.close()

    def __enter__(self) -> "LanesLoader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
