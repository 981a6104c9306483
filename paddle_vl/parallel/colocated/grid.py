"""Roles of the ranks under the colocated schedule, and their process groups.

A *data lane* is a group of ranks that load the same samples: all pipeline stages and mp ranks of
one index along dp and sharding. An *encoder lane* is a group of `mp_degree` ranks that encode the
same items. Ranks are numbered by *position*: data lane by data lane, within a lane by stage and mp
rank. Encoder lanes are consecutive positions.

| encoder lanes and data lanes | forward bridge | backward bridge |
| --- | --- | --- |
| more: *fan-in* | all-gather within a data lane | sum within a data lane |
| as many: *equal* | nothing | the same sum |
| fewer: *fan-out* | nothing, a rank keeps its data lane's rows | that sum, then an all-gather \
between data lanes |
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from paddle_vl.nn.parameter_table import Seat

Kind = Literal["fan-in", "equal", "fan-out"]


class Place(NamedTuple):
    """Coordinates of a rank in the language model's mesh; `lane` is its data lane."""

    lane: int
    stage: int
    mp_rank: int


class Role(NamedTuple):
    """What a rank does under the colocated schedule.

    Attributes:
        rank: global rank.
        place: in the language model.
        encoder_lane, encoder_place: encoder lane, and index within the lane.
        served_lanes: data lanes whose items its encoder lane encodes (a share of them in fan-in).
    """

    rank: int
    place: Place
    encoder_lane: int
    encoder_place: int
    served_lanes: tuple[int, ...]


@dataclass(frozen=True)
class ColocatedGrid:
    """The two meshes over the same ranks.

    Attributes:
        places: of every rank, by global rank.
        encoder_dp, encoder_mp: degrees of the encoder; their product is the number of ranks.
    """

    places: tuple[Place, ...]
    encoder_dp: int
    encoder_mp: int

    @property
    def world_size(self) -> int:
        return len(self.places)

    @property
    def data_lanes(self) -> int:
        return 1 + max(place.lane for place in self.places)

    @property
    def lane_size(self) -> int:
        """Ranks of a data lane."""
        return self.world_size // self.data_lanes

    @property
    def kind(self) -> Kind:
        if self.encoder_dp == self.data_lanes:
            return "equal"
        return "fan-in" if self.encoder_dp > self.data_lanes else "fan-out"

    @property
    def lanes_in(self) -> int:
        """Encoder lanes that share the items of one data lane."""
        return max(self.encoder_dp // self.data_lanes, 1)

    @property
    def lanes_out(self) -> int:
        """Data lanes whose items one encoder lane encodes."""
        return max(self.data_lanes // self.encoder_dp, 1)

    @cached_property
    def ordered_ranks(self) -> np.ndarray:
        """Global ranks by position."""
        return np.array(sorted(range(self.world_size), key=lambda rank: self.places[rank]))

    @cached_property
    def _encoder_lanes(self) -> np.ndarray:
        """Ranks of each encoder lane, in the order of a process group: ascending."""
        return np.sort(self.ordered_ranks.reshape([self.encoder_dp, self.encoder_mp]))

    def role(self, rank: int) -> Role:
        (lane,), (place,) = np.nonzero(self._encoder_lanes == rank)
        first = int(lane) * self.lanes_out // self.lanes_in
        served = tuple(range(first, first + self.lanes_out))
        return Role(rank, self.places[rank], int(lane), int(place), served)

    def encoder_mp_groups(self) -> list[list[int]]:
        """Ranks of each encoder lane."""
        return self._encoder_lanes.tolist()

    def encoder_dp_groups(self) -> list[list[int]]:
        """Ranks with the same shard of the encoder."""
        return np.sort(self._encoder_lanes.T).tolist()

    def first_stage(self) -> list[int]:
        """Ranks of the first pipeline stage by position; they write the encoder's files."""
        return [rank for rank in self.ordered_ranks.tolist() if self.places[rank].stage == 0]

    def bridge_groups(self) -> list[list[int]]:
        """Ranks of each all-gather of rows (fan-in) or of their gradients (fan-out)."""
        if self.kind == "equal":
            return []
        if self.kind == "fan-in":
            sizes = self.data_lanes, self.lanes_in, self.encoder_mp
            blocks = self._encoder_lanes.reshape(sizes)
        else:
            sizes = self.encoder_dp, self.lanes_out, self.lane_size
            blocks = self.ordered_ranks.reshape(sizes)
        return np.sort(blocks.transpose([0, 2, 1])).reshape([-1, sizes[1]]).tolist()

    def lane_groups(self) -> list[list[int]]:
        """Ranks of each data lane."""
        return np.sort(self.ordered_ranks.reshape([self.data_lanes, self.lane_size])).tolist()

    def describe(self) -> str:
        """E.g. `2 encoder lanes of 1 rank(s) over 1 data lane(s) of 2 rank(s): fan-in`."""
        return (
            f"{self.encoder_dp} encoder lanes of {self.encoder_mp} rank(s) over {self.data_lanes} "
            f"data lane(s) of {self.lane_size} rank(s): {self.kind}"
        )


@dataclass(frozen=True, eq=False)
class EncoderGroups:
    """This rank's groups. Attributes differ per rank.

    Attributes:
        role: what this rank does.
        mp_group: ranks that encode the same items together; its `rank` is the encoder place.
        dp_group: ranks with the same shard of the encoder; its gradients are summed over them.
        bridge_group: see `ColocatedGrid.bridge_groups`; None in the equal case.
        lane_group: the ranks of this data lane.
        shards_state: whether optimizer state is sharded over `dp_group`.
    """

    grid: ColocatedGrid
    role: Role
    mp_group: Any = field(repr=False)
    dp_group: Any = field(repr=False)
    bridge_group: Any = field(repr=False)
    lane_group: Any = field(repr=False)
    shards_state: bool = False

    @property
    def saves_together(self) -> bool:
        """Whether all ranks must take part in saving the encoder or its optimizer state."""
        return self.mp_group.nranks > 1 or self.shards_state

    def seats(self) -> list[Seat]:
        """What each rank has of the encoder and of its optimizer state, by global rank."""
        seats = {
            rank: Seat(0 if self.shards_state else lane, mp=place, sharding=shard)
            for place, ranks in enumerate(self.grid.encoder_dp_groups())
            for shard, rank in enumerate(ranks)
            for lane in [self.grid.role(rank).encoder_lane]
        }
        return [seats[rank] for rank in range(self.grid.world_size)]

    def counts_here(self, is_split: bool) -> bool:
        """Whether this rank contributes a parameter to a sum over all ranks; true on one of its
        replicas, or on every rank with a shard of it."""
        has_own_features = is_split or self.mp_group.rank == 0
        return has_own_features and (self.shards_state or self.role.encoder_lane == 0)
