"""The vision tower's work shared by a model-parallel group: every item is encoded once.

Items (images, videos) go to ranks by what they cost; each rank encodes its own, and one gather
brings the rows of all items to every rank. Its backward pass is one collective where the ranks have
parts of the rows' gradient, and none where each has all of it.

Shapes: I items, M rows of all items, C their width; for Qwen3-VL, D decoder width and G deepstack
levels, C = (1 + G) * D.
"""

from typing import Any

import numpy as np
import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_vl.nn.placement import Encoder, ItemEncoder
from paddle_vl.parallel.mp_ops import gathered, summed


def assign_items(costs_I: np.ndarray, num_ranks: int) -> list[np.ndarray]:
    """Items of every rank, in order; the dearest item goes first to the rank with least to do.

    The same on every rank, from the same counts.
    """
    load, items = [0] * num_ranks, [[] for _ in range(num_ranks)]
    for item in np.argsort(-costs_I, kind="stable"):
        rank = load.index(min(load))
        load[rank] += int(costs_I[item])
        items[rank].append(int(item))
    return [np.array(sorted(own), dtype=np.int64) for own in items]


def encode_spread(
    encode: Encoder,
    pixels: Tensor,
    grid_thw: np.ndarray,
    *,
    merge: int,
    width: int,
    num_levels: int,
    **sharing: Any,
) -> tuple[Tensor, list[Tensor]]:
    """Encode this rank's items and gather those of the others: rows of all items, in item order.

    Args:
        pixels: `[P, patch_dim]` of all items, the same on every rank.
        grid_thw: `[I, 3]` on the host.
        width, num_levels: D and G, for a rank without an item.
        sharing: the other arguments of `spread_items`.
    """
    num_patches_I = grid_thw.prod(axis=1)
    ends_I = num_patches_I.cumsum()

    def packed_rows(items: np.ndarray) -> Tensor:
        if items.size:
            rows = [np.arange(ends_I[i] - num_patches_I[i], ends_I[i]) for i in items]
            own = paddle.index_select(pixels, paddle.to_tensor(np.concatenate(rows)))
            merged, levels = encode(own, grid_thw[items])
        else:
            one_row = paddle.zeros([merge**2, pixels.shape[1]], dtype=pixels.dtype)
            merged, levels = encode(one_row, np.array([[1, merge, merge]]))
        return paddle.concat([merged, *levels], axis=1)

    all_MC = spread_items(
        packed_rows,
        num_patches_I,
        num_patches_I // merge**2,
        width=(1 + num_levels) * width,
        **sharing,
    )
    merged, *levels = paddle.split(all_MC, 1 + num_levels, axis=1)
    return merged, levels


def spread_items(
    encode: ItemEncoder,
    costs_I: np.ndarray,
    rows_I: np.ndarray,
    *,
    width: int,
    dtype: Any,
    group,
    gradients_are_parts: bool,
    takes_gradient: bool,
    layers_are_collective: bool = False,
) -> Tensor:
    """The rows `[M, C]` of all items, in order, each item encoded on one rank.

    Args:
        costs_I, rows_I: of each item what its encoding costs and how many rows come out.
        width, dtype: C and the dtype of rows, for a rank without an item.
        gradients_are_parts: True when each rank uses only some of the rows (sequence parallelism):
            their gradients are then summed over the group. False when each uses all of them alike.
        takes_gradient: whether any of the tower is trained; a rank without an item cannot see it.
        layers_are_collective: whether a rank without an item must run the tower all the same, for
            ranks of other groups that do: it then encodes something, and drops it.
    """
    assigned = assign_items(costs_I, group.nranks)
    own = assigned[group.rank]
    if own.size:
        own_MC = encode(own)
    elif layers_are_collective:
        own_MC = encode(own)[:0]
    else:
        # Where the tower is trained, a leaf keeps the gather's backward pass alive on this rank.
        own_MC = paddle.zeros([0, width], dtype=dtype)
        own_MC.stop_gradient = not takes_gradient
    rows_of_rank = [int(rows_I[items].sum()) for items in assigned]
    order_M = _item_order(assigned, rows_I)
    return _GatherUneven.apply(own_MC, rows_of_rank, order_M, group, gradients_are_parts)


def _item_order(assigned: list[np.ndarray], num_rows_I: np.ndarray) -> np.ndarray:
    """For each row in item order its place among the ranks' rows laid end to end: `[M]` int64."""
    items = np.concatenate(assigned)
    starts = np.zeros(len(items), dtype=np.int64)
    starts[items] = num_rows_I[items].cumsum() - num_rows_I[items]
    return np.concatenate([starts[i] + np.arange(num_rows_I[i]) for i in range(len(items))])


class _GatherUneven(PyLayer):
    """Rows of different number from every rank, then put in order. Padding travels, and is cut."""

    @staticmethod
    def forward(ctx, own_MC, rows_of_rank, order_M, group, gradients_are_parts):
        ctx.rows_of_rank, ctx.order_M, ctx.group = rows_of_rank, order_M, group
        ctx.gradients_are_parts = gradients_are_parts
        longest, width = max(rows_of_rank), own_MC.shape[1]
        padding = paddle.zeros([longest - own_MC.shape[0], width], dtype=own_MC.dtype)
        everyone = gathered(paddle.concat([own_MC, padding]), group)
        starts = np.repeat(
            longest * np.arange(group.nranks) - _exclusive(rows_of_rank), rows_of_rank
        )
        rows = (np.arange(sum(rows_of_rank)) + starts)[order_M]
        return paddle.index_select(everyone, paddle.to_tensor(rows))

    @staticmethod
    def backward(ctx, grad):
        if ctx.gradients_are_parts:
            grad = summed(grad, ctx.group)
        begin = int(_exclusive(ctx.rows_of_rank)[ctx.group.rank])
        end = begin + ctx.rows_of_rank[ctx.group.rank]
        places = np.argsort(ctx.order_M)[begin:end]
        return paddle.index_select(grad, paddle.to_tensor(places))


def _exclusive(counts: list[int]) -> np.ndarray:
    return np.cumsum(counts) - counts
