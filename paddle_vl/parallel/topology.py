"""The mesh of a run: the coordinates of this rank, and its process group on every axis.

Axes: dp ranks have replicas of the parameters and take different samples; sharding ranks shard the
optimizer state and take different samples too, except that cp ranks, neighbours among them, take
slices of the same ones; mp ranks shard every matrix; pp ranks are the
stages of the pipeline. mp is the innermost axis, then sharding, pp and dp, so that mp ranks are on
one machine. Experts have axes of their own: `paddle_vl.parallel.mesh` says which ranks each has.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.distributed import collective, fleet, parallel
from paddle.distributed.collective import Group
from paddle.distributed.fleet.base import topology as fleet_topology
from paddle.distributed.fleet.utils import log_util

from paddle_vl.config.load import raise_problems
from paddle_vl.config.parallel_settings import FleetConfig
from paddle_vl.nn.parameter_table import ParamSpec
from paddle_vl.parallel.collective_check import check_run_if_asked
from paddle_vl.parallel.colocated.grid import ColocatedGrid, EncoderGroups, Place
from paddle_vl.parallel.degrees import AXES, ParallelDegrees, TopologyPlan, plan_problems
from paddle_vl.parallel.fleet_strategy import fleet_problems, fleet_strategy
from paddle_vl.parallel.gloo_fleet import install
from paddle_vl.parallel.gloo_fleet.patch import check_version
from paddle_vl.parallel.mesh import groups_of_axes
from paddle_vl.parallel.store.rendezvous import DEFAULT_TIMEOUT_S, meet, set_timeout

logger = logging.getLogger(__name__)

# Fleet's names of the axes.
_NAMES = {"dp": "data", "mp": "model", "pp": "pipe", "sharding": "sharding"}
_OF_EXPERTS = ("ep", "expert_sharding", "expert_dp")


def _group_of_one(rank: int) -> Group:
    """A group without a connection, for its rank and size; not for collectives."""
    return Group(rank_in_group=0, id=-1, ranks=[rank])


@dataclass(frozen=True, eq=False)
class Topology:
    """Degrees of the mesh, and coordinates and groups of this rank, which differ per rank.

    Attributes:
        rank: global rank.
        dp_group, mp_group, pp_group, sharding_group: the ranks along each axis through this rank;
            `rank` and `nranks` of a group are this rank's coordinate and the degree. A group with
            `nranks` 1 has no connection: leave out collectives over it.
        ep_group, expert_sharding_group, expert_dp_group: see `paddle_vl.parallel.mesh`; without
            expert parallelism a group of one, sharding_group and dp_group.
        cp_group, cp_mp_group: see `paddle_vl.parallel.mesh`; None without context parallelism.
        saving_group: the ranks of a stage with all of its parameters between them, which exchange
            values when they save; None if each has all.
        ends_group: the first and the last pipeline stage; None on other stages.
        host_group: all ranks over gloo, for collectives in host memory that do not wait for the
            device; None on CPUs, where the default group is used.
        encoder: of the colocated schedule; None under the plain one.
    """

    degrees: ParallelDegrees
    rank: int
    dp_group: Group = field(repr=False)
    mp_group: Group = field(repr=False)
    pp_group: Group = field(repr=False)
    sharding_group: Group = field(repr=False)
    ep_group: Group = field(repr=False)
    expert_sharding_group: Group = field(repr=False)
    expert_dp_group: Group = field(repr=False)
    cp_group: Group | None = field(repr=False, default=None)
    cp_mp_group: Group | None = field(repr=False, default=None)
    saving_group: Group | None = field(repr=False, default=None)
    ends_group: Group | None = field(repr=False, default=None)
    host_group: Group | None = field(repr=False, default=None)
    encoder: EncoderGroups | None = field(repr=False, default=None)

    @classmethod
    def single(cls, degrees: ParallelDegrees | None = None) -> "Topology":
        """The mesh of one rank, without fleet."""
        axes = (*AXES, *_OF_EXPERTS)
        groups: dict[str, Any] = {f"{axis}_group": _group_of_one(0) for axis in axes}
        return cls(degrees or ParallelDegrees(), rank=0, **groups)

    @property
    def world_size(self) -> int:
        return self.degrees.num_processes

    @property
    def table_group(self) -> Group:
        """The ranks that have the rows of a stage's tables between them."""
        return self.saving_group or self._alone

    @cached_property
    def _alone(self) -> Group:
        return _group_of_one(self.rank)

    @property
    def dp_rank(self) -> int:
        return self.dp_group.rank

    @property
    def mp_rank(self) -> int:
        return self.mp_group.rank

    @property
    def pp_rank(self) -> int:
        return self.pp_group.rank

    @property
    def sharding_rank(self) -> int:
        return self.sharding_group.rank

    @property
    def cp_rank(self) -> int:
        return 0 if self.cp_group is None else self.cp_group.rank

    @property
    def replica_rank(self) -> int:
        """Its index along the dp and sharding axes."""
        return self.dp_rank * self.degrees.sharding_degree + self.sharding_rank

    @property
    def data_rank(self) -> int:
        """This rank's data shard, of `data_size`: its index along dp and sharding without cp."""
        return self.replica_rank // self.degrees.cp_degree

    @property
    def data_size(self) -> int:
        return self.degrees.data_degree

    def readers(self, spec: ParamSpec, is_split: bool) -> list[Group]:
        """The groups whose ranks need the same rows of a parameter's file.

        Args:
            is_split: whether its mp ranks need different rows.
        """
        mp_group, groups = self.mp_group, [self.dp_group, self.sharding_group]
        if spec.is_encoder and self.encoder is not None:
            mp_group, groups = self.encoder.mp_group, [self.encoder.dp_group]
        elif spec.is_table:
            return [group for group in [self.dp_group_of(spec)] if group.nranks > 1]
        elif spec.is_expert and self.ep_group.nranks > 1:
            # They fold over the mp ranks too.
            mp_group, groups = None, [self.expert_dp_group, self.expert_sharding_group]
        if mp_group is not None and not is_split:
            groups.append(mp_group)
        return [group for group in groups if group.nranks > 1]

    def sharding_group_of(self, spec: ParamSpec) -> Group:
        """The ranks that shard the state of a parameter, and what else `sharding_stage` shards."""
        if spec.is_table:
            return self._alone
        return self.expert_sharding_group if spec.is_expert else self.sharding_group

    def dp_group_of(self, spec: ParamSpec) -> Group:
        """The ranks that have the same shard of a parameter's state."""
        spans_dp = self.degrees.ep_degree > self.sharding_group.nranks * self.mp_group.nranks
        if spec.is_expert or (spec.is_table and spans_dp):
            return self.expert_dp_group
        return self.dp_group

    def describe(self) -> str:
        """Coordinates on the axes of degree 2 or more, e.g. `rank 3 (dp 1, mp 1)`."""
        coordinates = [
            f"{axis} {group.rank}"
            for axis in (*AXES, "cp")
            if (group := getattr(self, f"{axis}_group")) is not None and group.nranks > 1
        ]
        return f"rank {self.rank}" + (f" ({', '.join(coordinates)})" if coordinates else "")


