"""Ranges of files that ranks read, for every rank of a grid; the ranks are threads.

Guarantees: each rank has its shards bit for bit and reads its share of the bytes; a value that is
not finite is an error of all ranks that need it, which names the file.
"""

import threading
from collections import Counter, defaultdict

import numpy as np
import pytest

from paddle_vl.checkpoint import reading
from paddle_vl.checkpoint.rules import StoredParameter
from paddle_vl.checkpoint.safetensors_io import StoredTensor, read_checkpoint_headers
from paddle_vl.nn.parameter_table import ParameterTable
from paddle_vl.parallel.mesh import mesh
from paddle_vl.parallel.topology import Topology
from tests.single_card_tests.checkpoint.test_ranges import (
    GRIDS,
    Board,
    Grid,
    group_of,
    held_by,
    on_threads,
    saved,
)


def topology_of(grid: Grid, rank: int, boards: dict[str, dict]) -> Topology:
    groups = {
        f"{axis}_group": group_of(rank, ranks, boards[axis])
        for axis, ranks in mesh(grid.degrees, rank).items()
        if axis != "model"
    }
    return Topology(grid.degrees, rank, **groups)


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_each_rank_has_its_shards_and_reads_its_share(tmp_path, monkeypatch, grid, damaged):
    monkeypatch.setattr(reading, "SHARED_VALUES", 1)
    saved(tmp_path / "one", Grid(), False, False)
    stored = read_checkpoint_headers(tmp_path / "one")
    if damaged:
        with stored["norm"].file.open("r+b") as file:
            file.seek(stored["norm"].offset)
            file.write(np.float32(np.nan).tobytes())
    seats, boards, lock = grid.seats, defaultdict(dict), threading.Lock()
    topologies = [topology_of(grid, rank, boards) for rank in range(len(seats))]
    read, plain = [Counter() for _ in seats], StoredTensor.read

    def counted(tensor: StoredTensor, **options):
        with lock:
            read[int(threading.current_thread().name)][tensor.name] += tensor.num_bytes
        return plain(tensor, **options)

    def run(rank: int) -> None:
        threading.current_thread().name = str(rank)
        topology = topologies[rank]
        ep_group = topology.ep_group if topology.ep_group.nranks > 1 else None
        table = ParameterTable(topology.mp_group, ep_group)
        table.readers = topology.readers
        table.gather_rows = lambda own, of: np.concatenate(of.board.gathered(of.rank, own))
        for name, _, parameter, layout, linears, _ in held_by(seats[rank], grid, table):
            items = [StoredParameter(name, parameter, layout, table)]
            if linears:
                items = [
                    StoredParameter(f"{name}.{linear.name}", parameter, layout, table, block)
                    for block, linear in enumerate(linears)
                ]
            if damaged and name == "norm":
                with pytest.raises(RuntimeError, match="safetensors: norm holds 1 values"):
                    reading.stored_value(items, stored)
                continue
            value = reading.stored_value(items, stored)
            np.testing.assert_array_equal(value.numpy(), parameter.numpy())

    monkeypatch.setattr(StoredTensor, "read", counted)
    errors = on_threads(len(seats), Board(1), run)
    assert not errors, errors
    # Of others all ranks, or those of fewer axes, need more rows than they share.
    shared = [
        tensor
        for name, tensor in stored.items()
        if tensor.shape[0] >= len(seats) and name not in ("plain", "channels")
    ]
    for tensor in () if damaged else shared:
        of_ranks = [of_rank[tensor.name] for of_rank in read]
        assert sum(of_ranks) == tensor.num_bytes
        assert (
            max(of_ranks) <= tensor.num_bytes / len(seats) + 3 * tensor.num_bytes / tensor.shape[0]
        )
