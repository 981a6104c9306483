"""Embedding of the prefix, the backbone's input of images, texts and states, block by block.

Shapes: B batch, L prefix tokens, n tokens of a block, M tokens of an image, D backbone width, F
frames of the history, S state values, Z images of all samples and cameras.

Every layer runs once per batch, whichever optional fields have content, and blocks that are not
laid out stay in the graph with zero tokens. So ranks that shard parameters issue the same
collectives.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import paddle
from paddle import Tensor, nn

from paddle_vl.families.pi07.config import PI07Config, PI07PlannerConfig
from paddle_vl.families.pi07.layers import GroupedProjection, PaddedEmbedding
from paddle_vl.families.pi07.prefix_layout import (
    Block,
    PrefixTokens,
    Presence,
    Source,
    real_frames,
)
from paddle_vl.families.pi07.vision import VideoEncoder
from paddle_vl.nn.linear import Embedding
from paddle_vl.nn.operations import slice_axis
from paddle_vl.nn.placement import Placement

# Entry of a batch under the colocated schedule: the tower's rows of its images, a `PooledRows` of
# `paddle_vl.families.pi07.colocated`.
IMAGE_ROWS = "image_rows"


class Prefix(NamedTuple):
    """An embedded prefix with its masks.

    Attributes:
        embs: `[B, L, D]`.
        pad_masks, att_masks, num_seen: see `PrefixMasks`.
    """

    embs: Tensor
    pad_masks: Tensor
    att_masks: Tensor
    num_seen: int


class PrefixEmbedding(nn.Layer):
    """Embeds the low-level policy's prefix: videos, texts, states and, in training, actions.

    On a pipeline stage without embeddings the tower alone (`schedule: colocated`).

    Source: `embed_prefix` of OpenTau's PI07LowLevelFlowMatching.
    """

    def __init__(
        self,
        config: PI07Config,
        tokens: PrefixTokens,
        num_groups: int | None,
        placement: Placement,
    ):
        """
        Args:
            tokens: of the layout `PREFIX_BLOCKS`.
            num_groups: groups with a state projection of their own; None for one projection.

        Raises:
            ValueError: the vocabulary of discrete actions is not known.
        """
        super().__init__()
        vlm = config.vlm_config
        backbone = vlm.gemma3_config
        if vlm.discrete_action_vocab_size is None:
            raise ValueError(
                "vlm_config.discrete_action_vocab_size is None: set it to that of the action "
                "tokenizer"
            )
        width = backbone.text_config.hidden_size
        self.config, self.tokens = config, tokens
        self.video_encoder = VideoEncoder(
            backbone, config.n_obs_steps, config.spacetime_layer_stride, placement
        )
        if not placement.stage_layers.embedding:
            return
        vocab_size = backbone.text_config.vocab_size
        self.embed_tokens = PaddedEmbedding(
            placement.layers.vocab_embedding(vocab_size, width), scale=width**0.5
        )
        self.discrete_action_embedding = PaddedEmbedding(
            Embedding(vlm.discrete_action_vocab_size, width)
        )
        self.state_proj = GroupedProjection(config.max_state_dim, width, num_groups)

    def forward(
        self, batch: Mapping[str, Any], presence: Presence, training: bool = True
    ) -> Prefix:
        """Embed a batch.

        Args:
            batch: see `PI07LowLevelFlowMatching.forward`.
            presence: the optional fields to lay out.
            training: add the action tail, which needs `discrete_actions`.

        Raises:
            ValueError: the batch lacks the field of a block to lay out.
        """
        blocks = self.tokens.embedded(batch, presence, training)
        rows = self.embed_blocks(batch, blocks, presence.subgoal)
        masks = self.tokens.masks(batch, presence, training)
        return Prefix(joined(blocks, rows, presence, training), *masks)

    def embed_blocks(
        self, batch: Mapping[str, Any], blocks: Sequence[Block], with_goals: bool = True
    ) -> dict[str, Tensor]:
        """Rows `[B, n, D]` of each block, laid out or not.

        Args:
            with_goals: run the tower over the goal images too; False saves it if no sample has
                one. The tower runs for the videos anyway.
        """
        texts = [block for block in blocks if block.source in (Source.FIELD, Source.LABEL)]
        ids = {block.name: self.tokens.ids(block, batch) for block in texts}
        found = look_up(self.embed_tokens, ids)
        if any(block.source is Source.VIDEOS for block in blocks):
            found |= self._pictures(batch, with_goals)
        for block in blocks:
            if block.source is Source.STATE:
                found[block.name] = self._state(batch)
            elif block.source is Source.ACTIONS:
                found[block.name] = self._actions(batch)
        return found

    def embed_all(
        self, batch: Mapping[str, Any], stills_SCHW: Tensor, subgoal_rows_BG: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`embs`, `pad_masks` and `att_masks` with all blocks laid out, for programs.

        Args:
            batch: see `PI07LowLevelFlowMatching.forward`, but `videos` `[V, F, 3, H, W]` are those
                of all cameras and samples, camera-major, with `frame_is_pad` `[V, F]`; camera masks
                are `[B, c]`.
            stills_SCHW: goal images in [-1, 1]; S may be 0.
            subgoal_rows_BG: int64 row of each sample's G goal images among videos and stills; any
                row where it is masked. G may be 0.
        """
        blocks = self.tokens.inference_blocks
        texts = [block for block in blocks if block.source in (Source.FIELD, Source.LABEL)]
        ids = {one.name: self.tokens.ids(one, batch) for one in texts}
        rows = look_up(self.embed_tokens, ids)
        rows_ZMD = self.video_encoder.tokens(batch["videos"], batch["frame_is_pad"], stills_SCHW)
        videos_ZMD = rows_ZMD[: batch["videos"].shape[0]]
        rows["videos"] = of_cameras(videos_ZMD, batch["vid_masks"].shape[1])
        goals_BGMD = paddle.gather_nd(rows_ZMD, subgoal_rows_BG.unsqueeze(-1))
        rows["subgoals"] = goals_BGMD.flatten(1, 2)
        rows["state"] = self._state(batch)
        pad_BL, marks_BL = self.tokens.masks_of_all(batch)
        return paddle.concat([rows[each.name] for each in blocks], axis=1), pad_BL, marks_BL

    def _pictures(self, batch: Mapping[str, Any], with_goals: bool) -> dict[str, Tensor]:
        videos, history = batch["videos"], batch.get("obs_history_is_pad")
        goals = batch.get("subgoal_images") or []
        has_goals = bool(goals) and with_goals
        if IMAGE_ROWS in batch:
            sources = ["videos", "subgoal_images"] if has_goals else ["videos"]
            rows_ZMD = self.video_encoder.project(batch[IMAGE_ROWS].of(sources))
        else:
            if history is not None:
                history = paddle.concat([history] * len(videos))
            stills = paddle.concat(goals) if has_goals else None
            # All cameras and all goals in one pass of the tower.
            rows_ZMD = self.video_encoder(paddle.concat(videos), history, stills)
        num_videos = len(videos) * videos[0].shape[0]
        found = {"videos": of_cameras(slice_axis(rows_ZMD, 0, num_videos), len(videos))}
        if has_goals:
            found["subgoals"] = of_cameras(
                slice_axis(rows_ZMD, num_videos, rows_ZMD.shape[0]), len(goals)
            )
        elif goals:
            # Never laid out; these rows keep the graph the same as with goals.
            found["subgoals"] = of_cameras(slice_axis(rows_ZMD, 0, videos[0].shape[0]), 1)
        return found

    def _state(self, batch: Mapping[str, Any]) -> Tensor:
        state_BFS = batch["state"]
        is_real_BF1 = real_frames(batch, paddle).unsqueeze(-1)
        state_BFS = paddle.where(is_real_BF1, state_BFS, paddle.zeros_like(state_BFS))
        state_BFS = state_BFS.astype(self.embed_tokens.weight.dtype)
        return self.state_proj(state_BFS, batch.get("group_index"))

    def _actions(self, batch: Mapping[str, Any]) -> Tensor:
        tokens_BL = batch["discrete_actions"]
        wanted = self.config.discrete_action_max_length
        if tokens_BL.shape[1] != wanted:
            raise ValueError(
                f"discrete_actions has {tokens_BL.shape[1]} tokens a sample; "
                f"discrete_action_max_length is {wanted}"
            )
        return self.discrete_action_embedding(tokens_BL)