def initialize(
    degrees: ParallelDegrees,
    options: FleetConfig | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Topology:
    """Start fleet with these degrees. Collective over all ranks; one rank starts nothing.

    Several topologies may be started in turn; groups of earlier ones stay open. Fleet seeds
    Paddle's generators if mp_degree > 1, so seed the run afterwards.

    Args:
        options: fleet's own, see `paddle_vl.parallel.fleet_strategy`.
        timeout_s: seconds that a rank waits for others, at the start and in every operation.

    Raises:
        ValueError: the degrees contradict each other or the world size; see also
            `paddle_vl.parallel.collective_check`.
        RuntimeError: Paddle is not 3.3.
    """
    problems = plan_problems(TopologyPlan(degrees, dist.get_world_size()))
    raise_problems([*problems, *fleet_problems(options or FleetConfig(), degrees)])
    if degrees.num_processes == 1:
        return Topology.single(degrees)
    check_version()
    set_timeout(timeout_s)
    # Of NCCL groups that are made from now on.
    collective._get_global_env()._pg_timeout = round(1000 * timeout_s)
    install()
    meet()
    with _quiet():
        strategy = fleet_strategy(degrees, options)
        # Otherwise fleet keeps the groups of an earlier start.
        fleet_topology._HYBRID_PARALLEL_GROUP = None
        fleet.init(is_collective=True, strategy=strategy, log_level="WARNING")
    communicators = fleet.get_hybrid_communicate_group()
    rank = dist.get_rank()
    groups: dict[str, Any] = {}
    for axis, name in _NAMES.items():
        group = getattr(communicators, f"get_{name}_parallel_group")()
        # In fleet's own groups of one rank, this rank's number is -1.
        groups[f"{axis}_group"] = group if group.nranks > 1 else _group_of_one(rank)
    check_run_if_asked()
    axes = groups_of_axes(degrees)
    ends = []
    # With dualpipev the first stage has both the first and the last chunk.
    if degrees.pp_degree > 1 and degrees.pp_schedule != "dualpipev":
        ends = axes["pp"][:, [0, -1]].tolist()
    groups["ep_group"] = _group_of_one(rank)
    groups |= {f"expert_{axis}_group": groups[f"{axis}_group"] for axis in ("sharding", "dp")}
    if degrees.ep_degree > 1:
        for axis in _OF_EXPERTS:
            groups[f"{axis}_group"] = _own_group(axes[axis].tolist(), rank)
    if degrees.cp_degree > 1:
        for axis in ("cp", "cp_mp"):
            groups[f"{axis}_group"] = _own_group(axes[axis].tolist(), rank)
    on_cpu = paddle.get_device().startswith("cpu")
    return Topology(
        degrees,
        rank,
        **groups,
        saving_group=_saving_group(degrees, axes["model"].tolist(), groups, rank),
        ends_group=_own_group(ends, rank),
        # Paddle's stub knows nccl only.
        host_group=None if on_cpu else dist.new_group(backend="gloo"),  # pyright: ignore[reportArgumentType]
        encoder=_encoder_groups(degrees, communicators.topology(), rank),
    )


def _saving_group(
    degrees: ParallelDegrees, members: list[list[int]], groups: Mapping[str, Group], rank: int
) -> Group | None:
    """The group of `Topology.saving_group`, which may be that of an axis."""
    if degrees.mp_degree * degrees.sharding_degree * degrees.ep_degree == 1:
        return None
    for group in groups.values():
        if group.ranks in members:
            return group
    return _own_group(members, rank)


def _encoder_groups(degrees: ParallelDegrees, mesh: Any, rank: int) -> EncoderGroups | None:
    """The groups of the colocated schedule; created on all ranks in the same order."""
    if degrees.schedule == "plain":
        return None
    coordinates = [mesh.get_coord(each) for each in range(degrees.num_processes)]
    places = tuple(
        Place(at.data * degrees.sharding_degree + at.sharding, at.pipe, at.model)
        for at in coordinates
    )
    mp = degrees.encoder.mp_degree
    grid = ColocatedGrid(places, len(places) // mp, mp)
    if rank == 0:
        logger.info("colocated schedule: %s", grid.describe())
    groups = (
        _own_group(members, rank)
        for members in (
            grid.encoder_mp_groups(),
            grid.encoder_dp_groups(),
            grid.bridge_groups(),
            grid.lane_groups(),
        )
    )
    return EncoderGroups(
        grid, grid.role(rank), *groups, shards_state=degrees.encoder.sharding_stage > 0
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence fleet's messages at its start, and the list of Paddle's flags on every rank."""
    log_util.set_log_level("WARNING")
    lists_flags = parallel._print_modified_flags
    parallel._print_modified_flags = lambda flags: None
    try:
        yield
    finally:
        parallel._print_modified_flags = lists_flags


def _own_group(members: list[list[int]], rank: int) -> Group | None:
    """Create all groups, in the same order on every rank; returns this rank's."""
    own = None
    for ranks in members:
        group = dist.new_group(ranks) if len(ranks) > 1 else None
        if rank in ranks:
            own = group or _group_of_one(rank)
    return own
