"""Ranks of a tensor-parallel group on one card: all of them in turn, or a single one.

They run the layers of a real run, fleet's included; only the process group is simulated. So what
they test is the collectives, their order and their shapes, forward and backward, and the numbers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import paddle
from paddle import Tensor, nn

from paddle_vl.config.parallel_settings import FleetConfig
from paddle_vl.parallel.collectives import all_reduce_partial_gradients
from paddle_vl.parallel.recorder import Collective
from paddle_vl.parallel.simulated.alone import Peers, Replay
from paddle_vl.parallel.simulated.current import (
    SimulatedRank,
    check_nothing_observes_the_process,
    run_as,
)
from paddle_vl.parallel.simulated.fleet_session import Generators, fleet_session
from paddle_vl.parallel.simulated.lockstep import Lockstep, Meeting
from paddle_vl.parallel.simulated.process_group import Exchange, simulated_group
from paddle_vl.parallel.tensor import FleetPlacement

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks(Generic[T]):
    """What all ranks did.

    Attributes:
        results: what `step` returned on every rank.
        collectives: every rank's, in order; `phase` is `forward` or `backward`.
        traffic: with `keep_traffic`, what all ranks contributed to every rank's collectives.
    """

    results: list[T]
    collectives: list[list[Collective]]
    traffic: list[list[Meeting]] = field(repr=False)


def run_ranks(
    step: Callable[[FleetPlacement], T],
    mp_degree: int,
    *,
    sequence_parallel: bool = True,
    vision: str = "spread",
    fleet: FleetConfig | None = None,
    keep_traffic: bool = False,
    timeout_s: float | None = 60.0,
) -> Ranks[T]:
    """Run `step` on every rank of an mp group, in this process, strictly one at a time.

    Ranks hand over to each other at every collective, so results do not depend on timing. All of
    them start with Paddle's random state of the caller, which stays as it is.

    Args:
        step: gets the rank's placement; builds the model with it and runs forward and backward.
            Anything collective must be inside. `placement.ops.mp_group` has `rank` and `nranks`
            if the degree is at least 2.
        sequence_parallel, vision: see `FleetPlacement`.
        fleet: options of `parallel.fleet` in a run's configuration.
        keep_traffic: keep the tensors of all collectives, for `one_rank`.
        timeout_s: seconds that a rank may compute without coming to a collective; None for no
            limit, as for a debugger.

    Raises:
        RanksDisagreeError: ranks start different collectives (kind, dtype, shape, operation), or
            one ended while others wait; names the ranks and the places in the code.
        TimeoutError: a rank exceeded the limit; has its stack.
        RuntimeError: simulated ranks run already.
        Exception: whatever `step` raised first, on whichever rank.
    """
    _check_degree(mp_degree)
    check_nothing_observes_the_process()
    with fleet_session(mp_degree, fleet):
        generators = Generators(range(mp_degree))
        lockstep = Lockstep(mp_degree, timeout_s, keep_traffic, generators.switch)
        device = paddle.get_device()

        def run(number: int) -> T:
            # A new thread's current device is the first one.
            paddle.set_device(device)
            rank = _rank(number, mp_degree, lockstep)
            with run_as(rank):
                return step(FleetPlacement(rank.mp_group, sequence_parallel, vision))

        results = lockstep.run(run)
    return Ranks(results, lockstep.collectives, lockstep.meetings)


@dataclass(frozen=True)
class OneRank:
    """A single rank.

    Attributes:
        placement: for the model's constructor.
        collectives: what the rank has issued so far; `phase` is `forward` or `backward`.
    """

    placement: FleetPlacement
    collectives: list[Collective] = field(repr=False)


@contextmanager
def one_rank(
    rank: int,
    mp_degree: int,
    *,
    sequence_parallel: bool = True,
    vision: str = "spread",
    fleet: FleetConfig | None = None,
    traffic: list[list[Meeting]] | None = None,
    tolerance: float = 1e-4,
) -> Iterator[OneRank]:
    """Be a single rank of an mp group inside the block, in the calling thread.

    Shapes, divisibility and the order of collectives are those of a real rank. Without `traffic`
    the other ranks contribute this rank's values in another order, so numbers that depend on them
    are finite but mean nothing. With the `traffic` of a `run_ranks` numbers are
    those of that run, and it is an error if this rank now issues or contributes something else;
    contributions are compared at the end of the block.

    Args:
        traffic: of `run_ranks(..., keep_traffic=True)` with the same degree.
        tolerance: by which this rank's contributions may differ from the traffic's, relative to
            the largest entry.

    Raises:
        ValueError: the rank is not in the group, or the traffic is of another degree.
        RanksDisagreeError: the rank issues or contributes something else than in the traffic.
    """
    _check_degree(mp_degree)
    if not 0 <= rank < mp_degree:
        raise ValueError(f"rank {rank} is outside of [0, {mp_degree})")
    if traffic is not None and len(traffic) != mp_degree:
        raise ValueError(f"the traffic is of {len(traffic)} ranks, not of {mp_degree}")
    check_nothing_observes_the_process()
    with fleet_session(mp_degree, fleet):
        generators = Generators([rank])
        peers = Peers(rank) if traffic is None else Replay(traffic[rank], tolerance)
        own = _rank(rank, mp_degree, peers)
        generators.switch(None, rank)
        try:
            with run_as(own):
                placement = FleetPlacement(own.mp_group, sequence_parallel, vision)
                yield OneRank(placement, peers.calls)
                peers.end()
        finally:
            generators.switch(rank, None)


def sum_partial_gradients(model: nn.Layer) -> None:
    """Sum the partial gradients over the mp group, as a run does after its last backward pass.

    For use in the `step` of `run_ranks`, and in `one_rank`; it is collective.
    """
    table = model.placement.parameter_table
    group = getattr(model.placement.ops, "mp_group", None)
    if group is not None:
        all_reduce_partial_gradients(table.with_specs(model.parameters()), group)


def full_logits(logits: list[Tensor]) -> Tensor:
    """Logits of the full vocabulary from those of all ranks, in order.

    Args:
        logits: `[..., V / mp]` of every rank.
    """
    with paddle.no_grad():
        return paddle.concat(list(logits), axis=-1)


def _rank(number: int, mp_degree: int, exchange: Exchange) -> SimulatedRank:
    rank = SimulatedRank()
    rank.mp_group = simulated_group(rank, number, range(mp_degree), exchange)
    return rank


def _check_degree(mp_degree: int) -> None:
    if mp_degree < 1:
        raise ValueError(f"mp_degree is {mp_degree}; a group has at least one rank")
