"""Training data of a rank whose encoder lane serves several data lanes (fan-out).

Such a rank encodes images of other data lanes too, so it loads their batches beside its own. The
order of samples is a function of the seed and the lane, so every rank finds the same batches.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from paddle_vl.batch.schema import Batch
from paddle_vl.data.loader import PrefetchLoader
from paddle_vl.families.base import RankInfo
from paddle_vl.parallel.colocated.encoder import OTHER_LANES
from paddle_vl.parallel.ranks import SingleRank
from paddle_vl.parallel.topology import Topology


class LaneView(NamedTuple):
    """This rank as a member of another data lane; a `RankInfo`."""

    is_main: bool
    data_rank: int
    data_size: int
    ranks: SingleRank

    def wait(self) -> None:
        self.ranks.wait()


def lane_loaders(
    make: Callable[[RankInfo], Mapping[str, PrefetchLoader]], ranks: SingleRank, topology: Topology
) -> dict[str, Any]:
    """The loaders of this rank's data lane, or of all lanes that its encoder lane serves, by name.

    Args:
        make: the loaders of one data lane. May be collective.
    """
    groups = topology.encoder
    if groups is None or len(groups.role.served_lanes) == 1:
        return dict(make(ranks))
    by_lane = {
        lane: make(LaneView(ranks.is_main, lane, ranks.data_size, ranks))
        for lane in groups.role.served_lanes
    }
    own = by_lane.pop(ranks.data_rank)
    return {
        name: LanesLoader(loader, [other[name] for other in by_lane.values()])
        for name, loader in own.items()
    }


class LanesLoader:
    """Batches of this rank's lane, with those of other lanes as their `OTHER_LANES`.

    Further attributes, such as `epoch`, are those of its own lane's loader.

    Args:
        own: loader of this rank's data lane.
        others: loaders of the other lanes, in the order of the lanes.
    """

    def __init__(self, own: PrefetchLoader, others: list[PrefetchLoader]):
        self.own, self.others = own, others
        # Returned for an ended lane of an evaluation, see `with_idle`.
        self._idle: Callable[[], Batch] | None = None
        self._iterators: list[Iterator[Any]] = [iter(own), *map(iter, others)]

    def with_idle(self, idle: Callable[[], Batch]) -> "LanesLoader":
        """Go on with idle batches until all lanes have ended."""
        self._idle = idle
        return self

    def __iter__(self) -> "LanesLoader":
        self._iterators = [iter(self.own), *map(iter, self.others)]
        return self

    def __next__(self) -> Batch:
        own, *others = (next(each, None) for each in self._iterators)
        if own is None and all(other is None for other in others):
            # Loaders begin a new epoch after their end.
            raise StopIteration
        self._iterators = [
            each if batch is not None else itertools.repeat(None)
            for each, batch in zip(self._iterators, [own, *others], strict=True)
        ]
        if own is None:
            assert self._idle is not None, "training data has no end"
            own = self._idle()
        batch: Any = {**own, OTHER_LANES: [other or {} for other in others]}
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    @property
    def while_waiting(self) -> Callable[[], None]:
        return self.own.while_waiting

    @while_waiting.setter
    def while_waiting(self, call: Callable[[], None]) -> None:
        for loader in (self.own, *self.others):
            loader.while_waiting = call

    def __len__(self) -> int:
        return len(self.own)

    def load_state_dict(self, state: dict[str, Any], batches: int | None = None) -> None:
        """Continue all lanes at the position of this rank's, which is the same on every lane."""
        for loader in (self.own, *self.others):
            loader.load_state_dict(state, batches)

    def waiting_for(self) -> str:
        return "; ".join(loader.waiting_for() for loader in (self.own, *self.others))

    def close(self) -> None:
        for loader in (self.own, *self.others):
            loader.close()

    def __enter__(self) -> "LanesLoader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
