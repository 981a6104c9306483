"""Ranges of an encoder that is divided over ranks of several stages; the ranks are threads.

Guarantees: the files are those of one rank; ranks of the first stage write the encoder, and the
others copy nothing of it to the host and send no more than they have.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from paddle_vl.checkpoint import ranges
from paddle_vl.checkpoint.ranges import ShardedValue
from paddle_vl.checkpoint.rules import LinearWeights, Same
from paddle_vl.checkpoint.safetensors_io import TensorToWrite
from paddle_vl.checkpoint.writing import write_tensors
from paddle_vl.nn.parameter_table import ParameterTable, ParamSpec
from paddle_vl.parallel.colocated.grid import ColocatedGrid, EncoderGroups, Place
from paddle_vl.parallel.degrees import ParallelDegrees
from paddle_vl.parallel.mesh import stage_seats
from tests.single_card_tests.checkpoint.test_ranges import (
    PART,
    Board,
    Store,
    Threads,
    contents,
    counting_writer,
    group_of,
    on_threads,
    shard_of,
)


@dataclass(frozen=True)
class StageThreads(Threads):
    """A rank of a stage of two, of which the other is beside it."""

    beside: Any = None

    def gather_stages(self, value):
        return self.beside.gathered(self.stage, value)


# Full value, spec, layout and stage of an encoder's parameters and of those of two stages.
OF_STAGES = {
    "column": ((60, 16), ParamSpec(split_axis=1, is_encoder=True), LinearWeights(), None),
    "row": ((16, 60), ParamSpec(split_axis=0, is_encoder=True), LinearWeights(), None),
    "bias": ((24,), ParamSpec(split_axis=0, blocks=(16, 8), is_encoder=True), Same(), None),
    "whole": ((30, 8), ParamSpec(is_encoder=True), Same(), None),
    "first": ((96, 64), ParamSpec(), Same(), 0),
    "second": ((64, 40), ParamSpec(), Same(), 1),
}


def of_stage(stage: int, table: ParameterTable, store: Any) -> list[TensorToWrite]:
    found = []
    for number, (name, (shape, spec, layout, own)) in enumerate(OF_STAGES.items()):
        if own not in (None, stage):
            continue
        full = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 10_000 * number
        parameter = shard_of(full, spec, table)
        found.append(
            TensorToWrite(
                name,
                layout.stored_shape(shape),
                "F32",
                arrange=layout.to_stored,
                is_joined=spec.is_encoder and stage > 0,
                source=ShardedValue(table, parameter, store if spec.is_encoder else None),
                keeps_rows=layout.row_axis == 0,
            )
        )
    return found


@pytest.mark.parametrize("shards_state", [False, True])
def test_an_encoder_comes_from_ranks_of_several_stages(tmp_path, monkeypatch, shards_state):
    monkeypatch.setattr(ranges, "PART_BYTES", PART)
    (tmp_path / "one").mkdir()
    whole = [*of_stage(0, ParameterTable(), None), of_stage(1, ParameterTable(), None)[-1]]
    write_tensors(tmp_path / "one", "model", whole, 30_000)
    # Two data lanes of two stages; each is an encoder lane too.
    places = tuple(Place(lane, stage, 0) for lane in range(2) for stage in range(2))
    grid, boards = ColocatedGrid(places, 2, 2), defaultdict(dict)
    lanes, replicas = grid.encoder_mp_groups(), grid.encoder_dp_groups()
    every = (Board(4), *([Board(4)] if shards_state else [Board(2), Board(2)]))
    on_host, sent = [0] * 4, [[] for _ in range(4)]
    pipelines, folder = [Board(2), Board(2)], tmp_path / "several"
    folder.mkdir()

    def run(rank: int) -> None:
        place = places[rank]
        lane = next(group_of(rank, ranks, boards["lane"]) for ranks in lanes if rank in ranks)
        column = next(group_of(rank, ranks, boards["dp"]) for ranks in replicas if rank in ranks)
        role = grid.role(rank)
        encoder = EncoderGroups(grid, role, lane, column, None, None, shards_state=shards_state)
        of_stages = Threads(
            rank, 4, seats=encoder.seats(), writers=grid.first_stage(), boards=every,
            sent=sent[rank],
        )  # fmt: skip
        ranks = StageThreads(
            place.lane, 2, place.stage, stage_seats(ParallelDegrees(dp_degree=2)), of_stages,
            boards=every, beside=pipelines[place.lane],
        )  # fmt: skip
        table = ParameterTable()
        table.shard_encoder(lane, lambda value, of: [])
        tensors = of_stage(place.stage, table, Store(column.rank, column.nranks, shards_state))
        write_tensors(folder, "model", tensors, 30_000, ranks, counting_writer(on_host, rank))

    errors = on_threads(4, every[0], run)
    assert not errors, errors
    assert contents(folder) == contents(tmp_path / "one")
    size = {t.name: t.num_bytes for t in whole}
    extra = 4 * 4 * len(whole)
    for rank, place in enumerate(places):
        # Half of its stage's files. The second stage keeps nothing of the encoder.
        own = size["second"] if place.stage else sum(size.values()) - size["second"]
        assert on_host[rank] <= own / 2 + size["row"] + extra
        assert 4 * sum(sent[rank]) <= sum(size[n] for n in ("column", "row", "bias", "whole"))
    assert sum(sent[1]) > 0
