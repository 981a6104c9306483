"""A small encoder and language model in float64 for tests of the colocated schedule.

The encoder is an MLP whose linears divide over its mp group, with a merged section and two levels.
The language model is row-wise: with `splits_rows` an mp rank has a part of the token rows and a
part of every gradient, as under sequence parallelism.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from paddle import nn

from paddle_vl.batch.schema import OTHER_LANES
from paddle_vl.nn.linear import Linear
from paddle_vl.nn.parameter_table import ParamSpec
from paddle_vl.nn.placement import SingleDevicePlacement, StageLayers
from paddle_vl.parallel.colocated.encoder_layers import add_encoder
from paddle_vl.parallel.colocated.runner import ColocatedRunner
from paddle_vl.parallel.degrees import ParallelDegrees
from paddle_vl.parallel.pipeline.schedule import chunks_of_stage, num_chunks
from paddle_vl.parallel.ranks import FleetRanks
from paddle_vl.parallel.topology import Topology, initialize

PIXEL, HIDDEN, WIDTH, VOCAB, TOKENS, LEVELS = 6, 8, 8, 16, 12, 2
RATE, MAX_NORM = 0.5, 0.05


@dataclass(frozen=True)
class Case:
    """A layout with its data.

    Attributes:
        degrees: of the language model.
        encoder_mp: tensor-parallel degree of the encoder.
        num_batches: micro-batches of a step.
        missing: which items are left out, see `world_batches`.
        frozen: names of parts: `encoder`, `encoder up` (its first linear), chunk numbers.
        splits_rows: mp ranks have other token rows.
        offloads: see `ColocatedRunner`.
    """

    degrees: Mapping[str, Any]
    encoder_mp: int = 1
    num_batches: int = 4
    missing: str = ""
    frozen: tuple = ()
    splits_rows: bool = False
    offloads: bool = False


class ToyEncoder(nn.Layer):
    column_blocks: ClassVar = {"up": 1}
    row_linears: ClassVar = ("down",)

    def __init__(self):
        super().__init__()
        self.up, self.down = Linear(PIXEL, HIDDEN, True), Linear(HIDDEN, WIDTH, True)
        self.heads = nn.LayerList([Linear(WIDTH, WIDTH, True) for _ in range(1 + LEVELS)])

    def forward(self, x):
        x = self.down(F.gelu(self.up(x)))
        return paddle.concat([head(x) for head in self.heads], axis=1)


class ToyItems:
    """The `ItemEncoder`."""

    section_widths: ClassVar = [WIDTH] * (1 + LEVELS)
    splits_rows = True

    def __init__(self, tower: nn.Layer, frozen: bool):
        self.tower, self.frozen = tower, frozen
        self.num_encoded = 0

    def parameters(self):
        return self.tower.parameters()

    def items(self, batch):
        rows = np.asarray(batch.get("rows", ()), dtype=np.int64)
        return rows, rows

    def has_items_anywhere(self, batch):
        return batch["is_visual"]

    def encode(self, batches, own):
        pixels = []
        for batch, items in zip(batches, own, strict=True):
            ends = np.cumsum(batch.get("rows", ()))
            for item in items:
                pixels.append(
                    batch["pixels"][int(ends[item]) - batch["rows"][item] : int(ends[item])]
                )
        self.num_encoded += len(pixels)
        return self.tower(paddle.to_tensor(np.concatenate(pixels)))

    def sections_of(self, chunk):
        own = {1 + chunk.number} if chunk.number < LEVELS else set()
        return own | {0} if chunk.is_first else own

    def language_batch(self, batch, sections):
        return {**batch, "sections": sections}


class ToyChunk(nn.Layer):
    def __init__(self, number: int, count: int, part: tuple[int, int]):
        super().__init__()
        self.number, self.part = number, part
        self.is_first, self.is_last = number == 0, number == count - 1
        self.linear = Linear(WIDTH, WIDTH, True)
        self.table = Linear(VOCAB, WIDTH, False) if self.is_first else None

    def input_shape(self, batch):
        return TOKENS // self.part[1], WIDTH

    def forward(self, batch, rows=None):
        rank, size = self.part
        length = TOKENS // size
        own = slice(rank * length, (rank + 1) * length)
        places = np.asarray(batch["places"])
        is_here = np.flatnonzero((places >= own.start) & (places < own.stop))
        update = paddle.to_tensor(places[is_here] - own.start)
        sections, here = batch["sections"], paddle.to_tensor(is_here)
        if self.is_first:
            rows = self.table.weight[paddle.to_tensor(batch["ids"][own])]
            if 0 in sections and is_here.size:
                merged = paddle.index_select(sections[0], here)
                rows = paddle.scatter(rows, update, merged)
        rows = paddle.tanh(self.linear(rows)) + rows
        if 1 + self.number in sections and is_here.size:
            level = paddle.index_select(sections[1 + self.number], here)
            rows = paddle.index_add(rows, update, 0, level)
        if not self.is_last:
            return rows
        weights = paddle.to_tensor(batch["weights"][own])
        return (rows.square().sum(axis=1) * weights).sum()


class ToyLoss:
    terms: ClassVar = {"loss": 1.0}

    def share(self, output, totals, num_batches):
        loss = output / totals[0]
        return loss, loss.detach().reshape([1])

    def sums(self, output):
        return output.reshape([1])


class Model(nn.Layer):
    """All chunks, of which a rank uses its own, and the tower."""

    def __init__(self, count: int, part: tuple[int, int], tower: nn.Layer):
        super().__init__()
        self.tower = tower
        self.chunks = nn.LayerList([ToyChunk(number, count, part) for number in range(count)])


def fill(model: Model, own_shard=lambda parameter, full: full) -> None:
    rng = np.random.default_rng(3)
    shapes = {
        name: p.shape
        for name, p in Model(len(model.chunks), (0, 1), ToyEncoder()).named_parameters()
    }
    for name, parameter in model.named_parameters():
        full = rng.standard_normal(shapes[name]) * 0.5
        parameter.set_value(own_shard(parameter, full))


def freeze(model: Model, frozen: Sequence) -> None:
    parts = {"encoder": model.tower, "encoder up": model.tower.up}
    for name in frozen:
        layer = parts[name] if isinstance(name, str) else model.chunks[name]
        for parameter in layer.parameters():
            parameter.stop_gradient = True


def world_batches(step: int, lanes: int, case: Case) -> list[list[dict]]:
    """Micro-batches of every data lane, the same on every rank; sizes change from step to step."""
    rng = np.random.default_rng(100 + step)
    data = []
    for lane in range(lanes):
        batches = []
        for number in range(case.num_batches):
            count = int(rng.integers(1, 4))
            if case.missing == "some":
                count = 0 if number == 1 or (lane == 0 and number == 0) else count
            elif case.missing == "lane":
                count = 0 if lane == 0 else count
            elif case.missing == "one item":
                count = int(lane == 0 and number == 0)
            elif case.missing == "step":
                count = 0 if step == 1 else count
            rows = [int(rng.integers(1, 4)) for _ in range(count)]
            weights = (rng.random(TOKENS) < rng.random()).astype(np.float64)
            places = np.sort(rng.permutation(TOKENS)[: sum(rows)])
            # Every visual row reaches the loss.
            weights[places] = 1.0
            batches.append(
                {
                    "rows": rows,
                    "pixels": rng.standard_normal((sum(rows), PIXEL)),
                    "places": places,
                    "ids": rng.integers(0, VOCAB, TOKENS),
                    "weights": weights,
                }
            )
        data.append(batches)
    for number in range(case.num_batches):
        is_visual = any(batches[number]["rows"] for batches in data)
        for batches in data:
            batches[number]["is_visual"] = is_visual
    return data


def total_weight(data: list[list[dict]]) -> float:
    return max(sum(batch["weights"].sum() for lane in data for batch in lane), 1.0)


class Reference:
    """One process with the same values."""

    def __init__(self, count: int, case: Case):
        self.model = Model(count, (0, 1), ToyEncoder())
        fill(self.model)
        freeze(self.model, case.frozen)

    def backward(self, data: list[list[dict]]) -> float:
        total, loss_sum = total_weight(data), 0.0
        for batch in (batch for lane in data for batch in lane):
            sections = {}
            if batch["rows"]:
                out = self.model.tower(paddle.to_tensor(batch["pixels"]))
                sections = dict(enumerate(paddle.split(out, 1 + LEVELS, axis=1)))
            rows = None
            for chunk in self.model.chunks:
                rows = chunk({**batch, "sections": sections}, rows)
            loss = rows / total
            if not loss.stop_gradient:
                loss.backward()
            loss_sum += loss.item()
        return loss_sum

    def gradients(self) -> dict[str, np.ndarray]:
        return {n: p.grad.numpy() for n, p in self.model.named_parameters() if p.grad is not None}


def sgd(parameters, norm: float) -> None:
    with paddle.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                step = RATE * min(1.0, MAX_NORM / norm) * parameter.grad
                paddle.assign(parameter - step, parameter)
                parameter.clear_gradient(False)


@dataclass
class Ranks:
    """This rank's part of a case."""

    case: Case
    topology: Topology
    model: Model
    runner: ColocatedRunner
    ranks: FleetRanks
    table: Any
    names: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, case: Case) -> "Ranks":
        degrees = ParallelDegrees(
            **case.degrees,
            schedule="colocated",
            encoder={"mp_degree": case.encoder_mp},
            num_micro_batches=case.num_batches,
        )
        topology = initialize(degrees)
        placement = SingleDevicePlacement(
            StageLayers(embedding=topology.pp_rank == 0, encoder_everywhere=True)
        )
        add_encoder(placement, topology.encoder)
        table = placement.parameter_table
        part = (topology.mp_rank, degrees.mp_degree) if case.splits_rows else (0, 1)
        tower = placement.layers.tower(ToyEncoder())
        model = Model(num_chunks(degrees), part, tower)
        table.add(model.chunks.parameters(), ParamSpec(has_partial_gradient=case.splits_rows))
        fill(model, table.own_shard)
        freeze(model, case.frozen)
        items = ToyItems(tower, "encoder" in case.frozen)
        runner = ColocatedRunner(
            model,
            list(model.chunks),
            degrees,
            topology.pp_rank,
            "float64",
            ToyLoss(),
            SimpleNamespace(),
            topology.data_size,
            encoder=items,
            topology=topology,
            ranks_use_other_rows=case.splits_rows,
            offloads_rows=case.offloads,
        )
        names = [
            name
            for name, parameter in model.named_parameters()
            if name.startswith("tower.")
            or int(name.split(".")[1]) in chunks_of_stage(degrees, topology.pp_rank)
        ]
        return cls(case, topology, model, runner, FleetRanks(topology), table, names)

    def batches(self, data: list[list[dict]]) -> list[dict]:
        """This lane's micro-batches, with those of the other lanes that its encoder lane serves."""
        role = self.topology.encoder.role
        others = [lane for lane in role.served_lanes if lane != role.place.lane]
        return [
            {**batch, OTHER_LANES: [data[lane][number] for lane in others]}
            for number, batch in enumerate(data[role.place.lane])
        ]

    def own_parameters(self) -> dict[str, paddle.Tensor]:
        found = dict(self.model.named_parameters())
        return {name: found[name] for name in self.names}

    def trained(self) -> list[tuple[paddle.Tensor, ParamSpec]]:
        parameters = self.own_parameters().values()
        return self.table.with_specs(p for p in parameters if not p.stop_gradient)

    def backward(self, data: list[list[dict]]) -> float:
        """The three phases and the sums; returns the loss."""
        terms = self.runner.accumulate_gradients(self.batches(data), [total_weight(data)])
        self.ranks.sum_gradients(self.trained())
        if not (self.ranks.counts_losses or self.case.splits_rows):
            terms = paddle.zeros_like(terms)
        return self.ranks.sum_over_all(terms).item()

    @paddle.no_grad()
    def norm(self) -> float:
        total = paddle.zeros([], "float64")
        for tensor, spec in self.trained():
            if tensor.grad is not None and self.ranks.counts_here(spec):
                total = total + tensor.grad.square().sum()
        return float(self.ranks.sum_over_all(total).sqrt())

    def error(self, expected: Mapping[str, np.ndarray], of_gradients: bool) -> float:
        """Largest relative error over all ranks; 1 where a gradient is missing on one side."""
        worst = 0.0
        for name, parameter in self.own_parameters().items():
            found = parameter.grad if of_gradients else parameter
            if found is None or name not in expected:
                worst = max(worst, float((found is None) != (name not in expected)))
                continue
            wanted = self.table.own_shard(parameter, expected[name])
            worst = max(worst, np.abs(found.numpy() - wanted).max() / np.abs(expected[name]).max())
        value = paddle.to_tensor([worst], dtype="float64")
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return value.item()
