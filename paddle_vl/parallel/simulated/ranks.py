"""Ranks of a tensor-parallel group on one card: all of them in turn, or a single one.

They run the layers of a real run, fleet's included; only the process group is simulated. So what
they test is the collectives, their order and their shapes, forward and backward, and the numbers.

Fleet itself is not started. Inside a session the calling thread's rank decides what fleet's layers
read from it: the mp group, the random generators, and the primitives of tensor-parallel layers,
whose kernels are for connected accelerators. Code of no rank gets Paddle's own.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Generic, TypeVar
from unittest import mock

import paddle
from paddle import Tensor, nn
from paddle.distributed import fleet as paddle_fleet
from paddle.distributed.fleet.layers.mpu import mp_ops
from paddle.distributed.fleet.meta_parallel.parallel_layers.random import get_rng_state_tracker

from paddle_vl.config.parallel_settings import FleetConfig
from paddle_vl.parallel.collectives import all_reduce_partial_gradients
from paddle_vl.parallel.degrees import ParallelDegrees
from paddle_vl.parallel.fleet_strategy import fleet_strategy
from paddle_vl.parallel.gloo_fleet import fleet_functions
from paddle_vl.parallel.gloo_fleet.patch import check_version
from paddle_vl.parallel.random_state import seed_split_random
from paddle_vl.parallel.recorder import Collective, is_process_observed
from paddle_vl.parallel.simulated.exchanges import Lockstep
from paddle_vl.parallel.simulated.group import (
    SimulatedProcessGroup,
    SimulatedRank,
    current_rank,
)
from paddle_vl.parallel.tensor import FleetPlacement

T = TypeVar("T")
# Position of the group among the arguments of each primitive.
_PRIMITIVES = {"_c_identity": 1, "_mp_allreduce": 2, "_c_softmax_with_cross_entropy": 2}
# Fleet's name of the generator in which its layers draw fresh weights.
_FLEETS_GENERATOR = "model_parallel_rng"
_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class Ranks(Generic[T]):
    """What all ranks did.

    Attributes:
        results: what `step` returned on every rank.
        collectives: every rank's, in order; `phase` is `forward` or `backward`.
    """

    results: list[T]
    collectives: list[list[Collective]]


def run_ranks(
    step: Callable[[FleetPlacement], T],
    mp_degree: int,
    *,
    sequence_parallel: bool = True,
    vision: str = "spread",
    fleet: FleetConfig | None = None,
    timeout_s: float | None = 60.0,
) -> Ranks[T]:
    """Run `step` on every rank of an mp group, in this process, one at a time.

    Results do not depend on timing. All ranks start with Paddle's random state of the caller, which
    stays as it is.

    Args:
        step: gets the rank's placement; builds the model with it and runs forward and backward.
            Anything collective must be inside. `placement.ops.mp_group` has `rank` and `nranks`
            if the degree is at least 2.
        sequence_parallel, vision: see `FleetPlacement`.
        fleet: options of `parallel.fleet` in a run's configuration.
        timeout_s: seconds that a rank may compute without coming to a collective; None for no
            limit, as for a debugger.

    Raises:
        RanksDisagreeError: ranks start different collectives (kind, dtype, shape, operation), or
            one ended while others wait; names the ranks and the places in the code.
        TimeoutError: a rank exceeded the limit; has its stack.
        RuntimeError: simulated ranks run already.
        Exception: whatever `step` raised first, on whichever rank.
    """
    with _session(mp_degree, fleet):
        generators = _Generators(range(mp_degree))
        lockstep = Lockstep(mp_degree, timeout_s, generators.switch)
        device = paddle.get_device()

        def run(number: int) -> T:
            # A new thread's current device is the first one.
            paddle.set_device(device)
            rank = SimulatedRank(number, mp_degree, lockstep.exchange)
            with rank.running():
                return step(FleetPlacement(rank.mp_group, sequence_parallel, vision))

        results = lockstep.run(run)
    return Ranks(results, lockstep.collectives)


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
) -> Iterator[OneRank]:
    """Be a single rank of an mp group inside the block, in the calling thread.

    Shapes, divisibility and the order of collectives are those of a real rank. The other ranks
    contribute this rank's values, so numbers that depend on them are finite but mean nothing.

    Raises:
        ValueError: the rank is not in the group.
    """
    if not 0 <= rank < mp_degree:
        raise ValueError(f"rank {rank} is outside of [0, {mp_degree})")
    with _session(mp_degree, fleet):
        generators = _Generators([rank])
        calls: list[Collective] = []

        def contributed(rank: int, call: Collective, tensor: Tensor | None) -> list[Tensor]:
            calls.append(call._replace(detail=""))
            return [] if tensor is None else [tensor.detach().clone()] * mp_degree

        own = SimulatedRank(rank, mp_degree, contributed)
        generators.switch(None, rank)
        try:
            with own.running():
                placement = FleetPlacement(own.mp_group, sequence_parallel, vision)
                yield OneRank(placement, calls)
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


@contextmanager
def _session(mp_degree: int, options: FleetConfig | None) -> Iterator[None]:
    """Serve fleet's layers of simulated ranks while entered.

    Raises:
        RuntimeError: another session or a recording is open, or Paddle is not 3.3.
        ValueError: the degree is below 1.
    """
    if mp_degree < 1:
        raise ValueError(f"mp_degree is {mp_degree}; a group has at least one rank")
    check_version()
    if is_process_observed():
        raise RuntimeError(
            "record_collectives was entered before the simulated ranks were started and would "
            "record none of their collectives: enter it on a rank, or read the `collectives` of "
            "the result"
        )
    if not _one_at_a_time.acquire(blocking=False):
        raise RuntimeError(
            "simulated ranks are running in this process: end them before you start others"
        )
    paddles_own = paddle_fleet.get_hybrid_communicate_group

    def communicators() -> Any:
        rank = current_rank()
        if rank is None:
            return paddles_own()
        # The part of fleet's HybridCommunicateGroup that tensor-parallel layers use.
        return SimpleNamespace(
            get_model_parallel_group=lambda: rank.mp_group,
            get_model_parallel_rank=lambda: rank.rank,
            get_model_parallel_world_size=lambda: rank.size,
        )

    strategy = fleet_strategy(ParallelDegrees(mp_degree=mp_degree), options)
    try:
        with ExitStack() as stack:

            def replace(owner: Any, name: str, value: Any) -> None:
                stack.enter_context(mock.patch.object(owner, name, value, create=True))

            replace(paddle_fleet, "get_hybrid_communicate_group", communicators)
            replace(paddle_fleet.fleet, "_user_defined_strategy", strategy)
            for name, position in _PRIMITIVES.items():
                own, simulated = getattr(mp_ops, name), getattr(fleet_functions, name)
                replace(mp_ops, name, _chosen_by_group(own, simulated, position))
            yield
    finally:
        _one_at_a_time.release()


class _Generators:
    """Paddle's random state of each rank, exchanged when another rank continues.

    Every rank starts with the state of Paddle's default generator, as ranks do that are seeded
    alike; generators for sharded tensors differ.
    """

    def __init__(self, ranks: Sequence[int]):
        self._tracker = get_rng_state_tracker()
        self._outside = self._taken()
        self._states = {}
        for rank in ranks:
            self._give((self._outside[0], {}, set()))
            self._tracker.add(_FLEETS_GENERATOR, 1024 + rank)
            seed_split_random([0], rank)
            self._states[rank] = self._taken()
            self._give(self._outside)

    def switch(self, leaves: int | None, continues: int | None) -> None:
        """Keep the state of the rank that leaves; None is the code outside of all ranks."""
        if leaves is not None:
            self._states[leaves] = self._taken()
        self._give(self._outside if continues is None else self._states[continues])

    def _taken(self) -> tuple[Any, dict, set]:
        return paddle.get_rng_state(), dict(self._tracker.states_), set(self._tracker.seeds_)

    def _give(self, state: tuple[Any, dict, set]) -> None:
        paddle.set_rng_state(state[0])
        self._tracker.states_, self._tracker.seeds_ = dict(state[1]), set(state[2])


def _chosen_by_group(own: Callable, simulated: Callable, position: int) -> Callable:
    """A primitive that is simulated on simulated groups."""

    @functools.wraps(own)
    def primitive(*args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group", args[position] if len(args) > position else None)
        connection = getattr(group, "process_group", None)
        chosen = simulated if isinstance(connection, SimulatedProcessGroup) else own
        return chosen(*args, **kwargs)

    return primitive
