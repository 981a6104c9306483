"""Tables whose rows are divided over ranks: rows, gradients, and what is sent for a batch.

Guarantees, over sharding ranks, which have different token rows, over mp ranks, which have the same
ones or shards of them, and over both:

- rows and gradients are those of one device with the samples of all ranks;
- each rank draws the rows of one device's table that it has, and no others;
- each different row that a rank uses travels once, and so does its gradient, whatever the table's
  size; the host reads once;
- of a frozen table nothing travels in the backward pass.
"""

from functools import cache, partial
from unittest import mock

import numpy as np
import paddle
import pytest

from paddle_vl.nn import row_table
from paddle_vl.nn.dispatch import use_kernels
from paddle_vl.nn.placement import SingleDevicePlacement
from paddle_vl.parallel.collectives import all_reduce_gradients
from paddle_vl.parallel.degrees import ParallelDegrees
from paddle_vl.parallel.recorder import record_collectives
from paddle_vl.parallel.tensor import FleetPlacement
from paddle_vl.parallel.topology import Topology, initialize
from paddle_vl.testing import record_host_reads
from tests.support.gpu_stubs.installed import gpu_stubs
from tests.support.launch import launch, outcome_of, run_checks
from tests.support.tolerance import TOPOLOGY

ROWS, WIDTH, PER_TOKEN, PART = 64, 5, 3, 24
RUNS = {
    "sharding2": {"sharding_degree": 2},
    "mp2": {"mp_degree": 2},
    "mp2 sp": {"mp_degree": 2, "sequence_parallel": True},
}
FOUR = {
    "sharding2 mp2": RUNS["mp2"] | {"sharding_degree": 2},
    "sharding2 mp2 sp": RUNS["mp2 sp"] | {"sharding_degree": 2},
    "dp2 ep4": {"dp_degree": 2, "sharding_degree": 2, "ep_degree": 4},
}
# Of each data rank; the last rank's rows are all of the first owner, and mp may not divide them.
NUMBERS = {
    "spread": [[[0, 33, 63], [33, 5, 40], [5, 5, 17], [62, 1, 2]], [[63, 33, 0]] * 4],
    "one owner": [[[1, 2, 3], [3, 2, 4]], [[4, 4, 4], [0, 4, 5]]],
    "odd": [[[1, 40, 3], [3, 2, 4], [50, 50, 50]], [[4, 63, 4], [0, 4, 5], [0, 4, 5]]],
}


def upstream(numbers: np.ndarray) -> np.ndarray:
    """A gradient of looked-up rows that tells of their place."""
    size = numbers.size * WIDTH
    return np.linspace(-1, 2, size, dtype=np.float32).reshape([*numbers.shape, WIDTH])


def table_of(placement, frozen: bool = False):
    paddle.seed(7)
    with mock.patch.object(row_table, "PART_ROWS", PART):
        table = placement.layers.row_table(ROWS, WIDTH, 0.5)
    table.weight.stop_gradient = bool(frozen)
    return table


def one_device(name: str, data_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The table, and its gradient for the token rows of so many data ranks."""
    table = table_of(SingleDevicePlacement())
    for data_rank in range(data_size):
        numbers = np.array(NUMBERS[name][data_rank % 2])
        rows = table(table.plan(paddle.to_tensor(numbers)))
        (rows * paddle.to_tensor(upstream(numbers))).sum().backward()
    return table.weight.numpy(), table.weight.grad.numpy()


def look_up(topology: Topology, name: str, frozen: bool) -> dict:
    """Errors, and what was read and sent, of one rank."""
    sequence_parallel = topology.degrees.sequence_parallel
    placement = FleetPlacement(
        topology.mp_group, sequence_parallel, table_group=topology.table_group
    )
    table = table_of(placement, frozen)
    whole, gradient = one_device(name, topology.data_size)
    numbers = np.array(NUMBERS[name][topology.data_rank % 2])
    own = placement.ops.row_part.of_rows(numbers)
    factors = placement.ops.row_part.of_rows(upstream(numbers))
    reading, sending = record_host_reads(), record_collectives()
    with gpu_stubs(), reading as reads, sending as recording, use_kernels("gpu"):
        recording.phase = "forward"
        rows = table(table.plan(paddle.to_tensor(numbers)))
        # Something else in the loss has a gradient.
        loss = (rows * paddle.to_tensor(factors)).sum() + paddle.ones([1]).sum()
        recording.phase = "backward"
        if not frozen:
            loss.backward()
    if not frozen and topology.dp_group_of(placement.parameter_table[table.weight]).nranks > 1:
        all_reduce_gradients([table.weight], topology.dp_group)
    mine = placement.parameter_table.own_shard(table.weight, whole)
    asked = numbers
    if topology.mp_group.nranks > 1:
        # A number of token rows that mp does not divide is filled up with the first one.
        asked = np.split(np.resize(numbers, [len(numbers) + len(numbers) % 2, PER_TOKEN]), 2)
        asked = asked[topology.mp_rank]
    grad = table.weight.grad
    return {
        "rows": np.abs(rows.numpy() - whole[own]).max(),
        "drawn": np.array_equal(table.weight.numpy(), mine),
        "full_shape": placement.parameter_table.full_shape(table.weight),
        "gradient": None if grad is None else np.abs(
            grad.numpy() - placement.parameter_table.own_shard(table.weight, gradient)
        ).max(),
        "reads": [place.partition(":")[0] for place in reads if "gloo_fleet" not in place],
        "sent": [(c.phase, c.num_bytes) for c in recording.calls if "alltoall" in c.kind],
        "asked": np.unique(asked).tolist(),
        "first": table.group.rank * len(mine),
        "own": len(mine),
    }  # fmt: skip


CASES = [(run, name, frozen) for run in RUNS for name in NUMBERS for frozen in (0, 1)]
CASES = [case for case in CASES if case[:2] != ("mp2 sp", "odd")]
HEAVY = [(run, "spread", 0) for run in FOUR]


def worker(runs: dict, cases: list[tuple]) -> dict:
    found = {}
    for run, degrees in runs.items():
        topology = initialize(ParallelDegrees(**degrees))
        own = [case for case in cases if case[0] == run]
        found |= run_checks({str(case): partial(look_up, topology, *case[1:]) for case in own})
    return found


@cache
def outcomes_of(num_ranks: int) -> list[dict]:
    return launch(worker, num_ranks, arguments={2: (RUNS, CASES), 4: (FOUR, HEAVY)}[num_ranks])


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.heavy) for case in HEAVY)], ids=str
)
def test_ranks_exchange_the_rows_that_they_use(case):
    run, _, frozen = case
    ranks = outcome_of(outcomes_of(2 if run in RUNS else 4), str(case))
    for rank, found in enumerate(ranks):
        assert found["drawn"]
        assert found["full_shape"] == (ROWS, WIDTH)
        assert found["rows"] == 0
        assert found["gradient"] is None if frozen else found["gradient"] <= TOPOLOGY
        assert found["reads"] == ["parallel/row_table.py"]
        # Requests out, rows back, and the gradients of the rows that this rank uses.
        first, last = found["first"], found["first"] + found["own"]
        asked_for = sum(first <= number < last for of in ranks for number in of["asked"])
        used = len(found["asked"])
        wanted = [("forward", 8 * used), ("forward", 4 * WIDTH * asked_for)]
        if not frozen:
            wanted.append(("backward", 4 * WIDTH * used))
        assert found["sent"] == wanted, rank
