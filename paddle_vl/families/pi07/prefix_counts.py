"""What the prefix of a batch of arrays has of real tokens, and of pairs that see each other.

Shapes: B batch, T steps of history.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paddle_vl.families.flops import causal_pairs
from paddle_vl.families.pi07.prefix_layout import Attends, Block, Source, When, presence_of

_CAMERA_MASKS = {
    Source.VIDEOS: "vid_masks",
    Source.IMAGES: "img_masks",
    Source.SUBGOALS: "subgoal_img_masks",
}


class PrefixCounts:
    """Adds up the real tokens of a prefix, and the pairs of them that see each other.

    Args:
        blocks: the layout.
        camera_tokens: of an image.
        labels: number of tokens of each label.

    Attributes:
        num_tokens, num_pairs: of all samples.
        num_seen: tokens that the expert sees.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        batch: Mapping[str, Any],
        camera_tokens: int,
        labels: Mapping[str, int],
    ):
        self.camera_tokens, self.labels = camera_tokens, labels
        self.num_pairs = self.num_seen = 0
        presence = batch.get("presence") or presence_of(batch)
        before_B = np.zeros(len(batch["lang_masks"]), dtype=np.int64)
        for block in blocks:
            if not presence.has(block, training=True):
                continue
            parts_B = self._parts(block, batch)
            # Only the first block of a layout joins what is before it, which is nothing.
            if block.attends is Attends.JOINED:
                parts_B = [sum(parts_B)]
            for count_B in parts_B:
                self.num_pairs += int((count_B * before_B).sum())
                is_causal = block.attends is Attends.CAUSAL
                self.num_pairs += causal_pairs(count_B) if is_causal else int((count_B**2).sum())
                before_B = before_B + count_B
            if block.when is not When.TRAINING:
                self.num_seen = int(before_B.sum())
        self.num_tokens = int(before_B.sum())

    def _parts(self, block: Block, batch: Mapping[str, Any]) -> list[np.ndarray]:
        """Real tokens `[B]` of a block, of each of its cameras if it has any."""
        if block.source in _CAMERA_MASKS:
            masks = batch[_CAMERA_MASKS[block.source]]
            return [np.asarray(mask, dtype=np.int64) * self.camera_tokens for mask in masks]
        if block.source is Source.STATE:
            return [real_steps(batch).sum(axis=1)]
        if block.source is Source.ACTIONS:
            return [batch["discrete_action_masks"].sum(axis=1)]
        if block.source is Source.FIELD:
            return [batch[f"{block.text}_masks"].sum(axis=1)]
        shown_B = np.ones(len(batch["lang_masks"]), dtype=np.int64)
        if block.hidden_without_subgoal:
            shown_B = np.minimum(how_many(batch["subgoal_img_masks"]), 1)
        return [shown_B * self.labels[block.text]]


def real_steps(batch: Mapping[str, Any]) -> np.ndarray:
    """Which steps of the history a sample has: `[B, T]` bool."""
    history, shape = batch.get("obs_history_is_pad"), batch["state"].shape[:2]
    real_BT = np.zeros(shape, dtype=bool) if history is None else ~history
    real_BT[:, -1] = True
    return real_BT


def how_many(masks: Sequence[np.ndarray]) -> np.ndarray:
    """How many of several `[B]` masks say that a sample has something: `[B]`."""
    return np.sum(np.asarray(masks, dtype=np.int64), axis=0)
