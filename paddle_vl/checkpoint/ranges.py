"""Which rank writes which bytes of a model's files, and the exchange that brings it their values.

The bytes of a stage's tensors, in the order of the files, are divided equally over the N ranks that
have its layers. A boundary falls between tensors, or between rows of one whose rows stay rows in
its file. So each rank copies 1/N of the values to host memory and writes 1/N of the bytes.

Values that it lacks (of other mp, ep or sharding ranks) come by all-to-alls, in which each rank
sends and receives about 1/N of all values. Round k brings the k-th part of every rank, at most
`PART_BYTES` each where rows can be divided. A part of a value that the rank has needs no exchange.
All of it follows from the parameters' specs and the seats of the ranks, so that all ranks compute
the same plan.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby, zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.nn.linear import whole_slices
from paddle_vl.nn.parameter_table import ParameterTable, ParamSpec, host_array, joined_shards
from paddle_vl.nn.placement import CheckpointRanks, Seat

if TYPE_CHECKING:
    from paddle_vl.checkpoint.safetensors_io import TensorToWrite
    from paddle_vl.nn.master_weights import ParameterStore, Spread

PART_BYTES = 1 << 28


class Share(NamedTuple):
    """Consecutive values of a part that one rank has; a coordinate is None if any rank has them.

    Attributes:
        begin, end: in what the rank has, flat.
    """

    ep: int | None
    mp: int | None
    sharding: int | None
    begin: int
    end: int


@dataclass(frozen=True, eq=False)
class Source:
    """A weight, or a state of it, on the ranks that have a share of it.

    Attributes:
        shape: of a shard of the mp and ep ranks.
        mp, ep: numbers of such shards.
        spread: see `ParameterStore.spread`.
        columns: of each linear of a fused weight in the full value.
        is_gathered: getting this rank's share is collective, over ranks of several stages, and
            gives all shards, one after another.
    """

    spec: ParamSpec
    shape: tuple[int, ...]
    dtype: Any
    mp: int
    ep: int
    spread: "Spread"
    columns: Sequence[slice]
    is_gathered: bool = False

    @classmethod
    def of(
        cls,
        table: ParameterTable,
        parameter: Tensor,
        store: "ParameterStore | None",
        value: Tensor | None = None,
    ) -> "Source":
        """The source of a parameter, or of a `value` that is sharded as the store shards it."""
        from paddle_vl.nn.master_weights import Spread

        spec = table[parameter]
        if spec.is_encoder:

            def gathered() -> Tensor:
                full = parameter if store is None else store.gathered_value(parameter, value)
                return table.gathered_shards(parameter, full)

            spread = Spread(None, gathered)
        elif store is None:
            spread = Spread(None, lambda: parameter)
        else:
            spread = store.spread(parameter, value)
        mp, ep = table.num_shards(parameter)
        return cls(
            spec,
            tuple(parameter.shape),
            parameter.dtype if value is None else value.dtype,
            mp,
            ep,
            spread,
            whole_slices(parameter),
            spec.is_encoder,
        )

    @property
    def rows(self) -> int:
        """Rows of the full value."""
        return math.prod(self.shape[:1]) * self.ep * (self.mp if self.spec.split_axis == 0 else 1)

    @property
    def divides(self) -> bool:
        """Whether any rows of the full value may be written by themselves."""
        return bool(self.shape) and not (self.spec.split_axis == 0 and len(self.spec.blocks) > 1)

    @property
    def is_local(self) -> bool:
        """Whether each rank has the full value."""
        return self.is_gathered or (self.mp == self.ep == 1 and self.spread.spans is None)

    def shards(self, first: int, last: int) -> Iterator[tuple[int, int, int, int]]:
        """Numbers (ep, mp) of the shards with rows `first` to `last` of the full value, and the
        first value and the end of these in the flat shard; in the order of the full value."""
        rows, width = math.prod(self.shape[:1]), math.prod(self.shape[1:])
        for ep in range(self.ep):
            for mp in range(self.mp):
                start = (ep * self.mp + mp if self.spec.split_axis == 0 else ep) * rows
                begin, end = (min(max(row - start, 0), rows) for row in (first, last))
                if begin < end:
                    yield ep, mp, begin * width, end * width

    def shares(self, first: int, last: int) -> Iterator[Share]:
        """Who has rows `first` to `last`, in the order of `joined`."""
        for ep, mp, begin, end in self.shards(first, last):
            if self.is_gathered:
                size = math.prod(self.shape)
                yield Share(None, None, None, mp * size + begin, mp * size + end)
                continue
            place = (ep if self.ep > 1 else None, mp if self.mp > 1 else None)
            if self.spread.spans is None:
                yield Share(*place, None, begin, end)
                continue
            for rank, (start, stop) in enumerate(self.spread.spans):
                low, high = max(begin, start), min(end, stop)
                if low < high:
                    yield Share(*place, rank, low - start, high - start)

    def joined(self, flat: np.ndarray, first: int, last: int) -> np.ndarray:
        """Rows `first` to `last` of the full value from the values of all shares in order."""
        by_ep, at = dict[int, list[np.ndarray]](), 0
        for ep, _, begin, end in self.shards(first, last):
            shard = flat[at : at + end - begin].reshape([-1, *self.shape[1:]])
            by_ep.setdefault(ep, []).append(shard)
            at += end - begin
        parts = [s[0] if len(s) == 1 else joined_shards(self.spec, s) for s in by_ep.values()]
        full = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return full if self.shape else full.reshape([])


@dataclass(frozen=True, eq=False)
class Part:
    """Rows of the tensors of one source, or tensors without a source, that one rank writes.

    Attributes:
        first, last: rows; of all of the tensors.
        writer: number among the checkpoint ranks.
    """

    tensors: Sequence["TensorToWrite"]
    first: int
    last: int
    writer: int

    @property
    def source(self) -> Source | None:
        return self.tensors[0].source


def divided(tensors: Sequence["TensorToWrite"], size: int) -> list[Part]:
    """Parts of these tensors for so many ranks, in order, of about equal bytes per rank."""
    units = [
        list(found)
        for _, found in groupby(tensors, lambda t: id(t) if t.source is None else id(t.source))
    ]
    total = sum(tensor.num_bytes for tensor in tensors)
    parts, done = [], 0
    for unit in units:
        source, num_bytes = unit[0].source, sum(tensor.num_bytes for tensor in unit)
        rows = 1 if source is None else source.rows
        is_divided = source is not None and source.divides and unit[0].keeps_rows and num_bytes
        if size == 1 or not is_divided:
            # To the rank that has most of it in an exact division.
            writer = min((2 * done + num_bytes) * size // max(2 * total, 1), size - 1)
            parts.append(Part(unit, 0, rows, writer))
            done += num_bytes
            continue
        first, width = 0, num_bytes // rows
        while first < rows:
            writer = min(done * size // total, size - 1)
            left = -(-(total * (writer + 1)) // size) - done
            last = min(first + max(min(left, PART_BYTES) // width, 1), rows)
            parts.append(Part(unit, first, last, writer))
            done += (last - first) * width
            first = last
    return parts


class Exchange:
    """The values of the parts that this rank writes; all ranks of the stage take part.

    Args:
        parts: of all ranks of the stage.
        gathered: sources whose share is gathered, in the same order on all ranks that do.
    """

    def __init__(self, parts: Sequence[Part], gathered: Sequence[Source], ranks: CheckpointRanks):
        self._ranks, self._seats = ranks, ranks.seats or [Seat(n) for n in range(ranks.size)]
        group = self._seats[ranks.rank].group
        self._members = [n for n, seat in enumerate(self._seats) if seat.group == group]
        self._holders: dict[tuple, list[int]] = {}
        self.own = [part for part in parts if part.writer == ranks.rank]
        of_ranks = [[part for part in parts if part.writer == rank] for rank in self._members]
        self._rounds = [list(filter(None, each)) for each in zip_longest(*of_ranks)]
        self._num_run = 0
        # Of own parts: host arrays, and places of the shares in them.
        self._values: dict[int, np.ndarray] = {}
        self._places: dict[int, list[slice]] = {}
        for source in gathered:
            flat = source.spread.own()
            for number, part in enumerate(self.own):
                if part.source is source:
                    self._take_local(number, part, flat)

    def _value(self, number: int) -> np.ndarray:
        """What this rank gets for an own part, `[n]` on the host, once; it may share the memory of
        a parameter."""
        while self._num_run <= number:
            self._run()
        return self._values.pop(number)

    def own_tensors(self) -> "Iterator[TensorToWrite]":
        """What this rank writes, in order: tensors, or rows of them, with their offset from the
        first byte of the tensor. Producing them is collective, arranging is not."""
        for number, part in enumerate(self.own):
            source, full = part.source, list[np.ndarray]()

            def arranged(
                received: np.ndarray,
                tensor: "TensorToWrite",
                number: int = number,
                part: Part = part,
                full: list[np.ndarray] = full,
            ) -> np.ndarray:
                if part.source is None:
                    return tensor.arrange(received)
                # The first of the linears of a fused parameter receives, the last one frees.
                if tensor is part.tensors[0]:
                    full.append(self._joined(number, received))
                value = full[0]
                if tensor is part.tensors[-1]:
                    full.clear()
                if tensor.block is not None:
                    value = value[:, part.source.columns[tensor.block]]
                return tensor.arrange(value)

            for tensor in part.tensors:
                produce: Any = partial(np.empty, 0)
                if tensor is part.tensors[0]:
                    produce = partial(self._value, number)
                shape, offset = tensor.shape, 0
                if source is not None and part.last - part.first < source.rows:
                    offset = part.first * (tensor.num_bytes // shape[0])
                    shape = (part.last - part.first, *shape[1:])
                arrange = partial(arranged, tensor=tensor)
                yield tensor._replace(shape=shape, offset=offset, produce=produce, arrange=arrange)

    def _joined(self, number: int, received: np.ndarray) -> np.ndarray:
        """The rows of the full value from what `_value` gave; without collectives."""
        part, places = self.own[number], self._places[number]
        assert part.source is not None
        shares = [received[place] for place in places]
        flat = shares[0] if len(shares) == 1 else np.concatenate(shares)
        return part.source.joined(flat, part.first, part.last)

    def finish(self) -> None:
        """Take part in what other ranks still need."""
        while self._num_run < len(self._rounds):
            self._run()

    @paddle.no_grad()
    def _run(self) -> None:
        number, self._num_run = self._num_run, self._num_run + 1
        parts = self._rounds[number]
        moving = [part for part in parts if part.source and not part.source.is_local]
        for dtype in dict.fromkeys(part.source.dtype for part in moving if part.source):
            self._exchange(number, [part for part in moving if part.source.dtype == dtype], dtype)
        if number < len(self.own) and number not in self._values:
            part = self.own[number]
            if part.source is None:
                self._values[number] = part.tensors[0].produce()
            else:
                self._take_local(number, part, part.source.spread.own())

    def _take_local(self, number: int, part: Part, value: Tensor) -> None:
        """Copy an own part of a value that this rank has."""
        assert part.source is not None
        flat = value.detach().reshape([-1])
        shares = [
            host_array(flat._slice(share.begin, share.end), copy=False)
            for share in part.source.shares(part.first, part.last)
        ]
        self._values[number] = shares[0] if len(shares) == 1 else np.concatenate(shares)
        self._places[number] = [slice(None)]

    def _exchange(self, number: int, parts: Sequence[Part], dtype: Any) -> None:
        """Bring the values of one part each of some ranks to these."""
        own_rank, size = self._ranks.rank, len(self._members)
        sent: list[list[Tensor]] = [[] for _ in range(size)]
        # Numbers of values from each rank, and those of the own part in order: rank, first, end.
        arriving, shares = [0] * size, list[tuple[int, int, int]]()
        for part in parts:
            assert part.source is not None
            flat = None
            for share in part.source.shares(part.first, part.last):
                holder = self._holder(share, part.writer)
                if holder == own_rank:
                    if flat is None:
                        flat = part.source.spread.own().detach().reshape([-1])
                    to = self._members.index(part.writer)
                    sent[to].append(flat._slice(share.begin, share.end))
                if part.writer == own_rank:
                    come, count = self._members.index(holder), share.end - share.begin
                    shares.append((come, arriving[come], arriving[come] + count))
                    arriving[come] += count
        # One value more for each rank, since Paddle's kernels fail on none.
        extra = paddle.zeros([1], dtype=dtype)
        leaving = [1 + sum(values.size for values in to) for to in sent]
        arriving = [1 + count for count in arriving]
        message = paddle.concat([values for to in sent for values in (*to, extra)])
        sent.clear()
        received = self._ranks.exchanged(message, leaving, arriving)
        if shares:
            starts = [0, *accumulate(arriving)]
            self._values[number] = host_array(received, copy=False)
            self._places[number] = [
                slice(starts[come] + first, starts[come] + end) for come, first, end in shares
            ]

    def _holder(self, share: Share, writer: int) -> int:
        """The rank that sends a share to the writer, which is the writer if it has it."""
        place = share[:3]
        if place not in self._holders:
            self._holders[place] = [
                rank
                for rank in self._members
                if all(
                    wanted is None or wanted == found
                    for wanted, found in zip(place, self._seats[rank].place, strict=True)
                )
            ]
        holders = self._holders[place]
        return writer if writer in holders else holders[writer % len(holders)]
