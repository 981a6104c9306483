"""The bridge: rows from encoder lanes to data lanes, and their gradients back.

Shapes: I items that this rank's encoder lane may encode, R rows of this data lane in a step, C the
width of a row with all sections.

Every rank knows the items of the lanes that it exchanges rows with, so counts are not sent, and all
ranks of a group skip a collective together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import Tensor

from paddle_vl.nn.transfer import rows_in_order
from paddle_vl.parallel.collectives import all_gathered_in_order, all_reduced, rows_of_items
from paddle_vl.parallel.colocated.encoder import ItemEncoder
from paddle_vl.parallel.colocated.grid import EncoderGroups
from paddle_vl.parallel.random_state import encoder_random
from paddle_vl.parallel.region_ops import assign_items


@dataclass
class Encoded:
    """This rank's part of an encoder forward pass.

    Attributes:
        output: rows of this rank's items `[M, C]`, in the graph; None without items.
        rows_of_share: in fan-in, row numbers of each encoder lane of this data lane.
        num_rows: `[lanes, micro-batches]`, of each served data lane.
    """

    output: Tensor | None
    rows_of_share: list[np.ndarray]
    num_rows: np.ndarray


class Bridge:
    """Runs the encoder and exchanges its rows. All methods are called by all ranks.

    Args:
        gradient_group: ranks that have parts of the gradients of this data lane's rows: its
            pipeline stages, or all of its ranks if mp ranks use different rows (sequence
            parallelism).

    Attributes:
        own_lane: index of this rank's data lane among those that its encoder lane serves.
    """

    def __init__(self, encoder: ItemEncoder, groups: EncoderGroups, gradient_group: Any):
        self.encoder, self.groups, self.gradient_group = encoder, groups, gradient_group
        grid, role = groups.grid, groups.role
        self.own_lane = role.served_lanes.index(role.place.lane)
        # Index of each rank's encoder lane among those of its data lane.
        members = {role.rank, *groups.lane_group.ranks}
        self._share = {rank: grid.role(rank).encoder_lane % grid.lanes_in for rank in members}

    def encode(self, lanes: Sequence[Sequence[Any]], trains: bool) -> Encoded:
        """Encode this rank's items; collective over the encoder's mp group alone.

        Args:
            lanes: the micro-batches of each served data lane.
            trains: whether a backward pass follows.
        """
        batches = [batch for lane in lanes for batch in lane]
        items_of_batch = [self.encoder.items(batch) for batch in batches]
        rows_I, costs_I = (np.concatenate(parts) for parts in zip(*items_of_batch, strict=True))
        num_rows = np.array([int(rows.sum()) for rows, _ in items_of_batch])
        assigned, output = assign_items(costs_I, self.groups.grid.lanes_in), None
        own = assigned[self._share[self.groups.role.rank]]
        if own.size:
            ends = np.cumsum([len(rows) for rows, _ in items_of_batch])
            parts = np.split(own, np.searchsorted(own, ends[:-1]))
            within = [part - begin for part, begin in zip(parts, [0, *ends[:-1]], strict=True)]
            with paddle.set_grad_enabled(trains), encoder_random():
                output = self.encoder.encode(batches, within)
        rows_of_share = [rows_of_items(share, rows_I) for share in assigned]
        return Encoded(output, rows_of_share, num_rows.reshape([len(lanes), -1]))

    @paddle.no_grad()
    def exchange(self, encoded: Encoded) -> Tensor:
        """`[R, C]`: the rows of this data lane, detached."""
        if encoded.output is None:
            width, dtype = sum(self.encoder.section_widths), self.encoder.parameters()[0].dtype
            sent = paddle.zeros([0, width], dtype=dtype)
        else:
            sent = encoded.output.detach()
        if self.groups.grid.kind == "fan-in":
            group = self.groups.bridge_group
            return all_gathered_in_order(sent, self._rows_of(encoded, group), group)
        start = int(encoded.num_rows[: self.own_lane].sum())
        return sent[start : start + int(encoded.num_rows[self.own_lane].sum())]

    def backward(self, encoded: Encoded, gradient_RC: Tensor) -> None:
        """Sum the gradients of this data lane's rows, and run the encoder's backward pass.

        Args:
            gradient_RC: this rank's part.
        """
        if not encoded.num_rows.any():
            return
        gradient = self._own_gradient(encoded, gradient_RC)
        if encoded.output is not None:
            output, encoded.output = encoded.output, None
            paddle.autograd.backward([output], [gradient])

    @paddle.no_grad()
    def _own_gradient(self, encoded: Encoded, gradient_RC: Tensor) -> Tensor:
        """Gradient of this encoder lane's rows, summed over the ranks that have parts of it."""
        grid, role, group = self.groups.grid, self.groups.role, self.gradient_group
        if grid.kind == "fan-in" and gradient_RC.shape[0]:
            needed = self._rows_of(encoded, group)
            padded = group.nranks * max(len(rows) for rows in needed)
            # An all-reduce sends each row twice.
            if padded <= 2 * gradient_RC.shape[0]:
                return _scattered(gradient_RC, needed, group)
        if gradient_RC.shape[0]:
            gradient_RC = all_reduced(gradient_RC, group)
        if grid.kind == "fan-in":
            return rows_in_order(gradient_RC, encoded.rows_of_share[self._share[role.rank]])
        if grid.kind == "equal":
            return gradient_RC
        group, ends = self.groups.bridge_group, encoded.num_rows.sum(axis=1).cumsum()
        rows_of_lane = np.split(np.arange(ends[-1]), ends[:-1])
        lanes = [role.served_lanes.index(grid.places[rank].lane) for rank in group.ranks]
        return all_gathered_in_order(gradient_RC, [rows_of_lane[lane] for lane in lanes], group)

    def _rows_of(self, encoded: Encoded, group: Any) -> list[np.ndarray]:
        """Row numbers of the encoder lane of each rank of a group of this data lane."""
        return [encoded.rows_of_share[self._share[rank]] for rank in group.ranks]


def _scattered(gradient_RC: Tensor, needed: Sequence[np.ndarray], group: Any) -> Tensor:
    """The rows that this rank of the group needs, summed over its ranks: one reduce-scatter."""
    longest, width = max(len(rows) for rows in needed), gradient_RC.shape[1]
    parts = []
    for rows in needed:
        padding = paddle.zeros([longest - len(rows), width], dtype=gradient_RC.dtype)
        parts += [rows_in_order(gradient_RC, rows), padding]
    own = paddle.empty([longest, width], dtype=gradient_RC.dtype)
    dist.stream.reduce_scatter(own, paddle.concat(parts), group=group)
    return own[: len(needed[group.rank])]
