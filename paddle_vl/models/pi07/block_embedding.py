"""Blocks of tokens, embedded one by one and put together.

Shapes: B batch, n tokens of a block, L of all chosen ones, D backbone width, M tokens of a camera.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.models.pi07.embeddings import PaddedEmbedding
from paddle_vl.models.pi07.prefix_layout import Attends, Block


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
        name: EmbeddedBlock(part, pad_BL)
        for part, (name, (_, pad_BL)) in zip(rows, texts.items(), strict=True)
    }


def of_cameras(rows_ZMD: Tensor, masks: Sequence[Tensor]) -> EmbeddedBlock:
    """Rows of all cameras' samples, camera-major, to those of each sample, camera after camera.

    Args:
        masks: `[B]` bool for each camera.
    """
    cameras = len(masks)
    rows = paddle.concat(paddle.split(rows_ZMD, cameras, axis=0), axis=1)
    pad_Bc1 = paddle.stack(list(masks), axis=1).unsqueeze(-1)
    pad_BcM = pad_Bc1.expand([*pad_Bc1.shape[:2], rows_ZMD.shape[1]])
    return EmbeddedBlock(rows, pad_BcM.flatten(1), cameras)


def joined(
    chosen: Sequence[Block], embedded: Mapping[str, EmbeddedBlock]
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows `[B, L, D]`, pad masks and marks `[B, L]` bool of the chosen blocks, in their order."""
    parts = [embedded[block.name] for block in chosen]
    pad_BL = paddle.concat([part.pad for part in parts], axis=1)
    marks = [
        mark
        for block, part in zip(chosen, parts, strict=True)
        for mark in _marks(block.attends, part.rows.shape[1], part.num_parts)
    ]
    att_BL = paddle.to_tensor(np.array([marks], dtype=bool)).expand(pad_BL.shape)
    return paddle.concat([part.rows for part in parts], axis=1), pad_BL, att_BL


def _marks(attends: Attends, num_tokens: int, num_parts: int) -> list[bool]:
    if attends is Attends.CAUSAL:
        return [True] * num_tokens
    begins = attends is Attends.TOGETHER
    part = num_tokens // num_parts
    return [begins and i % part == 0 for i in range(num_tokens)]
