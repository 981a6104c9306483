"""Table of this rank's parameters: how each is sharded or replicated, one `ParamSpec` each; and the
ranks that have all shards between them, and save them together."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.nn.linear import column_slices, fused_columns
from paddle_vl.nn.transfer import host_array

# All-gather of tensors of equal size over a group, in the group's order.
AllGather = Callable[[Tensor, Any], list[np.ndarray]]
# Slices along some dims of a full value, in order, that a shard is made of.
Slices = Mapping[int, Sequence[slice]]


class Tie(Enum):
    """Whether embedding and head share this weight across pipeline stages."""

    NONE = "no other stage has it"
    OWNER = "the last stage has a copy; the gradients of both are summed"
    COPY = "as OWNER, but this is the copy: it is neither counted nor saved"


class Saved(Enum):
    """Whether this rank's pipeline stage writes a parameter and its optimizer state to files."""

    HERE = "it does"
    JOINED = "another stage does; this rank sends it the values that it lacks"
    ELSEWHERE = "another stage does, which has all values"


@dataclass(frozen=True)
class ParamSpec:
    """How a parameter is sharded and reduced, for training, sharding and checkpoints.

    Attributes:
        split_axis: dim that is sharded over the tensor-parallel (mp) group; None if replicated.
        blocks: full widths along `split_axis` of fused sub-matrices, such as (gate, up), each of
            which is sharded by itself; empty for a single matrix.
        has_partial_gradient: the parameter is replicated, and its gradients must be all-reduced
            over the mp group.
        has_own_inputs: each mp rank's layer gets different rows, so that its dropout draws from the
            rank's own generator.
        tie: see `Tie`.
        is_expert: dim 0 is sharded over the expert-parallel (ep) group.
        is_table: dim 0 is sharded over the ranks of a stage that have all of its parameters between
            them, whatever else is sharded; see `paddle_vl.parallel.row_table`.
        is_encoder: of an encoder that every rank has (`schedule: colocated`); its mp group is the
            encoder's own, and so are the ranks that its gradients are summed over.
        saved: see `Saved`.
    """

    split_axis: int | None = None
    blocks: tuple[int, ...] = ()
    has_partial_gradient: bool = False
    has_own_inputs: bool = False
    tie: Tie = Tie.NONE
    is_expert: bool = False
    is_table: bool = False
    is_encoder: bool = False
    saved: Saved = Saved.HERE

    @property
    def joins_saving(self) -> bool:
        """Whether this rank takes part in saving it, as a writer or as a sender."""
        return self.tie is not Tie.COPY and self.saved is not Saved.ELSEWHERE


REPLICATED = ParamSpec()


