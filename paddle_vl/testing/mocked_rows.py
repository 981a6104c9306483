"""The embedding of one sequence-parallel rank, without a group: full layers, and a rank's rows."""

from collections.abc import Sequence
from typing import NoReturn

from paddle import Tensor, nn

from paddle_vl.batch.rows import RowPart
from paddle_vl.nn.linear import Columns
from paddle_vl.nn.parameter_table import CheckpointRanks, ParameterTable
from paddle_vl.nn.placement import LayerFactory, Placement, RegionOps, StageLayers


class MockedRows(RegionOps):
    """Token rows of one of several ranks. Operations that need the other ranks' rows are refused.

    Args:
        rank, size: this rank and the size of its mp group.
    """

    def __init__(self, rank: int, size: int):
        super().__init__()
        self._part = RowPart(rank, size)

    @property
    def row_part(self) -> RowPart:
        return self._part

    def enter_rows(self, x_TD: Tensor) -> Tensor:
        """This rank's rows.

        Raises:
            ValueError: the ranks do not divide the rows.
        """
        return self._part.of_rows(x_TD)

    def leave_rows(self, x_TD: Tensor, num_rows: int) -> Tensor:
        if self._part.size == 1:
            return x_TD
        _refuse("leave_rows")

    def enter_columns(self, x_TD: Tensor, num_rows: int | None = None) -> Tensor:
        if self._part.size == 1:
            return x_TD
        _refuse("enter_columns")


class _Layers(LayerFactory):
    """Full layers. Fused projections would take the rows of one rank without `enter_columns`."""

    def projections(
        self,
        in_features: int,
        columns: Sequence[Columns],
        init_std: float = 0.02,
        splits: bool = True,
    ) -> nn.Layer:
        return self.separate_projections(in_features, columns, init_std)


class MockedSequenceParallel(Placement):
    """One rank of an mp group with full layers, for tests of an embedding.

    Outputs of the embedding are exactly this rank's rows of the full ones, since every parameter is
    there. A decoder needs the rows of all ranks: use `run_ranks`.

    Raises:
        ValueError: the rank is outside of the group.
    """

    def __init__(self, rank: int, size: int):
        ops, stage_layers = MockedRows(rank, size), StageLayers()
        ops.row_part.bounds(0)
        layers = _Layers(ParameterTable(), ops, stage_layers)
        super().__init__(layers, ops, stage_layers, CheckpointRanks())


def _refuse(operation: str) -> NoReturn:
    raise RuntimeError(
        f"{operation} needs the rows of all ranks, and MockedSequenceParallel has one rank's: "
        "build the model with a placement of paddle_vl.testing.run_ranks"
    )
