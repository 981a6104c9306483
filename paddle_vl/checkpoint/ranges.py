"""Which rank writes which bytes of a model's files, and the exchange that brings it their values.

The bytes of a stage's tensors, in the order of the files, are divided equally over the N ranks that
have its layers. A boundary falls between tensors, or between rows of one whose rows stay rows in
its file. So each rank copies 1/N of the values to host memory and writes 1/N of the bytes, which
are one run of bytes in each file.

Values of other mp, ep or sharding ranks come by all-to-alls, in which each rank sends and receives
about 1/N of all values; of a colocated encoder ranks of other stages send theirs too. Round k
brings the k-th part of every rank, at most `PART_BYTES` each where rows can be divided. All ranks
compute the same plan from the specs of the parameters and the seats of the ranks.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, groupby, zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.checkpoint.safetensors_io import TensorToWrite
from paddle_vl.nn.linear import whole_slices
from paddle_vl.nn.parameter_table import CheckpointRanks, ParameterTable, Seat, joined_shards
from paddle_vl.nn.transfer import host_array

if TYPE_CHECKING:
    from paddle_vl.nn.master_weights import ParameterStore

PART_BYTES = 1 << 28
# Coordinates of the ranks that have a share, as of a `Seat`; None: any.
Place = tuple[int | None, int | None, int | None, int | None, int | None]


class ShardedValue:
    """A parameter, or a `value` that is sharded like what is updated in its place, on all ranks.

    Attributes:
        dtype: of the values.
        rows: of the full value.
        columns: of each linear of a fused parameter in the full value.
    """

    def __init__(
        self,
        table: ParameterTable,
        parameter: Tensor,
        store: "ParameterStore | None",
        value: Tensor | None = None,
    ):
        self._spec, self._shape = table[parameter], tuple(parameter.shape)
        self._mp, self._owners = table.num_shards(parameter)
        self._spans, self._own = None, parameter.detach
        if store is not None:
            self._spans, self._own, _ = store.spread(parameter, value)
        self.dtype = parameter.dtype if value is None else value.dtype
        self.rows = math.prod(table.full_shape(parameter)[:1])
        self.columns = whole_slices(parameter)

    @property
    def is_local(self) -> bool:
        """Whether each rank has the full value."""
        return self._mp == self._owners == 1 and self._spans is None

    @property
    def crosses_stages(self) -> bool:
        """Whether ranks of several stages have shares."""
        return self._spec.is_encoder and not self.is_local

    @property
    def divides(self) -> bool:
        """Whether any rows of the full value may be written by themselves."""
        return bool(self._shape) and not (self._spec.split_axis == 0 and len(self._spec.blocks) > 1)

    def flat(self) -> Tensor:
        """The values that this rank has, flat, on the device."""
        return self._own().detach().reshape([-1])

    def shares(self, first: int, last: int) -> Iterator[tuple[Place, int, int]]:
        """Who has rows `first` to `last`, and where in what it has; in the order of `joined`."""
        for owner, mp, begin, end in self._shards(first, last):
            spans = [(0, end)] if self._spans is None else self._spans
            for rank, (start, stop) in enumerate(spans):
                low, high = max(begin, start), min(end, stop)
                if low < high:
                    shard = None if self._spans is None else rank
                    of_matrix = mp if self._mp > 1 else None
                    place: Place = (None, of_matrix, shard, None, None)
                    if self._owners > 1 and self._spec.is_table:
                        place = (None, None, None, None, owner)
                    elif self._owners > 1:
                        # Experts of expert parallelism are sharded over ranks of their own.
                        place = (owner, of_matrix, None, shard, None)
                    yield place, low - start, high - start

    def joined(self, flat: np.ndarray, first: int, last: int) -> np.ndarray:
        """Rows `first` to `last` of the full value from the values of all shares in order."""
        by_owner, at = dict[int, list[np.ndarray]](), 0
        for owner, _, begin, end in self._shards(first, last):
            shard = flat[at : at + end - begin].reshape([-1, *self._shape[1:]])
            by_owner.setdefault(owner, []).append(shard)
            at += end - begin
        parts = [s[0] if len(s) == 1 else joined_shards(self._spec, s) for s in by_owner.values()]
        full = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return full if self._shape else full.reshape([])

    def _shards(self, first: int, last: int) -> Iterator[tuple[int, int, int, int]]:
        """Numbers (owner, mp) of the shards with these rows, and first value and end of the rows in
        the flat shard."""
        rows, width = math.prod(self._shape[:1]), math.prod(self._shape[1:])
        for owner in range(self._owners):
            for mp in range(self._mp):
                start = (owner * self._mp + mp if self._spec.split_axis == 0 else owner) * rows
                begin, end = (min(max(row - start, 0), rows) for row in (first, last))
                if begin < end:
                    yield owner, mp, begin * width, end * width


class RowRange:
    """Some rows of a value, which are a tensor of their own in a file; what is written of a
    `ShardedValue`."""

    def __init__(self, whole: ShardedValue, first: int, last: int):
        self._whole, self._first, self.rows = whole, first, last - first
        self.dtype, self.columns = whole.dtype, whole.columns
        self.is_local, self.crosses_stages = whole.is_local, whole.crosses_stages
        self.divides, self.flat = whole.divides, whole.flat

    def shares(self, first: int, last: int) -> Iterator[tuple[Place, int, int]]:
        return self._whole.shares(self._first + first, self._first + last)

    def joined(self, flat: np.ndarray, first: int, last: int) -> np.ndarray:
        return self._whole.joined(flat, self._first + first, self._first + last)


def rows_of(tensor: TensorToWrite, name: str, first: int, last: int) -> TensorToWrite:
    """Rows of a tensor with a source, as a tensor with another name."""
    source, shape = RowRange(tensor.source, first, last), (last - first, *tensor.shape[1:])
    return tensor._replace(name=name, shape=shape, source=source)


class Part(NamedTuple):
    """Rows of the tensors of one source, or a tensor without one, that a rank writes."""

    tensors: Sequence[TensorToWrite]
    first: int
    last: int
    writer: int

    @property
    def source(self) -> ShardedValue | RowRange | None:
        return self.tensors[0].source

    @property
    def crosses_stages(self) -> bool:
        return self.source is not None and self.source.crosses_stages


def units(tensors: Iterable[TensorToWrite]) -> list[list[TensorToWrite]]:
    """The tensors of each source, and each of the others, in order."""
    return [list(found) for _, found in groupby(tensors, lambda each: id(each.source or each))]


def divided(tensors: Sequence[TensorToWrite], size: int) -> list[Part]:
    """Parts of these tensors for so many ranks, in order, of about equal bytes per rank."""
    total, done, parts = max(sum(tensor.num_bytes for tensor in tensors), 1), 0, []
    for unit in units(tensors):
        source, num_bytes = unit[0].source, sum(tensor.num_bytes for tensor in unit)
        rows = 1 if source is None else source.rows
        # Rows of the linears of a fused parameter lie apart in the file.
        is_divided = size > 1 and len(unit) == 1 and unit[0].keeps_rows and num_bytes > 0
        if is_divided and source is not None and source.divides:
            first, width = 0, num_bytes // rows
            while first < rows:
                writer = min(done * size // total, size - 1)
                left = -(-total * (writer + 1) // size) - done
                last = min(first + max(min(left, PART_BYTES) // width, 1), rows)
                parts.append(Part(unit, first, last, writer))
                done += (last - first) * width
                first = last
        else:
            # To the rank that has most of it in an exact division.
            writer = min((2 * done + num_bytes) * size // (2 * total), size - 1)
            parts.append(Part(unit, 0, rows, writer))
            done += num_bytes
    return parts


class Exchange:
    """The values of the parts that this rank writes; all ranks take part.

    Args:
        parts: of all writers, the same on all ranks.
        ranks: of a stage; or of all stages, for parts that cross them.
        from_stages: has the values of own parts that cross stages.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        ranks: CheckpointRanks,
        from_stages: "Exchange | None" = None,
    ):
        self._ranks, seats = ranks, ranks.seats or [Seat(rank) for rank in range(ranks.size)]
        self._seats = {n: s for n, s in enumerate(seats) if s.group == seats[ranks.rank].group}
        self._members, self._holders = list(self._seats), dict[Place, list[int]]()
        self._own = [part for part in parts if part.writer == ranks.rank]
        of_ranks = [[part for part in parts if part.writer == rank] for rank in self._members]
        self._rounds = [list(filter(None, each)) for each in zip_longest(*of_ranks)]
        self._num_run = 0
        # Of own parts: received values, places of the shares in them, and rows of the full value.
        self._values, self._full = dict[int, np.ndarray](), dict[int, np.ndarray]()
        self._places: dict[int, list[slice]] = {}
        self._moves_across = from_stages is None
        crossing = [number for number, part in enumerate(self._own) if part.crosses_stages]
        if from_stages is not None:
            from_stages.finish()
            for number, place in enumerate(crossing):
                self._values[place] = from_stages._values.pop(number)
                self._places[place] = from_stages._places.pop(number)

    def own_tensors(self) -> Iterator[TensorToWrite]:
        """What this rank writes, in order: tensors, or rows of them, with their offset from the
        first byte of the tensor. Producing them is collective, arranging is not."""
        for number, part in enumerate(self._own):
            for tensor in part.tensors:
                shape, offset, produce = tensor.shape, 0, partial(np.empty, 0)
                if tensor is part.tensors[0]:
                    produce = partial(self._value, number)
                if part.source is not None and part.last - part.first < part.source.rows:
                    offset = part.first * (tensor.num_bytes // shape[0])
                    shape = (part.last - part.first, *shape[1:])
                arrange = partial(self._arranged, number, tensor)
                yield tensor._replace(shape=shape, offset=offset, produce=produce, arrange=arrange)

    def finish(self) -> None:
        """Take part in what other ranks still need."""
        while self._num_run < len(self._rounds):
            self._run()

    def _value(self, number: int) -> np.ndarray:
        """What this rank gets for an own part, on the host, once; it may share the memory of a
        parameter."""
        while self._num_run <= number:
            self._run()
        return self._values.pop(number)

    def _arranged(self, number: int, tensor: TensorToWrite, value: np.ndarray) -> np.ndarray:
        """The tensor in its file's layout from what `_value` gave."""
        part = self._own[number]
        if part.source is None:
            return tensor.arrange(value)
        # The first of the linears of a fused parameter has the values of all of them.
        if tensor is part.tensors[0]:
            shares = [value[place] for place in self._places[number]]
            flat = shares[0] if len(shares) == 1 else np.concatenate(shares)
            self._full[number] = part.source.joined(flat, part.first, part.last)
        full = self._full[number]
        if tensor is part.tensors[-1]:
            del self._full[number]
        return tensor.arrange(
            full if tensor.block is None else full[:, part.source.columns[tensor.block]]
        )

    @paddle.no_grad()
    def _run(self) -> None:
        parts, number = self._rounds[self._num_run], self._num_run
        self._num_run += 1
        moving = [(part, part.source) for part in parts if part.source is not None]
        moving = [
            (part, source)
            for part, source in moving
            if not source.is_local and (self._moves_across or not source.crosses_stages)
        ]
        for dtype in dict.fromkeys(source.dtype for _, source in moving):
            self._exchange(number, [each for each in moving if each[1].dtype == dtype], dtype)
        if number in self._values or number >= len(self._own):
            return
        part = self._own[number]
        if part.source is None:
            self._values[number] = part.tensors[0].produce()
        else:
            ((_, begin, end),) = part.source.shares(part.first, part.last)
            self._values[number] = host_array(part.source.flat()._slice(begin, end), copy=False)
            self._places[number] = [slice(None)]

    def _exchange(
        self, number: int, parts: Sequence[tuple[Part, ShardedValue | RowRange]], dtype: Any
    ) -> None:
        """Bring the values of one part each of some ranks to these."""
        own_rank, index = self._ranks.rank, self._members.index
        # One more value for each rank, since Paddle's kernels fail on none.
        extra = paddle.zeros([1], dtype=dtype)
        sent, arriving = [[extra] for _ in self._members], [1] * len(self._members)
        # Of the own part in order: rank, first value from it, and end.
        shares: list[tuple[int, int, int]] = []
        for part, source in parts:
            flat = None
            for place, begin, end in source.shares(part.first, part.last):
                holder = self._holder(place, part.writer)
                if holder == own_rank:
                    flat = source.flat() if flat is None else flat
                    sent[index(part.writer)].append(flat._slice(begin, end))
                if part.writer == own_rank:
                    come = index(holder)
                    shares.append((come, arriving[come], arriving[come] + end - begin))
                    arriving[come] += end - begin
        leaving = [sum(values.size for values in to) for to in sent]
        message = paddle.concat([values for to in sent for values in to])
        received = self._ranks.exchanged(message, leaving, arriving)
        if shares:
            starts = [0, *accumulate(arriving)]
            self._values[number] = host_array(received, copy=False)
            self._places[number] = [
                slice(starts[come] + first, starts[come] + end) for come, first, end in shares
            ]

    def _holder(self, place: Place, writer: int) -> int:
        """The rank that sends a share to the writer, which is the writer if it has it."""
        if place not in self._holders:
            self._holders[place] = [
                rank
                for rank, seat in self._seats.items()
                if all(want in (None, has) for want, has in zip(place, seat[1:], strict=True))
            ]
        holders = self._holders[place]
        return writer if writer in holders else holders[writer % len(holders)]
