"""Embedding of the prefix, the backbone's input of images, texts and states, block by block.

Shapes: B batch, L prefix tokens, n tokens of a block, M tokens of an image, D backbone width, U
tower width, F frames of the history, S state values, Z images of all samples and cameras.

Every layer runs once per batch, whichever optional fields have content, and blocks that are not
laid out stay in the graph with zero tokens. So ranks that shard parameters issue the same
collectives.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import paddle
from paddle import Tensor, nn

from paddle_vl.families.pi07.config import PI07Config, PI07PlannerConfig
from paddle_vl.families.pi07.layers import GroupedProjection, PaddedEmbedding
from paddle_vl.families.pi07.prefix_layout import (
    CAMERA_MASKS,
    IMAGES,
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

# From names of `IMAGES` to the tower's pooled rows `[Z * M, U]` of these images of a batch.
ImageRows = Callable[[Sequence[str]], Tensor]
_BLOCK_OF = {"videos": "videos", "images": "images", "subgoal_images": "subgoals"}


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
    """Embeds a prefix: the policy's of videos, texts, states and, in training, actions; the
    planner's of images and texts.

    On a pipeline stage without embeddings the tower alone.

    Source: `embed_prefix` of OpenTau's PI07LowLevelFlowMatching and PI07HighLevelPlannerModel.
    """

    def __init__(
        self,
        config: PI07Config | PI07PlannerConfig,
        tokens: PrefixTokens,
        placement: Placement,
    ):
        """
        Args:
            tokens: of the layout `PREFIX_BLOCKS` or `PLANNER_BLOCKS`.

        Raises:
            ValueError: the vocabulary of discrete actions is not known.
        """
        super().__init__()
        vlm = config.vlm_config
        backbone = vlm.gemma3_config
        width, vocab_size = backbone.text_config.hidden_size, backbone.text_config.vocab_size
        self.tokens = tokens
        self.video_encoder = VideoEncoder(
            backbone, config.n_obs_steps, config.spacetime_layer_stride, placement
        )
        if not placement.stage_layers.embedding:
            return
        # The planner's head is tied to the token table.
        is_tied = isinstance(config, PI07PlannerConfig)
        self.embed_tokens = PaddedEmbedding(
            placement.layers.vocab_embedding(vocab_size, width, is_tied=is_tied),
            scale=width**0.5,
        )
        if not isinstance(config, PI07Config):
            return
        if vlm.discrete_action_vocab_size is None:
            raise ValueError(
                "vlm_config.discrete_action_vocab_size is None: set it to that of the action "
                "tokenizer"
            )
        self.discrete_action_embedding = PaddedEmbedding(
            Embedding(vlm.discrete_action_vocab_size, width)
        )
        num_groups = config.num_groups if config.per_group_projection else None
        self.state_proj = GroupedProjection(config.max_state_dim, width, num_groups)
        self.num_action_tokens = config.discrete_action_max_length

    def forward(
        self,
        batch: Mapping[str, Any],
        presence: Presence,
        training: bool = True,
        image_rows: ImageRows | None = None,
    ) -> Prefix:
        """Embed a batch.

        Args:
            batch: of the model, see its `forward`.
            presence: the optional fields to lay out.
            training: add what is predicted: the policy's discrete actions, the planner's memory
                and response.
            image_rows: the tower's rows, made elsewhere; None runs the tower.

        Raises:
            ValueError: the batch lacks the field of a block to lay out.
        """
        blocks = self.tokens.embedded(batch, presence, training)
        rows = self.embed_blocks(batch, blocks, presence.subgoal, image_rows)
        masks = self.tokens.masks(batch, presence, training)
        return Prefix(joined(blocks, rows, presence, training), *masks)

    def embed_blocks(
        self,
        batch: Mapping[str, Any],
        blocks: Sequence[Block],
        with_goals: bool = True,
        image_rows: ImageRows | None = None,
    ) -> dict[str, Tensor]:
        """Rows `[B, n, D]` of each block, laid out or not.

        Args:
            with_goals: run the tower over the goal images too; False saves it if no sample has
                one. The tower runs for the videos anyway.
        """
        found = look_up(self.embed_tokens, self.tokens.texts(blocks, batch))
        if any(block.source in CAMERA_MASKS for block in blocks):
            found |= self._images(batch, with_goals, image_rows)
        for block in blocks:
            if block.source is Source.STATE:
                found[block.name] = self.embed_state(batch)
            elif block.source is Source.ACTIONS:
                found[block.name] = self.embed_actions(batch)
        return found

    def _images(
        self, batch: Mapping[str, Any], with_goals: bool, image_rows: ImageRows | None
    ) -> dict[str, Tensor]:
        given = {name: batch[name] for name in IMAGES if batch.get(name)}
        read = [name for name in given if with_goals or name != "subgoal_images"]
        if image_rows is not None:
            rows_ZMD = self.video_encoder.project(image_rows(read))
        else:
            videos, history = given.get("videos"), batch.get("obs_history_is_pad")
            if videos is not None and history is not None:
                history = paddle.concat([history] * len(videos))
            stills = [image for name in read if name != "videos" for image in given[name]]
            # All cameras and all goals in one pass of the tower.
            rows_ZMD = self.video_encoder(
                None if videos is None else paddle.concat(videos),
                history,
                paddle.concat(stills) if stills else None,
            )
        found, end, size = {}, 0, batch["lang_tokens"].shape[0]
        for name in read:
            begin, end = end, end + len(given[name]) * size
            rows = rows_ZMD if len(given) == 1 else slice_axis(rows_ZMD, begin, end)
            found[_BLOCK_OF[name]] = of_cameras(rows, len(given[name]))
        if len(read) < len(given):
            # Never laid out; these rows keep the graph the same as with goals.
            found["subgoals"] = of_cameras(slice_axis(rows_ZMD, 0, size), 1)
        return found

    def embed_state(self, batch: Mapping[str, Any]) -> Tensor:
        """Rows `[B, F, D]` of the states `[B, F, S]`; of zeros outside of the episode."""
        state_BFS = batch["state"]
        is_real_BF1 = real_frames(batch, paddle).unsqueeze(-1)
        state_BFS = paddle.where(is_real_BF1, state_BFS, paddle.zeros_like(state_BFS))
        state_BFS = state_BFS.astype(self.embed_tokens.weight.dtype)
        return self.state_proj(state_BFS, batch.get("group_index"))

    def embed_actions(self, batch: Mapping[str, Any]) -> Tensor:
        """Rows of the discrete actions; it raises ValueError for another number than configured."""
        tokens_BL = batch["discrete_actions"]
        if tokens_BL.shape[1] != self.num_action_tokens:
            raise ValueError(
                f"discrete_actions has {tokens_BL.shape[1]} tokens a sample; "
                f"discrete_action_max_length is {self.num_action_tokens}"
            )
        return self.discrete_action_embedding(tokens_BL)


def look_up(table: Callable[[Tensor], Tensor], texts: Mapping[str, Tensor]) -> dict[str, Tensor]:
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
