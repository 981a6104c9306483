"""The prefix: what the backbone sees and reads, block by block.

Shapes: B batch, L prefix tokens, D backbone width, T steps of history, M tokens of a camera.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import paddle
from paddle import Tensor, nn

from paddle_vl.families.pi07.block_embedding import joined, look_up, of_cameras
from paddle_vl.families.pi07.config import PI07Config
from paddle_vl.families.pi07.embeddings import PaddedEmbedding
from paddle_vl.families.pi07.group_linear import GroupedProjection
from paddle_vl.families.pi07.prefix_layout import Block, Presence, Source
from paddle_vl.families.pi07.prefix_tokens import PrefixTokens, real_steps
from paddle_vl.families.pi07.video_encoder import VideoEncoder
from paddle_vl.nn.functional import slice_axis
from paddle_vl.nn.linear import Embedding
from paddle_vl.nn.placement import Placement


class Prefix(NamedTuple):
    """A prefix with its masks.

    Attributes:
        embs: `[B, L, D]`.
        pad_masks, att_masks, num_seen: see `PrefixMasks`.
    """

    embs: Tensor
    pad_masks: Tensor
    att_masks: Tensor
    num_seen: int


class PrefixEmbedding(nn.Layer):
    """Everything that turns a batch into the rows of the prefix.

    Every layer is called once, whatever optional parts the samples have.
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
            tokens: of the layout `prefix_layout.PREFIX_BLOCKS`.

        Raises:
            ValueError: no vocabulary of discrete actions.
        """
        super().__init__()
        vlm = config.vlm_config
        backbone = vlm.gemma3_config
        if vlm.discrete_action_vocab_size is None:
            raise ValueError(
                "vlm_config.discrete_action_vocab_size is None: it is that of the action tokenizer"
            )
        width = backbone.text_config.hidden_size
        self.config, self.tokens = config, tokens
        self.video_encoder = VideoEncoder(
            backbone, config.n_obs_steps, config.spacetime_layer_stride, placement
        )
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
            presence: which optional parts to lay out.
            training: with the action tail, which needs `discrete_actions`.

        Raises:
            ValueError: a part is to be laid out that the batch has no field for.
        """
        blocks = self.tokens.embedded(batch, presence, training)
        rows = self.embed_blocks(batch, blocks, presence.subgoal)
        masks = self.tokens.masks(batch, presence, training)
        return Prefix(joined(blocks, rows, presence, training), *masks)

    def embed_blocks(
        self, batch: Mapping[str, Any], blocks: Sequence[Block], with_goals: bool = True
    ) -> dict[str, Tensor]:
        """Rows `[B, n, D]` of each of the blocks, laid out or not.

        Args:
            with_goals: run the tower over goal images too. They are the one part that would cost
                much where no sample has one, and the tower runs for the videos anyway.
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

    def _pictures(self, batch: Mapping[str, Any], with_goals: bool) -> dict[str, Tensor]:
        videos, history, goals = (
            batch.get(name) for name in ("videos", "obs_history_is_pad", "subgoal_images")
        )
        if history is not None:
            history = paddle.concat([history] * len(videos))
        stills = paddle.concat(goals) if goals and with_goals else None
        # All cameras and all goals in one pass of the tower.
        rows_ZMD = self.video_encoder(paddle.concat(videos), history, stills)
        num_videos = len(videos) * videos[0].shape[0]
        found = {"videos": of_cameras(slice_axis(rows_ZMD, 0, num_videos), len(videos))}
        if stills is not None:
            found["subgoals"] = of_cameras(
                slice_axis(rows_ZMD, num_videos, rows_ZMD.shape[0]), len(goals)
            )
        elif goals:
            # Any rows do where none are laid out: the same graph as with goals.
            found["subgoals"] = of_cameras(slice_axis(rows_ZMD, 0, videos[0].shape[0]), 1)
        return found

    def _state(self, batch: Mapping[str, Any]) -> Tensor:
        state_BTS = batch["state"]
        is_real_BT1 = real_steps(batch).unsqueeze(-1)
        state_BTS = paddle.where(is_real_BT1, state_BTS, paddle.zeros_like(state_BTS))
        state_BTS = state_BTS.astype(self.embed_tokens.weight.dtype)
        return self.state_proj(state_BTS, batch.get("group_index"))

    def _actions(self, batch: Mapping[str, Any]) -> Tensor:
        tokens_BL = batch["discrete_actions"]
        wanted = self.config.discrete_action_max_length
        if tokens_BL.shape[1] != wanted:
            raise ValueError(
                f"discrete_actions has {tokens_BL.shape[1]} tokens a sample; "
                f"discrete_action_max_length is {wanted}"
            )
        return self.discrete_action_embedding(tokens_BL)
