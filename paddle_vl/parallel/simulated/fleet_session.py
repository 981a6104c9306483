"""What fleet's layers read from fleet, per simulated rank, without starting fleet.

Inside a session the calling thread's rank decides: fleet's mp group is that rank's, its generators
are that rank's, and the primitives of tensor-parallel layers that have kernels for connected
accelerators only run on the rank's process group. Code of no rank gets Paddle's own.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import paddle
from paddle.distributed import fleet
from paddle.distributed.fleet.layers.mpu import mp_ops
from paddle.distributed.fleet.meta_parallel.parallel_layers.random import get_rng_state_tracker

from paddle_vl.config.parallel_settings import FleetConfig
from paddle_vl.parallel.degrees import ParallelDegrees
from paddle_vl.parallel.fleet_strategy import fleet_strategy
from paddle_vl.parallel.gloo_fleet import fleet_functions
from paddle_vl.parallel.gloo_fleet.patch import check_version
from paddle_vl.parallel.random_state import seed_split_random
from paddle_vl.parallel.simulated.current import current_rank
from paddle_vl.parallel.simulated.process_group import SimulatedProcessGroup

# Position of the group among the arguments of each primitive.
_PRIMITIVES = {"_c_identity": 1, "_mp_allreduce": 2, "_c_softmax_with_cross_entropy": 2}
# Fleet's name of the generator in which its layers draw fresh weights.
_FLEETS_GENERATOR = "model_parallel_rng"
_one_at_a_time = threading.Lock()
_MISSING = object()


class _Communicators:
    """The part of fleet's HybridCommunicateGroup that tensor-parallel layers use."""

    def __init__(self, mp_group: Any):
        self._mp_group = mp_group

    def get_model_parallel_group(self) -> Any:
        return self._mp_group

    def get_model_parallel_rank(self) -> int:
        return self._mp_group.rank

    def get_model_parallel_world_size(self) -> int:
        return self._mp_group.nranks


@contextmanager
def fleet_session(mp_degree: int, options: FleetConfig | None = None) -> Iterator[None]:
    """Serve fleet's layers of simulated ranks while entered.

    Args:
        options: as `parallel.fleet` of a run.

    Raises:
        RuntimeError: another session is open, or Paddle is not 3.3.
    """
    check_version()
    if not _one_at_a_time.acquire(blocking=False):
        raise RuntimeError(
            "simulated ranks are running in this process: end them before you start others"
        )
    with ExitStack() as stack:
        stack.callback(_one_at_a_time.release)
        paddles_own = fleet.get_hybrid_communicate_group

        def communicators() -> Any:
            rank = current_rank()
            return paddles_own() if rank is None else _Communicators(rank.mp_group)

        strategy = fleet_strategy(ParallelDegrees(mp_degree=mp_degree), options)
        replace_in(stack, fleet, "get_hybrid_communicate_group", communicators)
        replace_in(stack, fleet.fleet, "_user_defined_strategy", strategy)
        for name, position in _PRIMITIVES.items():
            own, simulated = getattr(mp_ops, name), getattr(fleet_functions, name)
            replace_in(stack, mp_ops, name, _chosen_by_group(own, simulated, position))
        yield


class Generators:
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
    @functools.wraps(own)
    def primitive(*args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group", args[position] if len(args) > position else None)
        connection = getattr(group, "process_group", None)
        chosen = simulated if isinstance(connection, SimulatedProcessGroup) else own
        return chosen(*args, **kwargs)

    return primitive


def replace_in(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute until the stack is closed."""
    before = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    if before is _MISSING:
        stack.callback(delattr, owner, name)
    else:
        stack.callback(setattr, owner, name, before)