class ParameterTable:
    """The `ParamSpec` of every parameter of a model, and the shards that follow from it.

    The layer factory adds entries while it builds layers; a model adds the rest of its parameters
    at the end of its constructor. Parameters are found by identity: a copy has no entry.

    Args:
        mp_group, ep_group: groups with `rank` and `nranks`; None for no such sharding.
        all_gather: required with a group.
        table_group: as these, of the rows of tables.
    """

    def __init__(
        self,
        mp_group: Any = None,
        ep_group: Any = None,
        all_gather: AllGather | None = None,
        table_group: Any = None,
    ):
        self._mp_group, self._ep_group, self._table_group = mp_group, ep_group, table_group
        self._all_gather = all_gather or _refuse
        # Group over which parameters of a colocated encoder are sharded; None for no sharding.
        self._encoder_group: Any = None
        self._shards_tables = False
        # Groups of ranks that need the same rows of a parameter's file, whether mp ranks need
        # different ones or not; and the all-gather of equally many rows over a group.
        self.readers: Callable[[ParamSpec, bool], Sequence[Any]] = lambda spec, is_split: ()
        self.gather_rows: Callable[[np.ndarray, Any], np.ndarray] = _refuse
        # Weak: a weight replaced by `nn.linear.separate` must be freed.
        self._entries: dict[int, tuple[weakref.ref[Tensor], ParamSpec]] = {}

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are sharded over ranks."""
        groups = (self._mp_group, self._ep_group, self._encoder_group)
        return self._shards_tables or any(group is not None for group in groups)

    def shard_encoder(self, mp_group: Any, all_gather: AllGather) -> None:
        """Set the group over which parameters of a colocated encoder are sharded."""
        self._encoder_group, self._all_gather = mp_group, all_gather

    def add(self, parameters: Iterable[Tensor], spec: ParamSpec = REPLICATED) -> None:
        """Set or replace the spec of parameters."""
        for parameter in parameters:
            self._entries[id(parameter)] = (weakref.ref(parameter), spec)
            self._shards_tables |= spec.is_table and self._table_group is not None

    def add_replicated(self, parameters: Iterable[Tensor]) -> None:
        """Mark parameters without an entry as replicated, with equal gradients on all mp ranks."""
        self.add(parameter for parameter in parameters if parameter not in self)

    def __contains__(self, parameter: Tensor) -> bool:
        entry = self._entries.get(id(parameter))
        return entry is not None and entry[0]() is parameter

    def __getitem__(self, parameter: Tensor) -> ParamSpec:
        """The spec of a parameter.

        Raises:
            LookupError: it has none.
        """
        if parameter not in self:
            raise LookupError(
                f"parameter {parameter.name} {list(parameter.shape)} has no ParamSpec: it is a "
                "copy, or was made after the model; look up the model's own parameter, or add it "
                "to placement.parameter_table"
            )
        return self._entries[id(parameter)][1]

    def with_specs(self, parameters: Iterable[Tensor]) -> list[tuple[Tensor, ParamSpec]]:
        """Parameters with their specs."""
        return [(parameter, self[parameter]) for parameter in parameters]

    def full_shape(self, parameter: Tensor) -> tuple[int, ...]:
        """Shape of the parameter in the full model."""
        spec, shape = self[parameter], list(parameter.shape)
        group = self._group_of(spec)
        if group is not None and spec.split_axis is not None:
            shape[spec.split_axis] *= group.nranks
        if (owners := self._owners(spec)) is not None:
            shape[0] *= owners.nranks
        return tuple(shape)

    def own_shard(self, parameter: Tensor, full: np.ndarray) -> np.ndarray:
        """This rank's shard of an array of the parameter's full shape; it may share its memory."""
        return taken(full, self.own_slices(parameter, full.shape))

    def own_slices(
        self, parameter: Tensor, shape: Sequence[int], widths: Sequence[int] = ()
    ) -> Slices:
        """What this rank has of a full value of this shape.

        Args:
            widths: in place of the `blocks` of the parameter's spec, for one of the linears that
                are fused in it.
        """
        spec, slices = self[parameter], dict[int, list[slice]]()
        group, axis = self._group_of(spec), spec.split_axis
        if group is not None and axis is not None:
            widths = widths or spec.blocks or (shape[axis],)
            begins = accumulate(widths, initial=0)
            slices[axis] = [_share(*each, group) for each in zip(begins, widths, strict=False)]
        if (owners := self._owners(spec)) is not None:
            assert axis != 0, "an expert, or a row of a table, is on one rank of each group"
            slices[0] = [_share(0, shape[0], owners)]
        return slices

    def column_slices(self, parameter: Tensor) -> list[slice]:
        """Columns of each linear of a fused parameter in this rank's shard."""
        ranks = 1 if self._mp_group is None else self._mp_group.nranks
        return column_slices([one.width // ranks for one in fused_columns(parameter)])

    def full_value(self, parameter: Tensor, value: Tensor | None = None) -> np.ndarray:
        """The full value of a parameter; collective where the parameter is sharded.

        Args:
            value: another tensor of the parameter's shape on this rank, such as a moment.
        """
        spec, value = self[parameter], parameter if value is None else value
        group = self._group_of(spec)
        if group is None or spec.split_axis is None:
            full = host_array(value)
        else:
            full = joined_shards(spec, self._all_gather(value.detach(), group))
        if (owners := self._owners(spec)) is None:
            return full
        return np.concatenate(self._all_gather(paddle.to_tensor(full), owners))

    def num_shards(self, parameter: Tensor) -> tuple[int, int]:
        """Numbers of mp ranks that have different shards of the parameter, and of the ranks that
        have different experts or rows of a table."""
        spec = self[parameter]
        group = None if spec.split_axis is None else self._group_of(spec)
        return getattr(group, "nranks", 1), getattr(self._owners(spec), "nranks", 1)

    def _group_of(self, spec: ParamSpec) -> Any:
        """The mp group over which a parameter is sharded; None without one."""
        return self._encoder_group if spec.is_encoder else self._mp_group

    def _owners(self, spec: ParamSpec) -> Any:
        """The group whose ranks have different experts, or rows of a table; None without one."""
        if spec.is_table:
            return self._table_group
        return self._ep_group if spec.is_expert else None


class Seat(NamedTuple):
    """What one of the ranks with the same layers has of their parameters.

    Attributes:
        group: number of the ranks that have all of these between them and exchange values.
        ep, mp, sharding, expert_sharding, table: coordinates, which say what shards it has.
    """

    group: int
    ep: int = 0
    mp: int = 0
    sharding: int = 0
    expert_sharding: int = 0
    table: int = 0


@dataclass(frozen=True)
class CheckpointRanks:
    """The ranks that write one model together, and this rank's place among them.

    Attributes:
        rank, size: index of this rank among the ranks with the same layers, and their number.
        stage: its pipeline stage.
        seats: of the ranks with the same layers, in order; none if each has all parameters of them.
        of_stages: all ranks, in order, if those of several stages have shards of an encoder.
        writers: of all ranks, the numbers of those of the first stage.
    """

    rank: int = 0
    size: int = 1
    stage: int = 0
    seats: Sequence[Seat] = field(default=(), repr=False)
    of_stages: "CheckpointRanks | None" = field(default=None, repr=False)
    writers: Sequence[int] = field(default=(), repr=False)

    @property
    def is_first(self) -> bool:
        """Whether this rank writes the files that only one rank writes."""
        return self.rank == 0 and self.stage == 0

    def exchanged(self, message: Tensor, leaving: list[int], arriving: list[int]) -> Tensor:
        """All-to-all of a flat tensor over this rank's group of seats.

        Args:
            leaving, arriving: numbers of values to and from each rank of the group.
        """
        raise AssertionError("each rank has all of the parameters")

    def wait(self) -> None:
        """Barrier of all ranks that write the model."""

    def gather_stages(self, value: Any) -> list[Any]:
        """The JSON values of all pipeline stages, in order; collective."""
        return [value]


class Spread(NamedTuple):
    """Where the values of a parameter's shape are.

    Attributes:
        spans: first value and end of each sharding rank's share, flat; None if each has all.
        own: this rank's share, flat or not, whose padding is behind the span; not collective.
        rank: this rank's number among the spans.
    """

    spans: Sequence[tuple[int, int]] | None
    own: Callable[[], Tensor]
    rank: int = 0


def joined_shards(spec: ParamSpec, shards: Sequence[np.ndarray]) -> np.ndarray:
    """The full value from the shards of all mp ranks, in order; the spec has a `split_axis`."""
    axis = spec.split_axis
    assert axis is not None, spec
    cuts = _cuts(spec, len(shards))
    blocks = [np.split(shard, cuts, axis=axis) for shard in shards]
    return np.concatenate([of_rank[b] for b in range(len(cuts) + 1) for of_rank in blocks], axis)


def taken(full: np.ndarray, slices: Slices) -> np.ndarray:
    """Slices of a full value side by side; it may share its memory."""
    for axis, of_axis in slices.items():
        parts = [full[(slice(None),) * axis + (each,)] for each in of_axis]
        full = parts[0] if len(parts) == 1 else np.concatenate(parts, axis)
    return full


def _share(begin: int, width: int, group: Any) -> slice:
    """This rank's part of `width` values from `begin` on."""
    width //= group.nranks
    return slice(begin + group.rank * width, begin + (group.rank + 1) * width)


def _refuse(value: Any, group: Any) -> Any:
    raise RuntimeError("a sharded ParameterTable needs an all_gather to give full values")


def _cuts(spec: ParamSpec, ranks: int = 1) -> list[int]:
    """Boundaries between blocks in the full value, or in one of `ranks` shards."""
    return np.cumsum([width // ranks for width in spec.blocks])[:-1].tolist()
