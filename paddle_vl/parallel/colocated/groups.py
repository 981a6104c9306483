"""Process groups of the colocated schedule."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from paddle_vl.parallel.colocated.grid import ColocatedGrid, Role

# Creates all groups of a list in the same order on every rank; returns this rank's. A group of one
# rank has no connection.
MakeGroups = Callable[[list[list[int]]], Any]


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

    @classmethod
    def create(
        cls, grid: ColocatedGrid, rank: int, make: MakeGroups, shards_state: bool
    ) -> "EncoderGroups":
        """Collective: all ranks create all groups."""
        return cls(
            grid,
            grid.role(rank),
            make(grid.encoder_mp_groups()),
            make(grid.encoder_dp_groups()),
            make(grid.bridge_groups()),
            make(grid.lane_groups()),
            shards_state,
        )

    @property
    def saves_together(self) -> bool:
        """Whether all ranks must take part in saving the encoder or its optimizer state."""
        return self.mp_group.nranks > 1 or self.shards_state

    def counts_here(self, is_split: bool) -> bool:
        """Whether this rank contributes a parameter to a sum over all ranks; true on one of its
        replicas, or on every rank with a shard of it."""
        has_own_features = is_split or self.mp_group.rank == 0
        return has_own_features and (self.shards_state or self.role.encoder_lane == 0)
