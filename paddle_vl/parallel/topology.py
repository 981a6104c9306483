"""This process's place in a run, and the groups of processes it shares work with.

Axes: dp processes hold the same parameters and take different samples; sharding processes do so
too and share the optimizer's work; mp processes share every matrix; pp processes share the layers.
Processes are numbered with mp innermost, then sharding, pp and dp, so that mp processes are
neighbours on one machine.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import paddle
import paddle.distributed as dist
from paddle.distributed import collective, fleet, parallel
from paddle.distributed.collective import Group
from paddle.distributed.fleet.base.topology import HybridCommunicateGroup
from paddle.distributed.fleet.utils import log_util

from paddle_vl.config.load import raise_problems
from paddle_vl.config.parallel_settings import FleetConfig
from paddle_vl.parallel.collective_check import check_run_if_asked
from paddle_vl.parallel.degrees import AXES, ParallelDegrees, Plan, plan_problems
from paddle_vl.parallel.fleet_strategy import fleet_problems, fleet_strategy
from paddle_vl.parallel.gloo_fleet import install, time_limit
from paddle_vl.parallel.store.rendezvous import DEFAULT_TIMEOUT_S, limit_waits, meet

logger = logging.getLogger(__name__)

# Our axis names and fleet's: the key in its hybrid_configs, and where it keeps the group.
_FLEET_AXES = {
    "dp": ("dp_degree", HybridCommunicateGroup.get_data_parallel_group),
    "mp": ("mp_degree", HybridCommunicateGroup.get_model_parallel_group),
    "pp": ("pp_degree", HybridCommunicateGroup.get_pipe_parallel_group),
    "sharding": ("sharding_degree", HybridCommunicateGroup.get_sharding_parallel_group),
}


def _group_of_one(rank: int) -> Group:
    """A group to ask for rank and size. Paddle warns of a sum over it and leaves the tensor."""
    return Group(rank_in_group=0, id=-1, ranks=[rank])


@dataclass(frozen=True, eq=False)
class Topology:
    """This process's place in a run. Ranks and groups differ per rank, the rest does not.

    Attributes:
        rank: this process among all.
        dp_group, mp_group, pp_group, sharding_group: the processes that share this one's other
            coordinates, in order along the axis; `rank` and `nranks` of a group are this
            process's place on the axis and the axis' size. One with `nranks` 1 has no connection:
            leave collectives over it out.
        ep_group: the processes that share the experts, neighbours on the dp axis.
        expert_dp_group: those that hold the same experts; None where that is dp_group.
        ends_group: first and last process of the pipeline, on these two; None on others.
        host_group: all processes, for what they have to know on the host: its messages go through
            host memory and wait for no device; None for the group of all, which does so on a CPU.
    """

    degrees: ParallelDegrees
    rank: int
    dp_group: Group = field(repr=False)
    mp_group: Group = field(repr=False)
    pp_group: Group = field(repr=False)
    sharding_group: Group = field(repr=False)
    ep_group: Group = field(repr=False)
    expert_dp_group: Group | None = field(repr=False, default=None)
    ends_group: Group | None = field(repr=False, default=None)
    host_group: Group | None = field(repr=False, default=None)

    @classmethod
    def single(cls, degrees: ParallelDegrees | None = None) -> "Topology":
        """One process, without fleet."""
        groups = {f"{axis}_group": _group_of_one(0) for axis in (*AXES, "ep")}
        return cls(degrees or ParallelDegrees(), rank=0, **groups)

    @property
    def world_size(self) -> int:
        return self.degrees.num_processes

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
    def data_rank(self) -> int:
        """Which part of the samples this process takes, of `data_size`; dp and sharding split."""
        return self.dp_rank * self.degrees.sharding_degree + self.sharding_rank

    @property
    def data_size(self) -> int:
        return self.degrees.dp_degree * self.degrees.sharding_degree

    @property
    def is_sharded_by_fleet(self) -> bool:
        """Whether stage 1 divides the optimizer."""
        return self.degrees.sharding_degree > 1 and self.degrees.sharding_stage == 1

    def describe(self) -> str:
        """This rank's coordinates on the axes that are on, e.g. `rank 3 (dp 1, mp 1)`."""
        coordinates = [
            f"{axis} {group.rank}"
            for axis in AXES
            if (group := getattr(self, f"{axis}_group")).nranks > 1
        ]
        return f"rank {self.rank}" + (f" ({', '.join(coordinates)})" if coordinates else "")


