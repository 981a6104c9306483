"""Blocks of tokens, embedded one by one and put together.

Shapes: B batch, n tokens of a block, L of all chosen ones, D backbone width, M tokens of a camera.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.models.pi07.embeddings import PaddedEmbedding
from paddle_vl.models.pi07.prefix_layout import Attends, Block, Presence
from paddle_vl.nn.part import part


class EmbeddedBlock(NamedTuple):
    """A block's tokens.

    Attributes:
        rows: `[B, n, D]`.
        pad: `[B, n]` bool, True for real tokens.
        num_parts: equal parts that see each other apart from the other parts: cameras.
    """

    rows: Tensor
    pad: Tensor
    num_parts: int = 1


def look_up(
    table: PaddedEmbedding, texts: Mapping[str, tuple[Tensor, Tensor]]
) -> dict[str, EmbeddedBlock]:
    """Blocks of text from their ids and pad masks, each `[B, n]`."""
    # One look-up for all: each has a gradient as large as the table.
    ids = [ids_BL for ids_BL, _ in texts.values()]
    rows = paddle.split(table(paddle.concat(ids, axis=1)), [x.shape[1] for x in ids], axis=1)
    return {
        name: EmbeddedBlock(rows_BnD, pad_BL)
        for rows_BnD, (name, (_, pad_BL)) in zip(rows, texts.items(), strict=True)
    }


def of_cameras(rows_ZMD: Tensor, masks: Sequence[Tensor]) -> EmbeddedBlock:
    """Rows of all cameras' samples, camera-major, to those of each sample, camera after camera.

    Args:
        masks: `[B]` bool for each camera.
    """
    cameras, tokens, width = len(masks), *rows_ZMD.shape[1:]
    rows = rows_ZMD.reshape([cameras, -1, tokens, width]).transpose([1, 0, 2, 3])
    pad_Bc1 = paddle.stack(list(masks), axis=1).unsqueeze(-1)
    pad_BcM = pad_Bc1.expand([*pad_Bc1.shape[:2], tokens])
    return EmbeddedBlock(rows.reshape([-1, cameras * tokens, width]), pad_BcM.flatten(1), cameras)


def joined(
    blocks: Sequence[Block],
    embedded: Mapping[str, EmbeddedBlock],
    presence: Presence,
    training: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows `[B, L, D]`, pad masks and marks `[B, L]` bool of the blocks, in their order.

    What is not present is a part of it all the same, of no tokens. So the graph has one structure
    whatever is present: ranks that share parameters piecewise go through it in the same order.
    """
    rows, pads, marks = [], [], []
    for block in blocks:
        rows_BnD, pad_Bn, num_parts = embedded[block.name]
        if block.is_optional:
            tokens = rows_BnD.shape[1] if presence.has(block, training) else 0
            rows_BnD, pad_Bn = part(rows_BnD, 0, tokens, axis=1), pad_Bn[:, :tokens]
        rows.append(rows_BnD)
        pads.append(pad_Bn)
        marks += _marks(block.attends, rows_BnD.shape[1], num_parts)
    pad_BL = paddle.concat(pads, axis=1)
    att_BL = paddle.to_tensor(np.array([marks], dtype=bool)).expand(pad_BL.shape)
    return paddle.concat(rows, axis=1), pad_BL, att_BL


def _marks(attends: Attends, num_tokens: int, num_parts: int) -> list[bool]:
    if attends is Attends.CAUSAL:
        return [True] * num_tokens
    begins = attends is Attends.TOGETHER
    size = num_tokens // num_parts
    return [begins and i % size == 0 for i in range(num_tokens)]
