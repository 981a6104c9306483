"""The prefix: what the backbone sees and reads, block by block.

Shapes: B batch, L prefix tokens, D backbone width, T steps of history, M tokens of a camera.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import Tensor, nn

from paddle_vl.models.pi07.block_embedding import EmbeddedBlock, joined, look_up, of_cameras
from paddle_vl.models.pi07.config import PI07Config
from paddle_vl.models.pi07.embeddings import PaddedEmbedding
from paddle_vl.models.pi07.group_linear import GroupedProjection
from paddle_vl.models.pi07.prefix_layout import (
    LABELS,
    PREFIX_BLOCKS,
    Block,
    Presence,
    Source,
    When,
    embedded_blocks,
    fields_of,
)
from paddle_vl.models.pi07.video_encoder import VideoEncoder
from paddle_vl.nn.linear import Embedding
from paddle_vl.nn.part import part
from paddle_vl.nn.placement import SingleDevicePlacement


class Prefix(NamedTuple):
    """A prefix with its masks.

    Attributes:
        embs: `[B, L, D]`.
        pad_masks: `[B, L]` bool, True for real tokens.
        att_masks: `[B, L]` bool marks, see `paddle_vl.models.pi07.attention_masks`.
        num_seen: the expert sees so many of the tokens, the first ones: those before the action
            tail, so that training and sampling look the same to it.
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
        label_ids: Mapping[str, Sequence[int]],
        num_groups: int | None,
        placement: SingleDevicePlacement,
    ):
        """
        Args:
            label_ids: the token ids of each of `prefix_layout.LABELS`, no special tokens.

        Raises:
            ValueError: a label without ids, or no vocabulary of discrete actions.
        """
        super().__init__()
        missing = [label for label in LABELS if not label_ids.get(label)]
        if missing:
            raise ValueError(f"no token ids for the labels {missing} of the prefix")
        vlm = config.vlm_config
        backbone = vlm.gemma3_config
        if vlm.discrete_action_vocab_size is None:
            raise ValueError(
                "vlm_config.discrete_action_vocab_size is None: it is that of the action tokenizer"
            )
        width = backbone.text_config.hidden_size
        self.config = config
        self.label_ids = {label: list(label_ids[label]) for label in LABELS}
        self.video_encoder = VideoEncoder(
            backbone, config.n_obs_steps, config.spacetime_layer_stride, placement
        )
        vocab_size = backbone.text_config.vocab_size
        self.embed_tokens = PaddedEmbedding(
            placement.vocab_embedding(vocab_size, width), scale=width**0.5
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
        blocks = embedded_blocks(PREFIX_BLOCKS, fields_of(batch), presence, training)
        embedded = self.embed_blocks(batch, blocks, presence.subgoal)
        embs_BLD, pad_BL, att_BL = joined(blocks, embedded, presence, training)
        seen = [
            embedded[block.name].rows.shape[1]
            for block in blocks
            if block.when is not When.TRAINING and presence.has(block, training)
        ]
        return Prefix(embs_BLD, pad_BL, att_BL, sum(seen))

    def embed_blocks(
        self, batch: Mapping[str, Any], blocks: Sequence[Block], with_goals: bool = True
    ) -> dict[str, EmbeddedBlock]:
        """Rows and pad masks of each of the blocks, laid out or not.

        Args:
            with_goals: run the tower over goal images too. They are the one part that would cost
                much where no sample has one, and the tower runs for the videos anyway.
        """
        found = look_up(self.embed_tokens, self._text_ids(batch, blocks))
        if any(block.source is Source.VIDEOS for block in blocks):
            found |= self._pictures(batch, with_goals)
        for block in blocks:
            if block.source is Source.STATE:
                found[block.name] = self._state(batch)
            elif block.source is Source.ACTIONS:
                found[block.name] = self._actions(batch)
        return found

    def _text_ids(
        self, batch: Mapping[str, Any], blocks: Sequence[Block]
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Ids `[B, n]` and pad masks `[B, n]` of the blocks that are text."""
        size = batch["lang_tokens"].shape[0]
        found = {}
        for block in blocks:
            if block.source is Source.FIELD:
                found[block.name] = (
                    batch[f"{block.text}_tokens"],
                    batch[f"{block.text}_masks"],
                )
            elif block.source is Source.LABEL:
                ids = np.array(self.label_ids[block.text], dtype=np.int64)
                pad = paddle.ones([size, ids.size], dtype="bool")
                if block.hidden_without_subgoal:
                    has_goal = paddle.stack(batch["subgoal_img_masks"]).any(axis=0)
                    pad = paddle.logical_and(pad, has_goal.unsqueeze(1))
                found[block.name] = (paddle.to_tensor(np.tile(ids, (size, 1))), pad)
        return found

    def _pictures(self, batch: Mapping[str, Any], with_goals: bool) -> dict[str, EmbeddedBlock]:
        videos, history = batch["videos"], batch.get("obs_history_is_pad")
        goals, masks = batch.get("subgoal_images"), batch.get("subgoal_img_masks")
        if history is not None:
            history = paddle.concat([history] * len(videos))
        stills = paddle.concat(goals) if goals and with_goals else None
        # All cameras and all goals in one pass of the tower.
        rows_ZMD = self.video_encoder(paddle.concat(videos), history, stills)
        num_videos = len(videos) * videos[0].shape[0]
        found = {"videos": of_cameras(part(rows_ZMD, 0, num_videos), batch["vid_masks"])}
        if stills is not None:
            found["subgoals"] = of_cameras(part(rows_ZMD, num_videos, rows_ZMD.shape[0]), masks)
        elif goals:
            # Any rows do where none are laid out: the same graph as with goals.
            found["subgoals"] = of_cameras(part(rows_ZMD, 0, videos[0].shape[0]), masks[:1])
        return found

    def _state(self, batch: Mapping[str, Any]) -> EmbeddedBlock:
        state_BTS, history = batch["state"], batch.get("obs_history_is_pad")
        steps = state_BTS.shape[1]
        current = paddle.arange(steps) == steps - 1
        if history is None:
            real_BT = current.unsqueeze(0).expand(state_BTS.shape[:2])
        else:
            real_BT = paddle.logical_or(paddle.logical_not(history), current)
        state_BTS = paddle.where(real_BT.unsqueeze(-1), state_BTS, paddle.zeros_like(state_BTS))
        state_BTS = state_BTS.astype(self.embed_tokens.weight.dtype)
        return EmbeddedBlock(self.state_proj(state_BTS, batch.get("group_index")), real_BT)

    def _actions(self, batch: Mapping[str, Any]) -> EmbeddedBlock:
        tokens_BL = batch["discrete_actions"]
        wanted = self.config.discrete_action_max_length
        if tokens_BL.shape[1] != wanted:
            raise ValueError(
                f"discrete_actions has {tokens_BL.shape[1]} tokens a sample; "
                f"discrete_action_max_length is {wanted}"
            )
        rows = self.discrete_action_embedding(tokens_BL)
        return EmbeddedBlock(rows, batch["discrete_action_masks"])
