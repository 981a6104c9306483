"""Training data of a rank whose encoder lane serves several data lanes (fan-out).

Such a rank encodes images of other data lanes too, so it loads their batches beside its own. The
order of samples is a function of the seed and the lane, so every rank finds the same batches.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from typing import Any

from paddle_vl.batch.schema import OTHER_LANES, Batch
from paddle_vl.data.loader import PrefetchLoader
from paddle_vl.families.base import RankInfo
from paddle_vl.parallel.ranks import SingleRank
from paddle_vl.parallel.topology import Topology


def lane_loaders(
    make: Callable[[RankInfo], Mapping[str, PrefetchLoader]],
    ranks: SingleRank,
    topology: Topology,
    idle: Callable[[], Batch] | None = None,
) -> dict[str, Any]:
    """The loaders of this rank's data lane, or of all lanes that its encoder lane serves, by name.

    Args:
        make: the loaders of one data lane. May be collective.
        idle: makes the batch of an ended lane of an evaluation, which goes on until all lanes have
            ended; None for training data, which has no end.
    """
    groups = topology.encoder
    if groups is None or len(groups.role.served_lanes) == 1:
        return dict(make(ranks))
    by_lane = {}
    for lane in groups.role.served_lanes:
        # This rank as a member of another data lane.
        member = copy(ranks)
        member.data_rank = lane
        by_lane[lane] = make(member)
    own = by_lane.pop(ranks.data_rank)
    return {
        name: LanesLoader(loader, [other[name] for other in by_lane.values()], idle)
        for name, loader in own.items()
    }


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
        idle: Callable[[], Batch] | None,
    ):
        self.own, self.loaders, self.idle = own, [own, *others], idle
        self._iterators: list[Iterator[Any]] = list(map(iter, self.loaders))

    def __iter__(self) -> "LanesLoader":
        self._iterators = list(map(iter, self.loaders))
        return self

    def __next__(self) -> Batch:
        batches = [next(each, None) for each in self._iterators]
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
        batch: Any = {**own, OTHER_LANES: [other or {} for other in others]}
        return batch

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
