"""Ranges of files that ranks write, for every rank of a grid; the ranks are threads.

Guarantees: the files are those of one rank, bit for bit, whatever shards the ranks have; each rank
copies its share of the values to the host and no more, and sends and receives about as much; a rank
that has a value receives nothing.
"""

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import paddle
import pytest

from paddle_vl.checkpoint import ranges
from paddle_vl.checkpoint.ranges import ShardedValue
from paddle_vl.checkpoint.rules import LinearWeights, Same
from paddle_vl.checkpoint.safetensors_io import (
    FileWriter,
    TensorToWrite,
    read_checkpoint_headers,
    write_file,
)
from paddle_vl.checkpoint.writing import write_tensors
from paddle_vl.nn.linear import Columns, mark_fused
from paddle_vl.nn.parameter_table import CheckpointRanks, ParameterTable, ParamSpec, Seat, Spread
from paddle_vl.parallel.degrees import ParallelDegrees
from paddle_vl.parallel.mesh import expert_shards, stage_seats


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
    table = ParameterTable(group["mp"], group["ep"], lambda value, of: [])
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
