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

from paddle_vl.nn.operations import rows_in_order
from paddle_vl.parallel.collectives import all_gathered, all_reduced
from paddle_vl.parallel.colocated.encoder import ItemEncoder, Items
from paddle_vl.parallel.colocated.grid import EncoderGroups
from paddle_vl.parallel.random_state import encoder_random
from paddle_vl.parallel.region_ops import assign_items


@dataclass
class Encoded:
    """This rank's part of an encoder forward pass.

    Attributes:
        output: rows of this rank's items `[M, C]`, in the graph; None without items.
        rows_of_share: in fan-in, row numbers of each encoder lane of this data lane.
        rows_of_lanes: number of rows of each served data lane, in their order.
        rows_of_batch: rows of each micro-batch of this data lane.
    """

    output: Tensor | None
    rows_of_share: list[np.ndarray]
    rows_of_lanes: list[int]
    rows_of_batch: list[int]


class Bridge:
    """Runs the encoder and exchanges its rows. All methods are called by all ranks.

    Args:
        gradient_group: ranks that have parts of the gradients of this data lane's rows: its
            pipeline stages, or all of its ranks if mp ranks use different rows (sequence
            parallelism).
    """

    def __init__(self, encoder: ItemEncoder, groups: EncoderGroups, gradient_group: Any):
        self.encoder, self.groups, self.gradient_group = encoder, groups, gradient_group
        self._width = sum(encoder.section_widths)
        self._dtype = encoder.parameters()[0].dtype
        # Index of each rank's encoder lane among those of its data lane.
        grid, members = groups.grid, {groups.role.rank, *groups.lane_group.ranks}
        self._share = {rank: grid.role(rank).encoder_lane % grid.lanes_in for rank in members}

    def encode(self, lanes: Sequence[Sequence[Any]], trains: bool) -> Encoded:
        """Encode this rank's items; collective over the encoder's mp group alone.

        Args:
            lanes: the micro-batches of each served data lane.
            trains: whether a backward pass follows.
        """
        grid, role = self.groups.grid, self.groups.role
        batches = [batch for lane in lanes for batch in lane]
        items_of_batch = [Items(*self.encoder.items(batch)) for batch in batches]
        items = Items(*(np.concatenate(parts) for parts in zip(*items_of_batch, strict=True)))
        counts = [int(one.rows.sum()) for one in items_of_batch]
        num_batches = len(batches) // len(lanes)
        rows_of_lanes = [
            sum(counts[i * num_batches : (i + 1) * num_batches]) for i in range(len(lanes))
        ]
        assigned = assign_items(items.costs, grid.lanes_in)
        rows_of_share = [_rows_of(share, items.rows) for share in assigned]
        own_share = self._share[role.rank]
        output = None
        if assigned[own_share].size:
            sizes = [len(one.rows) for one in items_of_batch]
            output = self._encode(batches, _by_batch(assigned[own_share], sizes), trains)
        own_lane = role.served_lanes.index(role.place.lane)
        return Encoded(
            output,
            rows_of_share,
            rows_of_lanes,
            counts[own_lane * num_batches : (own_lane + 1) * num_batches],
        )

    @paddle.no_grad()
    def exchange(self, encoded: Encoded) -> Tensor:
        """`[R, C]`: the rows of this data lane, detached."""
        grid, role = self.groups.grid, self.groups.role
        sent = self._nothing() if encoded.output is None else encoded.output.detach()
        if grid.kind == "equal":
            return sent
        if grid.kind == "fan-out":
            own_lane = role.served_lanes.index(role.place.lane)
            start = sum(encoded.rows_of_lanes[:own_lane])
            return sent[start : start + encoded.rows_of_lanes[own_lane]]
        group = self.groups.bridge_group
        numbers = [encoded.rows_of_share[self._share[rank]] for rank in group.ranks]
        parts = _gathered(sent, [len(rows) for rows in numbers], group)
        order = np.argsort(np.concatenate(numbers))
        if not order.size:
            return self._nothing()
        return rows_in_order(paddle.concat(parts), order)

    def backward(self, encoded: Encoded, gradient_RC: Tensor) -> None:
        """Sum the gradients of this data lane's rows, and run the encoder's backward pass.

        Args:
            gradient_RC: this rank's part.
        """
        total = sum(encoded.rows_of_lanes)
        if not total:
            return
        gradient = self._own_gradient(encoded, gradient_RC)
        if encoded.output is not None:
            output, encoded.output = encoded.output, None
            paddle.autograd.backward([output], [gradient])

    def _encode(self, batches: Sequence[Any], own: list[np.ndarray], trains: bool) -> Tensor:
        with paddle.set_grad_enabled(trains), encoder_random():
            return self.encoder.encode(batches, own)

    @paddle.no_grad()
    def _own_gradient(self, encoded: Encoded, gradient_RC: Tensor) -> Tensor:
        """Gradient of this encoder lane's rows, summed over the ranks that have parts of it."""
        grid, rows_of_share = self.groups.grid, encoded.rows_of_share
        if grid.kind == "fan-in" and gradient_RC.shape[0]:
            group = self.gradient_group
            needed = [rows_of_share[self._share[rank]] for rank in group.ranks]
            padded = group.nranks * max(len(rows) for rows in needed)
            # An all-reduce sends each row twice.
            if padded <= 2 * gradient_RC.shape[0]:
                return _scattered(gradient_RC, needed, group)
        if gradient_RC.shape[0]:
            gradient_RC = all_reduced(gradient_RC, self.gradient_group)
        if grid.kind == "equal":
            return gradient_RC
        if grid.kind == "fan-in":
            own = rows_of_share[self._share[self.groups.role.rank]]
            return _selected(gradient_RC, own)
        group, lanes = self.groups.bridge_group, self.groups.role.served_lanes
        lane_of_rank = [grid.places[rank].lane for rank in group.ranks]
        counts = [encoded.rows_of_lanes[lanes.index(lane)] for lane in lane_of_rank]
        parts = dict(zip(lane_of_rank, _gathered(gradient_RC, counts, group), strict=True))
        return paddle.concat([parts[lane] for lane in lanes])

    def _nothing(self) -> Tensor:
        return paddle.zeros([0, self._width], dtype=self._dtype)