class PlannerEmbedding(nn.Layer):
    """Embeds the planner's prefix: images and texts.

    On a pipeline stage without embeddings the tower alone (`schedule: colocated`).

    Source: `embed_prefix` of OpenTau's PI07HighLevelPlannerModel.
    """

    def __init__(
        self,
        config: PI07PlannerConfig,
        tokens: PrefixTokens,
        placement: Placement,
    ):
        super().__init__()
        backbone = config.vlm_config.gemma3_config
        width = backbone.text_config.hidden_size
        self.tokens = tokens
        # One frame: a stride beyond the last layer disables temporal attention.
        layers = backbone.vision_config.num_hidden_layers
        self.video_encoder = VideoEncoder(backbone, 1, layers + 1, placement)
        if not placement.stage_layers.embedding:
            return
        self.embed_tokens = PaddedEmbedding(
            placement.layers.vocab_embedding(backbone.text_config.vocab_size, width, is_tied=True),
            scale=width**0.5,
        )

    def forward(self, batch: Mapping[str, Any], presence: Presence, training: bool) -> Prefix:
        """Embed a batch.

        Args:
            presence: whether to lay out metadata; the other fields are ignored.
            training: add the memory and the response that the planner is to write.

        Raises:
            ValueError: metadata is to be laid out and the batch has no field for it.
        """
        blocks = self.tokens.embedded(batch, presence, training)
        rows = self._texts(blocks, batch)
        if IMAGE_ROWS in batch:
            images = self.video_encoder.project(batch[IMAGE_ROWS].of(["images"]))
        else:
            images = self.video_encoder.embed_image(paddle.concat(batch["images"]))
        rows["images"] = of_cameras(images, len(batch["images"]))
        masks = self.tokens.masks(batch, presence, training)
        return Prefix(joined(blocks, rows, presence, training), *masks)

    def embed_all(
        self, batch: Mapping[str, Any], image_rows_ZMD: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`embs`, `pad_masks` and `att_masks` with all blocks laid out, for programs.

        Args:
            batch: see `PI07HighLevelPlannerModel.forward`, without images; camera masks `[B, c]`.
            image_rows_ZMD: tokens of the images, camera-major.
        """
        blocks = self.tokens.inference_blocks
        rows = self._texts(blocks, batch)
        rows["images"] = of_cameras(image_rows_ZMD, batch["img_masks"].shape[1])
        pad_BL, marks_BL = self.tokens.masks_of_all(batch)
        return paddle.concat([rows[each.name] for each in blocks], axis=1), pad_BL, marks_BL

    def _texts(self, blocks: Sequence[Block], batch: Mapping[str, Any]) -> dict[str, Tensor]:
        texts = [block for block in blocks if block.source is not Source.IMAGES]
        ids = {one.name: self.tokens.ids(one, batch) for one in texts}
        return look_up(self.embed_tokens, ids)


def look_up(table: PaddedEmbedding, texts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rows `[B, n, D]` of blocks of text from their ids `[B, n]`."""
    # One look-up for all blocks, as each look-up has a gradient as large as the table.
    ids = list(texts.values())
    rows = paddle.split(table(paddle.concat(ids, axis=1)), [x.shape[1] for x in ids], axis=1)
    return {name: rows[i] for i, name in enumerate(texts)}


def of_cameras(rows_ZMD: Tensor, num_cameras: int) -> Tensor:
    """Camera-major rows `[cameras * B, M, D]` to `[B, cameras * M, D]`."""
    tokens, width = rows_ZMD.shape[1:]
    rows = rows_ZMD.reshape([num_cameras, -1, tokens, width]).transpose([1, 0, 2, 3])
    return rows.reshape([-1, num_cameras * tokens, width])


def joined(
    blocks: Sequence[Block], rows: Mapping[str, Tensor], presence: Presence, training: bool
) -> Tensor:
    """Rows `[B, L, D]` of the blocks, in their order.

    A block that is not laid out is sliced to zero tokens, not left out: the graph has the same
    structure on all ranks that shard parameters.
    """
    pieces = []
    for block in blocks:
        rows_BnD = rows[block.name]
        if block.is_optional:
            tokens = rows_BnD.shape[1] if presence.has(block, training) else 0
            rows_BnD = slice_axis(rows_BnD, 0, tokens, axis=1)
        pieces.append(rows_BnD)
    return paddle.concat(pieces, axis=1)
