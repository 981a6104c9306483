"""Layers of a colocated encoder: its linears divided over the encoder's mp group.

A layer of the encoder names the linears that tensor parallelism divides: `column_blocks`, by output
features in so many equal blocks (query, key and value of one matrix are three), and `row_linears`,
by input features. Everything else is replicated. The rows are replicated between these layers, and
gradients of replicated parameters are equal on all ranks of the group.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, cast

from paddle import Tensor, nn
from paddle.distributed.fleet.layers.mpu import mp_ops as fleet_ops
from paddle.distributed.fleet.meta_parallel import (
    ColumnParallelLinear,
    get_rng_state_tracker,
)
from paddle.nn.initializer import Normal

from paddle_vl.nn.linear import AdaptableLinear, linear
from paddle_vl.nn.parameter_table import ParameterTable, ParamSpec, Saved
from paddle_vl.nn.placement import Placement
from paddle_vl.parallel.collectives import all_reduced, gathered_arrays
from paddle_vl.parallel.colocated.grid import EncoderGroups
from paddle_vl.parallel.random_state import encoder_split_random
from paddle_vl.parallel.split_layers import Row

Layer = TypeVar("Layer", bound=nn.Layer)
# Fleet's layers draw initial values from this state, which it adds only for an mp_degree above 1.
_FLEETS_STATE = "model_parallel_rng"


class ColocatedLayers:
    """Builds and records the layers of an encoder that every rank has.

    The `tower_layers` of a `LayerFactory`.

    Args:
        mp_group: of the encoder; one rank leaves the layers as they are.
        saved: who writes the encoder's parameters.
    """

    own_random = staticmethod(encoder_split_random)

    def __init__(self, table: ParameterTable, mp_group: Any, saved: Saved):
        self.table, self.mp_group = table, mp_group
        self._replicated = ParamSpec(is_encoder=True, saved=saved)

    def tower(self, layer: Layer) -> Layer:
        """Divide the linears that its sublayers name, and record all parameters."""
        self.table.add(layer.parameters(), self._replicated)
        if self.mp_group.nranks > 1:
            for parent in layer.sublayers(include_self=True):
                for name, blocks in getattr(parent, "column_blocks", {}).items():
                    width = getattr(parent, name).weight.shape[1]
                    split = replace(self._replicated, blocks=(width // blocks,) * blocks)
                    column = self._divided(EncoderColumn, parent, name, gather_output=False)
                    self.table.add([column.weight], replace(split, split_axis=1))
                    self.table.add([column.bias], replace(split, split_axis=0))
                for name in getattr(parent, "row_linears", ()):
                    row = self._divided(Row, parent, name, input_is_parallel=True)
                    self.table.add([row.weight], replace(self._replicated, split_axis=0))
                    self.table.add([row.bias], self._replicated)
        return layer

    def over_ranks(self, x: Tensor) -> Tensor:
        """The sum over the encoder's mp group, without a gradient."""
        return all_reduced(x, self.mp_group)

    def _divided(
        self, kind: Callable[..., nn.Layer], parent: nn.Layer, name: str, **settings: Any
    ) -> Any:
        """A divided layer in place of a whole one, without values under `paddle.LazyGuard`."""
        tracker = get_rng_state_tracker()
        if _FLEETS_STATE not in tracker.states_:
            tracker.add(_FLEETS_STATE, 1)
        settings |= {"weight_attr": Normal(), "has_bias": True, "mp_group": self.mp_group}
        layer = kind(*getattr(parent, name).weight.shape, **settings)
        parent.add_sublayer(name, layer)
        return layer


def add_encoder(placement: Placement, groups: EncoderGroups) -> None:
    """Make a placement build its tower as a colocated encoder. Stage 0 writes its files."""
    table = placement.parameter_table
    elsewhere = Saved.JOINED if groups.saves_together else Saved.ELSEWHERE
    saved = Saved.HERE if groups.role.place.stage == 0 else elsewhere
    if groups.mp_group.nranks > 1:
        table.shard_encoder(groups.mp_group, gathered_arrays)
    placement.layers.tower_layers = ColocatedLayers(table, groups.mp_group, saved)


class EncoderColumn(AdaptableLinear, ColumnParallelLinear):
    """A column-parallel linear with bias; takes all rows, returns this rank's features."""

    def forward(self, x: Tensor) -> Tensor:
        x = cast(Tensor, fleet_ops._c_identity(x, group=self.model_parallel_group))
        return self.adapted(linear(x, self.weight, self.bias), x, bias=self.bias)
