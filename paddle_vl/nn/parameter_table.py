"""How the parameters on this rank relate to those of the full model: one `ParamSpec` each."""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.nn.linear import column_slices, fused_columns

# All-gather of equally large tensors over a group: the values of every rank, in the group's order.
AllGather = Callable[[Tensor, Any], list[np.ndarray]]


class Tie(Enum):
    """Whether embedding and head share this weight across pipeline stages."""

    NONE = "no other stage has it"
    OWNER = "the last stage has a copy; the gradients of both are summed"
    COPY = "as OWNER, but this is the copy: it is neither counted nor saved"


@dataclass(frozen=True)
class ParamSpec:
    """What training, sharding and checkpoints must know of a parameter besides its value.

    Attributes:
        split_axis: dim that is sharded over the tensor-parallel (mp) group; None if replicated.
        blocks: full widths along `split_axis` of fused sub-matrices, such as (gate, up), each of
            which is sharded by itself; empty for a single matrix.
        has_partial_gradient: backward gives one term of a sum over the mp group. The parameter is
            replicated; its gradients are all-reduced before they are used.
        has_own_inputs: the layer sees other rows here than on the other mp ranks, so that its
            dropout draws from the rank's own generator.
        tie: see `Tie`.
        is_expert: dim 0 is sharded over the expert-parallel (ep) group.
    """

    split_axis: int | None = None
    blocks: tuple[int, ...] = ()
    has_partial_gradient: bool = False
    has_own_inputs: bool = False
    tie: Tie = Tie.NONE
    is_expert: bool = False


REPLICATED = ParamSpec()


class ParameterTable:
    """The `ParamSpec` of every parameter of a model, and the shards that follow from it.

    The layer factory adds entries while it builds layers; a model adds the rest of its parameters
    at the end of its constructor. Parameters are found by identity: a copy has no entry.

    Args:
        mp_group, ep_group: groups with `rank` and `nranks`; None where nothing is sharded over one.
        all_gather: needed where there is a group.
    """

    def __init__(
        self,
        mp_group: Any = None,
        ep_group: Any = None,
        all_gather: AllGather | None = None,
    ):
        self._mp_group, self._ep_group = mp_group, ep_group
        self._all_gather = all_gather or _refuse
        # Weak: a weight that is replaced (`nn.projections.separate`) must give up its memory.
        self._entries: dict[int, tuple[weakref.ref[Tensor], ParamSpec]] = {}

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are sharded over ranks."""
        return self._mp_group is not None or self._ep_group is not None

    def add(self, parameters: Iterable[Tensor], spec: ParamSpec = REPLICATED) -> None:
        """Set the spec of parameters; it replaces an earlier one."""
        for parameter in parameters:
            # Values of a static graph are neither trained nor saved.
            if isinstance(parameter, Tensor):
                self._entries[id(parameter)] = (weakref.ref(parameter), spec)

    def add_replicated(self, parameters: Iterable[Tensor]) -> None:
        """Declare that those without an entry are the same on every mp rank, gradients too."""
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
        if self._mp_group is not None and spec.split_axis is not None:
            shape[spec.split_axis] *= self._mp_group.nranks
        if self._ep_group is not None and spec.is_expert:
            shape[0] *= self._ep_group.nranks
        return tuple(shape)

    def own_shard(self, parameter: Tensor, full: np.ndarray) -> np.ndarray:
        """This rank's shard of an array of the parameter's full shape."""
        spec = self[parameter]
        if self._ep_group is not None and spec.is_expert:
            full = np.split(full, self._ep_group.nranks)[self._ep_group.rank]
        if self._mp_group is None or spec.split_axis is None:
            return full
        ranks, rank, axis = self._mp_group.nranks, self._mp_group.rank, spec.split_axis
        blocks = np.split(full, _cuts(spec), axis=axis)
        return np.concatenate([np.split(b, ranks, axis=axis)[rank] for b in blocks], axis=axis)

    def own_columns(self, full: np.ndarray) -> np.ndarray:
        """This rank's shard of the full value of one of the linears of a fused parameter."""
        if self._mp_group is None:
            return full
        return np.split(full, self._mp_group.nranks, axis=1)[self._mp_group.rank]

    def column_slices(self, parameter: Tensor) -> list[slice]:
        """Where the linears of a fused parameter lie in this rank's shard."""
        ranks = 1 if self._mp_group is None else self._mp_group.nranks
        return column_slices([one.width // ranks for one in fused_columns(parameter)])

    def full_value(
        self, parameter: Tensor, value: Tensor | None = None, copy: bool = True
    ) -> np.ndarray:
        """The full value of a parameter; collective where the parameter is sharded.

        Args:
            value: in place of the parameter's own value, one of its shape on this rank, such as a
                moment.
            copy: False if nothing changes the tensor before the array is used up: the array may
                then be the tensor's own memory.
        """
        spec, value = self[parameter], parameter if value is None else value
        if self._mp_group is None or spec.split_axis is None:
            full = host_array(value, copy)
        else:
            shards = self._all_gather(value.detach(), self._mp_group)
            cuts, axis = _cuts(spec, len(shards)), spec.split_axis
            blocks = [np.split(shard, cuts, axis=axis) for shard in shards]
            full = np.concatenate(
                [of_rank[b] for b in range(len(cuts) + 1) for of_rank in blocks], axis
            )
        if self._ep_group is None or not spec.is_expert:
            return full
        return np.concatenate(self._all_gather(paddle.to_tensor(full), self._ep_group))


def _refuse(value: Tensor, group: Any) -> list[np.ndarray]:
    raise RuntimeError("a sharded ParameterTable needs an all_gather to give full values")


def _cuts(spec: ParamSpec, ranks: int = 1) -> list[int]:
    """Where blocks end, but for the last, in a shard of so many ranks, or in the full value."""
    return np.cumsum([width // ranks for width in spec.blocks])[:-1].tolist()


def host_array(tensor: Tensor, copy: bool = True) -> np.ndarray:
    """A tensor's values on the host; bfloat16 as its bits (uint16).

    Args:
        copy: False returns the memory of a tensor that is on the host, bfloat16 apart. Paddle's
            copy goes to new memory, which costs more than the copying.
    """
    # A view of bfloat16 as int16 needs stride kernels.
    is_on_host = tensor.place.is_cpu_place() and tensor.dtype != paddle.bfloat16
    if copy or not is_on_host or not tensor.size:
        return tensor.numpy()
    return np.from_dlpack(tensor.detach())