def _gathered(own: Tensor, counts: Sequence[int], group: Any) -> list[Tensor]:
    """The rows of all ranks of a group, different numbers of them, padded for the all-gather."""
    longest, width = max(counts), own.shape[1]
    if not longest:
        return [own for _ in counts]
    if own.shape[0] < longest:
        padding = paddle.zeros([longest - own.shape[0], width], dtype=own.dtype)
        own = paddle.concat([own, padding])
    everyone = all_gathered(own, group)
    return [everyone[i * longest : i * longest + count] for i, count in enumerate(counts)]


def _scattered(gradient_RC: Tensor, needed: Sequence[np.ndarray], group: Any) -> Tensor:
    """The rows that this rank of the group needs, summed over its ranks: one reduce-scatter."""
    longest, width = max(len(rows) for rows in needed), gradient_RC.shape[1]
    parts = []
    for rows in needed:
        padding = paddle.zeros([longest - len(rows), width], dtype=gradient_RC.dtype)
        parts += [_selected(gradient_RC, rows), padding]
    own = paddle.empty([longest, width], dtype=gradient_RC.dtype)
    dist.stream.reduce_scatter(own, paddle.concat(parts), group=group)
    return own[: len(needed[group.rank])]


def _selected(rows_RC: Tensor, rows: np.ndarray) -> Tensor:
    return rows_in_order(rows_RC, rows) if rows.size else rows_RC[:0]


def _rows_of(items: np.ndarray, rows_I: np.ndarray) -> np.ndarray:
    """Row numbers of some items, in their order."""
    ends_I = rows_I.cumsum()
    ranges = [np.arange(int(rows_I[i])) + ends_I[i] - rows_I[i] for i in items]
    return np.concatenate([np.zeros(0, dtype=np.int64), *ranges])


def _by_batch(items: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    """Item numbers over all batches as item numbers within each batch."""
    ends = np.cumsum(sizes)
    return [
        items[(items >= end - size) & (items < end)] - (end - size)
        for end, size in zip(ends, sizes, strict=True)
    ]
