"""Rows of blocks of tokens, embedded one by one and put together.

Shapes: B batch, n tokens of a block, L of all chosen ones, D backbone width, M tokens of a camera.
"""

from collections.abc import Mapping, Sequence

import paddle
from paddle import Tensor

from paddle_vl.families.pi07.embeddings import PaddedEmbedding
from paddle_vl.families.pi07.prefix_layout import Block, Presence
from paddle_vl.nn.functional import slice_axis


def look_up(table: PaddedEmbedding, texts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rows `[B, n, D]` of blocks of text from their ids `[B, n]`."""
    # One look-up for all: each has a gradient as large as the table.
    ids = list(texts.values())
    rows = paddle.split(table(paddle.concat(ids, axis=1)), [x.shape[1] for x in ids], axis=1)
    return dict(zip(texts, rows, strict=True))


def of_cameras(rows_ZMD: Tensor, num_cameras: int) -> Tensor:
    """Rows of all cameras' samples, camera-major, to those of each sample, camera after camera:
    `[B, cameras * M, D]`."""
    tokens, width = rows_ZMD.shape[1:]
    rows = rows_ZMD.reshape([num_cameras, -1, tokens, width]).transpose([1, 0, 2, 3])
    return rows.reshape([-1, num_cameras * tokens, width])


def joined(
    blocks: Sequence[Block], rows: Mapping[str, Tensor], presence: Presence, training: bool
) -> Tensor:
    """Rows `[B, L, D]` of the blocks, in their order.

    What is not present is a part of it all the same, of no tokens. So the graph has one structure
    whatever is present: ranks that share parameters piecewise go through it in the same order.
    """
    parts = []
    for block in blocks:
        part_BnD = rows[block.name]
        if block.is_optional:
            tokens = part_BnD.shape[1] if presence.has(block, training) else 0
            part_BnD = slice_axis(part_BnD, 0, tokens, axis=1)
        parts.append(part_BnD)
    return paddle.concat(parts, axis=1)
