"""Ranges of files that ranks write and read, for every rank of a grid; the ranks are threads.

The files are those of one rank, bit for bit. Each rank copies its share of the values to the host,
or reads its share of the bytes, and no more.
"""

import itertools
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import paddle
import pytest

from paddle_vl.checkpoint import ranges, reading
from paddle_vl.checkpoint.ranges import ShardedValue
from paddle_vl.checkpoint.rules import LinearWeights, Same, StoredParameter
from paddle_vl.checkpoint.safetensors_io import (
    FileWriter,
    StoredTensor,
    TensorToWrite,
    read_checkpoint_headers,
    write_file,
)
from paddle_vl.checkpoint.writing import write_tensors
from paddle_vl.nn.linear import Columns, mark_fused
from paddle_vl.nn.parameter_table import CheckpointRanks, ParameterTable, ParamSpec, Seat, Spread
from paddle_vl.parallel.colocated.grid import ColocatedGrid, EncoderGroups, Place
from paddle_vl.parallel.degrees import ParallelDegrees
from paddle_vl.parallel.mesh import expert_shards, mesh, ranks_of_model, stage_seats
from paddle_vl.parallel.topology import Topology


class Grid(NamedTuple):
    """Degrees."""

    dp: int = 1
    sharding: int = 1
    mp: int = 1
    ep: int = 1

    @property
    def degrees(self) -> ParallelDegrees:
        return ParallelDegrees(**{f"{axis}_degree": n for axis, n in self._asdict().items()})

    @property
    def seats(self) -> list[Seat]:
        return stage_seats(self.degrees)


