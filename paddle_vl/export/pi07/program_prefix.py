"""Prefixes of pi07's programs: all blocks of inference are laid out.

The blocks that a batch does not need are padding, which no token sees and which counts for no
position. So real tokens have the same numbers as in the model's own prefix.

Shapes: B batch, c cameras, L prefix tokens, n tokens of a block, M tokens of an image, D width, G
goal images of a sample.
"""

from collections.abc import Mapping
from typing import Any

import paddle
from paddle import Tensor

from paddle_vl.families.pi07.prefix import Prefix, PrefixEmbedding, look_up, of_cameras
from paddle_vl.families.pi07.prefix_layout import CAMERA_MASKS, Block, PrefixTokens, Source, When


def policy_prefix(
    prefix: PrefixEmbedding,
    batch: Mapping[str, Any],
    stills_SCHW: Tensor,
    subgoal_rows_BG: Tensor,
) -> Prefix:
    """The low-level policy's prefix.

    Args:
        batch: see `PI07LowLevelFlowMatching.forward`, but `videos` `[V, F, 3, H, W]` are those of
            all cameras and samples, camera-major, with `frame_is_pad` `[V, F]`; camera masks are
            `[B, c]`.
        stills_SCHW: goal images in [-1, 1]; S may be 0.
        subgoal_rows_BG: int64 row of each sample's G goal images among videos and stills; any row
            where it is masked. G may be 0.
    """
    blocks = inference_blocks(prefix.tokens)
    rows = look_up(prefix.embed_tokens.rows, prefix.tokens.texts(blocks, batch))
    encoder = prefix.video_encoder
    rows_ZMD = encoder.project(
        encoder.pooled_rows(batch["videos"], batch["frame_is_pad"], stills_SCHW)
    )
    videos_ZMD = rows_ZMD[: batch["videos"].shape[0]]
    rows["videos"] = of_cameras(videos_ZMD, batch["vid_masks"].shape[1])
    goals_BGMD = paddle.gather_nd(rows_ZMD, subgoal_rows_BG.unsqueeze(-1))
    rows["subgoals"] = goals_BGMD.flatten(1, 2)
    rows["state"] = prefix.embed_state(batch)
    pad_BL, marks_BL = masks_of_all(prefix.tokens, batch)
    embs_BLD = paddle.concat([rows[each.name] for each in blocks], axis=1)
    return Prefix(embs_BLD, pad_BL, marks_BL, 0)


def planner_prefix(
    prefix: PrefixEmbedding, batch: Mapping[str, Any], image_rows_ZMD: Tensor
) -> Prefix:
    """The planner's prefix.

    Args:
        batch: see `PI07HighLevelPlannerModel.forward`, without images; camera masks `[B, c]`.
        image_rows_ZMD: tokens of the images, camera-major.
    """
    blocks = inference_blocks(prefix.tokens)
    rows = look_up(prefix.embed_tokens.rows, prefix.tokens.texts(blocks, batch))
    rows["images"] = of_cameras(image_rows_ZMD, batch["img_masks"].shape[1])
    pad_BL, marks_BL = masks_of_all(prefix.tokens, batch)
    embs_BLD = paddle.concat([rows[each.name] for each in blocks], axis=1)
    return Prefix(embs_BLD, pad_BL, marks_BL, 0)


def inference_blocks(tokens: PrefixTokens) -> list[Block]:
    """The blocks of inference, whatever a batch has."""
    return [block for block in tokens.blocks if block.when is not When.TRAINING]


def masks_of_all(tokens: PrefixTokens, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """`pad_masks` and `att_masks` `[B, L]`; the batch has all fields of the layout."""
    is_present = _present(batch)
    pads, marks = [], []
    for block in inference_blocks(tokens):
        pad_Bn = tokens.pad(block, batch)
        if block.is_optional:
            pad_Bn = paddle.logical_and(pad_Bn, is_present[block.when])
        pads.append(pad_Bn)
        marks.append(tokens.marks(block, pad_Bn))
    return paddle.concat(pads, axis=1), paddle.concat(marks, axis=1)


def _present(batch: Mapping[str, Any]) -> dict[When, Tensor]:
    """Whether any sample needs the optional blocks, as tensors."""
    names = {
        When.RESPONSE: "response_masks",
        When.METADATA: "metadata_masks",
        When.SUBGOAL: CAMERA_MASKS[Source.SUBGOALS],
    }
    found = {when: batch[name].any() for when, name in names.items() if name in batch}
    found[When.ANY_FIELD] = paddle.stack([each for each in found.values()]).any()
    found[When.NO_FIELD] = paddle.logical_not(found[When.ANY_FIELD])
    return found