def initialize(
    degrees: ParallelDegrees,
    options: FleetConfig | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Topology:
    """Start fleet with these degrees, on every rank together; one process needs none.

    Args:
        options: of fleet's own, see `paddle_vl.parallel.fleet_strategy`.
        timeout_s: seconds that a process waits for others, at the start and in any operation.

    Fleet seeds Paddle's generators when there are mp processes: seed a run's own afterwards.

    Raises:
        ValueError: the degrees contradict each other or the launched processes; see also
            `paddle_vl.parallel.collective_check`.
        RuntimeError: fleet was started with other degrees before.
    """
    problems = plan_problems(Plan(degrees, dist.get_world_size()))
    raise_problems([*problems, *fleet_problems(options or FleetConfig(), degrees)])
    if degrees.num_processes == 1:
        return Topology.single(degrees)
    limit_waits(timeout_s)
    _limit_waits_of_accelerators(timeout_s)
    install()
    meet()
    with _quiet():
        strategy = fleet_strategy(degrees, options)
        fleet.init(is_collective=True, strategy=strategy, log_level="WARNING")
    communicators = fleet.get_hybrid_communicate_group()
    rank = dist.get_rank()
    groups, other = {}, []
    for axis, (key, group_of) in _FLEET_AXES.items():
        group, degree = group_of(communicators), degrees.degree(axis)
        # Fleet's own group of one says that this process, rank -1 of it, is not a member.
        groups[f"{axis}_group"] = group if group.nranks > 1 else _group_of_one(rank)
        if group.nranks != degree:
            other.append(f"{key} {group.nranks} instead of {degree}")
    if other:
        # Fleet keeps its first groups and says so in a warning only.
        raise RuntimeError(
            f"fleet was started in this process before, with {', '.join(other)}: start it once, "
            "through paddle_vl.parallel.topology.initialize"
        )
    check_run_if_asked()
    lines = communicators.topology().get_comm_list
    ends = []
    # In a V the first stage has both ends.
    if degrees.pp_degree > 1 and degrees.pp_schedule != "dualpipev":
        ends = [[line[0], line[-1]] for line in lines("pipe")]
    sharers, holders = [], []
    if (size := degrees.ep_degree) > 1:
        for line in lines("data"):
            sharers += [line[i : i + size] for i in range(0, len(line), size)]
            holders += [line[i::size] for i in range(size)]
    on_cpu = paddle.get_device().startswith("cpu")
    return Topology(
        degrees,
        rank,
        **groups,
        ep_group=_own_group(sharers, rank) or _group_of_one(rank),
        expert_dp_group=_own_group(holders, rank),
        ends_group=_own_group(ends, rank),
        host_group=None if on_cpu else _host_group(timeout_s),
    )


def _limit_waits_of_accelerators(timeout_s: float) -> None:
    """Groups of NCCL that are made from now on get the limit from Paddle's environment."""
    environment = collective._get_global_env()
    if not isinstance(getattr(environment, "_pg_timeout", None), int):
        raise RuntimeError(
            f"paddlepaddle {paddle.__version__} has no ParallelEnv._pg_timeout, by which "
            "parallel.timeout_s reaches its groups: install paddlepaddle 3.3.1, or adapt "
            "paddle_vl/parallel/topology.py"
        )
    environment._pg_timeout = round(1000 * timeout_s)


def _host_group(timeout_s: float) -> Group:
    """All processes in a group of gloo, beside an accelerator's."""
    group = dist.new_group(backend="gloo")
    try:
        time_limit.limit_waits(group.id, group.rank, group.nranks, timeout_s)
    except RuntimeError as error:
        logger.warning("%s Until then ranks wait 30 s for each other on the host.", error)
    return group


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep fleet from telling that it starts, and every rank from listing Paddle's flags."""
    log_util.set_log_level("WARNING")
    lists_flags = parallel._print_modified_flags
    parallel._print_modified_flags = lambda flags: None
    try:
        yield
    finally:
        parallel._print_modified_flags = lists_flags


def _own_group(members: list[list[int]], rank: int) -> Group | None:
    """Every process makes all of these groups, in one order, and keeps its own, if it has one."""
    own = None
    for ranks in members:
        group = dist.new_group(ranks) if len(ranks) > 1 else None
        if rank in ranks:
            own = group or _group_of_one(rank)
    return own
