"""The tokens of a prefix without their rows: how many, which are real, and who sees whom.

It needs no weights, so that a part of the model that embeds nothing knows them from the batch.

Shapes: B batch, L prefix tokens, n those of a block, M those of a camera, T steps of history.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.families.pi07.prefix_layout import (
    Attends,
    Block,
    Presence,
    Source,
    When,
    embedded_blocks,
    fields_of,
    labels_of,
)

# By source the masks of its cameras in a batch.
CAMERA_MASKS = {
    Source.VIDEOS: "vid_masks",
    Source.IMAGES: "img_masks",
    Source.SUBGOALS: "subgoal_img_masks",
}


class PrefixMasks(NamedTuple):
    """The masks of a prefix.

    Attributes:
        pad_masks: `[B, L]` bool, True for real tokens.
        att_masks: `[B, L]` bool marks, see `paddle_vl.families.pi07.attention_masks`.
        num_seen: the expert sees so many of the tokens, the first ones: those before the action
            tail, so that training and sampling look the same to it.
    """

    pad_masks: Tensor
    att_masks: Tensor
    num_seen: int


class PrefixTokens:
    """What the blocks of a layout come to in a batch.

    Args:
        blocks: the layout.
        label_ids: the token ids of each label among them, no special tokens.
        camera_tokens: M.

    Raises:
        ValueError: a label without ids.
    """

    def __init__(
        self, blocks: tuple[Block, ...], label_ids: Mapping[str, Sequence[int]], camera_tokens: int
    ):
        labels = labels_of(blocks)
        missing = [label for label in labels if not label_ids.get(label)]
        if missing:
            raise ValueError(f"no token ids for the labels {missing} of the prefix")
        self.blocks, self.camera_tokens = blocks, camera_tokens
        self.label_ids = {label: list(label_ids[label]) for label in labels}

    def embedded(self, batch: Mapping[str, Any], presence: Presence, training: bool) -> list[Block]:
        """The blocks that are embedded, see `embedded_blocks`."""
        return embedded_blocks(self.blocks, fields_of(batch), presence, training)

    def length(self, batch: Mapping[str, Any], presence: Presence, training: bool = True) -> int:
        """L, from the shapes of the batch alone."""
        return sum(
            self._num_tokens(block, batch) for block in self._laid_out(batch, presence, training)
        )

    def masks(
        self, batch: Mapping[str, Any], presence: Presence, training: bool = True
    ) -> PrefixMasks:
        """The masks of what is laid out.

        Args:
            batch: as `PI07LowLevelFlowMatching.forward` takes it, as tensors; of the images masks
                alone.
        """
        pads, marks, num_seen = [], [], 0
        for block in self._laid_out(batch, presence, training):
            num_tokens = self._num_tokens(block, batch)
            pads.append(self._pad(block, batch))
            marks += _marks(block.attends, num_tokens, len(self._cameras(block, batch)) or 1)
            num_seen += num_tokens if block.when is not When.TRAINING else 0
        pad_BL = paddle.concat(pads, axis=1)
        att_BL = paddle.to_tensor(np.array([marks], dtype=bool)).expand(pad_BL.shape)
        return PrefixMasks(pad_BL, att_BL, num_seen)

    def ids(self, block: Block, batch: Mapping[str, Any]) -> Tensor:
        """Token ids of a block that is text, int64 `[B, n]`."""
        if block.source is Source.FIELD:
            return batch[f"{block.text}_tokens"]
        return self.label(block.text, batch["lang_tokens"].shape[0])

    def label(self, text: str, size: int) -> Tensor:
        """Token ids of a label for each of so many samples, int64 `[B, n]`."""
        ids = np.array(self.label_ids[text], dtype=np.int64)
        return paddle.to_tensor(np.tile(ids, (size, 1)))

    def _laid_out(
        self, batch: Mapping[str, Any], presence: Presence, training: bool
    ) -> list[Block]:
        embedded = self.embedded(batch, presence, training)
        return [block for block in embedded if presence.has(block, training)]

    def _cameras(self, block: Block, batch: Mapping[str, Any]) -> Sequence[Tensor]:
        """The masks of the block's cameras; none of a block without images."""
        return batch[CAMERA_MASKS[block.source]] if block.source in CAMERA_MASKS else ()

    def _num_tokens(self, block: Block, batch: Mapping[str, Any]) -> int:
        if block.source in CAMERA_MASKS:
            return len(self._cameras(block, batch)) * self.camera_tokens
        if block.source is Source.LABEL:
            return len(self.label_ids[block.text])
        names = {Source.STATE: "state", Source.ACTIONS: "discrete_actions"}
        return batch[names.get(block.source, f"{block.text}_tokens")].shape[1]

    def _pad(self, block: Block, batch: Mapping[str, Any]) -> Tensor:
        """`[B, n]` bool."""
        if block.source in CAMERA_MASKS:
            pad_Bc1 = paddle.stack(list(self._cameras(block, batch)), axis=1).unsqueeze(-1)
            return pad_Bc1.expand([*pad_Bc1.shape[:2], self.camera_tokens]).flatten(1)
        if block.source is Source.STATE:
            return real_steps(batch)
        if block.source is Source.ACTIONS:
            return batch["discrete_action_masks"]
        if block.source is Source.FIELD:
            return batch[f"{block.text}_masks"]
        shape = [batch["lang_tokens"].shape[0], len(self.label_ids[block.text])]
        pad = paddle.ones(shape, dtype="bool")
        if block.hidden_without_subgoal:
            has_goal = paddle.stack(list(batch[CAMERA_MASKS[Source.SUBGOALS]])).any(axis=0)
            pad = paddle.logical_and(pad, has_goal.unsqueeze(1))
        return pad


def real_steps(batch: Mapping[str, Any]) -> Tensor:
    """Which steps of the history have a state: `[B, T]` bool, the last, the current one, always."""
    history, (size, steps) = batch.get("obs_history_is_pad"), batch["state"].shape[:2]
    is_current = paddle.arange(steps) == steps - 1
    if history is None:
        return is_current.unsqueeze(0).expand([size, steps])
    return paddle.logical_or(paddle.logical_not(history), is_current)


def _marks(attends: Attends, num_tokens: int, num_parts: int) -> list[bool]:
    if attends is Attends.CAUSAL:
        return [True] * num_tokens
    begins = attends is Attends.TOGETHER
    part = num_tokens // num_parts
    return [begins and i % part == 0 for i in range(num_tokens)]