class Board:
    """What the threads of some ranks share."""

    def __init__(self, size: int):
        self.barrier = threading.Barrier(size, timeout=60)
        self.values: list[Any] = [None] * size

    def gathered(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values


@dataclass
class Group:
    rank: int
    nranks: int
    board: Board | None = None


@dataclass(frozen=True)
class Threads(CheckpointRanks):
    """A rank of a grid, of which this thread is one."""

    boards: tuple = ()
    sent: list[int] = field(default_factory=list)

    def exchanged(self, message, leaving, arriving):
        group = self.seats[self.rank].group
        members = [n for n, seat in enumerate(self.seats) if seat.group == group]
        own = members.index(self.rank)
        cuts = np.cumsum(leaving)[:-1]
        slices = np.split(message.numpy(), cuts)
        everyone = self.boards[1 + group].gathered(own, slices)
        received = [of_rank[own] for of_rank in everyone]
        assert [len(part) for part in received] == arriving
        self.sent.append(sum(leaving[:own] + leaving[own + 1 :]))
        return paddle.to_tensor(np.concatenate(received))

    def wait(self):
        self.boards[0].barrier.wait()


# Name, full shape in Paddle's layout, spec, layout, linears of a fused one.
FUSED = (Columns("q", 16), Columns("k", 8), Columns("v", 8))
VALUES = [
    ("table", (96, 64), ParamSpec(split_axis=0), Same(), ()),
    ("norm", (100,), ParamSpec(), Same(), ()),
    ("column", (60, 16), ParamSpec(split_axis=1), LinearWeights(), ()),
    ("fused", (50, 32), ParamSpec(split_axis=1, blocks=(16, 8, 8)), LinearWeights(), FUSED),
    ("row", (16, 60), ParamSpec(split_axis=0), LinearWeights(), ()),
    ("channels", (12,), ParamSpec(split_axis=0, blocks=(8, 4)), Same(), ()),
    ("experts", (8, 30, 8), ParamSpec(split_axis=2, blocks=(4, 4), is_expert=True), Same(), ()),
    ("whole_experts", (8, 50, 8), ParamSpec(is_expert=True), Same(), ()),
    ("row_table", (480, 12), ParamSpec(is_table=True), Same(), ()),
    ("number", (1,), ParamSpec(), Same(), ()),
]
# Bytes: of a part, and of the largest tensor that is not divided.
PART, UNDIVIDED = 4096, 4 * 50 * 32


class Store:
    """Flat shares of different sizes, one of them empty, of values whose name says so."""

    def __init__(self, rank: int, ranks: int, spreads: bool):
        self.rank, self.ranks, self.spreads = rank, ranks, spreads

    def spread(self, parameter, value=None):
        if not self.spreads or self.ranks == 1:
            return Spread(None, lambda: parameter)
        cuts = np.linspace(0, parameter.size, self.ranks).astype(int).tolist()
        spans = [(0, 0), *itertools.pairwise(cuts)]
        begin, end = spans[self.rank]
        # With padding, as fleet's slices have.
        own = np.concatenate([parameter.numpy().reshape(-1)[begin:end], np.full(3, -1, np.float32)])
        return Spread(spans, lambda: paddle.to_tensor(own))


class Held(NamedTuple):
    """What a rank has of one of `VALUES`: a parameter that is its shard."""

    name: str
    full: np.ndarray
    parameter: paddle.Tensor
    layout: Same
    linears: tuple
    shards: tuple[int, int]


def held_by(seat: Seat, grid: Grid, table: ParameterTable) -> list[Held]:
    found = []
    for number, (name, shape, spec, layout, linears) in enumerate(VALUES):
        shards = (seat.sharding, grid.sharding)
        if spec.is_expert and grid.ep > 1:
            # Not divided over mp, and sharded over ranks of their own.
            spec = ParamSpec(is_expert=True)
            shards = (seat.expert_sharding, expert_shards(grid.degrees))
        if spec.is_table:
            shards = (0, 1)
        full = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1000 * number
        parameter = shard_of(full, spec, table)
        if linears:
            mark_fused(parameter, linears)
        found.append(Held(name, full, parameter, layout, linears, shards))
    return found


def shard_of(full: np.ndarray, spec: ParamSpec, table: ParameterTable) -> paddle.Tensor:
    """A parameter that is this rank's shard of a value."""
    any_shape = paddle.create_parameter(full.shape, "float32")
    table.add([any_shape], spec)
    own = table.own_shard(any_shape, full)
    parameter = paddle.create_parameter(own.shape, "float32")
    parameter.set_value(own)
    table.add([parameter], spec)
    return parameter


def tensors_of(seat: Seat, grid: Grid, spreads: bool, as_states: bool) -> list[TensorToWrite]:
    """What a rank passes to `write_tensors`: weights, or states in Paddle's layout."""
    group = {name: Group(getattr(seat, name), getattr(grid, name)) for name in ("mp", "ep")}
    of_table = Group(seat.table, ranks_of_model(grid.degrees))
    table = ParameterTable(group["mp"], group["ep"], lambda value, of: [], of_table)
    found = []
    for name, full, parameter, layout, linears, shards in held_by(seat, grid, table):
        layout = Same() if as_states else layout
        source = ShardedValue(table, parameter, Store(*shards, spreads))
        for block, linear in enumerate(linears or (None,)):
            width = full.shape if linear is None else (full.shape[0], linear.width)
            found.append(
                TensorToWrite(
                    name if linear is None else f"{name}.{linear.name}",
                    layout.stored_shape(width),
                    "F32",
                    arrange=layout.to_stored,
                    source=source,
                    block=None if linear is None else block,
                    keeps_rows=layout.row_axis == 0,
                )
            )
    return [*found, TensorToWrite("plain", (7,), "F32", lambda: np.arange(7, dtype=np.float32))]


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def on_threads(count: int, board: Board, run: Callable[[int], None]) -> list[Exception]:
    """Run a function in a thread per rank; their errors. After one no rank waits for another."""
    errors = []

    def guarded(rank: int) -> None:
        try:
            run(rank)
        except Exception as error:
            errors.append(error)
            board.barrier.abort()

    threads = [threading.Thread(target=guarded, args=[rank]) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def counting_writer(on_host: list[int], rank: int) -> FileWriter:
    """Writes files, and counts the bytes that a rank has on the host."""

    def write(file, tensors):
        def counted(tensor):
            array = tensor.produce()
            on_host[rank] += array.nbytes if tensor.name else 0
            return array

        return write_file(file, [t._replace(produce=lambda t=t: counted(t)) for t in tensors])

    return write


def saved(folder, grid: Grid, spreads: bool, as_states: bool, limit: int = 30_000):
    """Save on all ranks of a grid; bytes on the host and values sent, of each rank."""
    folder.mkdir()
    seats = grid.seats
    of_groups = [Board(sum(s.group == g for s in seats)) for g in range(seats[-1].group + 1)]
    boards = (Board(len(seats)), *of_groups)
    on_host = [0] * len(seats)
    sent = [[] for _ in seats]

    def run(rank: int) -> None:
        ranks = Threads(rank, len(seats), 0, seats, boards=boards, sent=sent[rank])
        own = tensors_of(seats[rank], grid, spreads, as_states)
        write_tensors(folder, "model", own, limit, ranks, counting_writer(on_host, rank))

    errors = on_threads(len(seats), boards[0], run)
    assert not errors, errors
    return on_host, [sum(of_rank) for of_rank in sent]


GRIDS = [
    Grid(dp=3),
    Grid(mp=2),
    Grid(sharding=4),
    Grid(dp=2, sharding=3, mp=2),
    Grid(dp=4, ep=2),
    Grid(dp=2, ep=2, mp=2),
    Grid(dp=2, ep=2, sharding=2, mp=2),
    Grid(ep=4, sharding=4),
]


@pytest.mark.parametrize("as_states", [False, True])
@pytest.mark.parametrize("spreads", [False, True])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_the_files_are_those_of_one_rank_and_each_rank_has_its_share(
    tmp_path, monkeypatch, grid, spreads, as_states
):
    monkeypatch.setattr(ranges, "PART_BYTES", PART)
    saved(tmp_path / "one", Grid(), spreads, as_states)
    on_host, sent = saved(tmp_path / "several", grid, spreads, as_states)
    assert contents(tmp_path / "several") == contents(tmp_path / "one")
    size = sum(tensor.num_bytes for tensor in read_checkpoint_headers(tmp_path / "one").values())
    # Of each exchange one more value per rank.
    extra = 4 * len(on_host) * (len(VALUES) + 2 + size // PART)
    share = size / len(on_host) + UNDIVIDED + extra
    assert size <= sum(on_host) <= size + len(on_host) * extra
    assert max(on_host) <= share
    if grid == Grid(dp=3):
        assert sent == [0] * len(sent)
    else:
        # A share of what it has, which may be more than a share of what it gets.
        assert max(sent) * 4 <= 2 * share


def group_of(rank: int, ranks: list[int], boards: dict[tuple, Board]) -> Group:
    return Group(ranks.index(rank), len(ranks), boards.setdefault(tuple(ranks), Board(len(ranks))))


def topology_of(grid: Grid, rank: int, boards: dict[str, dict]) -> Topology:
    groups = {
        f"{axis}_group": group_of(rank, ranks, boards[axis])
        for axis, ranks in mesh(grid.degrees, rank).items()
    }
    groups["saving_group"] = groups.pop("model_group")
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
        of_table = topology.table_group
        table = ParameterTable(topology.mp_group, ep_group, table_group=of_table)
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
