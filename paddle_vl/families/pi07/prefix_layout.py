"""The layout of a policy's prefix: its blocks as data, and the masks that follow from them.

Embedding, masks and FLOPs, in training and sampling, all use `PREFIX_BLOCKS` or, for the planner,
`PLANNER_BLOCKS`. The optional fields that a batch has depend on the data set and are the same on
all ranks: their blocks are always embedded. Which of these fields have content in any sample
differs between batches and ranks: only their blocks are laid out, that is, part of the prefix.

Shapes: B batch, L prefix tokens, n tokens of a block, M tokens of an image, c cameras, F frames of
the history. Masks are True for real tokens. `xp` is `numpy` or `paddle`.

Over 350 lines, since embedding, masks and counts must agree.

Source: `embed_prefix` of OpenTau's PI07LowLevelFlowMatching and PI07HighLevelPlannerModel.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.nn.operations import host_table


class Source(Enum):
    """Where the tokens of a block come from."""

    VIDEOS = auto()  # the video of every camera, one after the other
    IMAGES = auto()  # the image of every camera
    SUBGOALS = auto()  # the goal image of every camera
    STATE = auto()  # one token per frame of the history
    FIELD = auto()  # token ids of the batch: `<Block.text>_tokens` and `_masks`
    LABEL = auto()  # `Block.text` itself, tokenized
    ACTIONS = auto()  # discrete action tokens


# Batch entry with the camera masks of a source of images.
CAMERA_MASKS = {
    Source.VIDEOS: "vid_masks",
    Source.IMAGES: "img_masks",
    Source.SUBGOALS: "subgoal_img_masks",
}
# The same with the pixels.
IMAGES = ("videos", "images", "subgoal_images")


class Attends(Enum):
    """How the tokens of a block see each other; all of them see every earlier block."""

    JOINED = auto()  # all see each other; the block before sees them too
    TOGETHER = auto()  # all see each other; each camera of a block by itself
    CAUSAL = auto()  # each sees the ones before it


class When(Enum):
    """When a block is laid out, for all samples of a batch."""

    ALWAYS = auto()
    RESPONSE = auto()
    METADATA = auto()
    SUBGOAL = auto()
    ANY_FIELD = auto()  # any of these three
    NO_FIELD = auto()  # none of them
    TRAINING = auto()


@dataclass(frozen=True)
class Block:
    """Consecutive tokens from one source.

    Attributes:
        hidden_without_subgoal: whether the label is padding in samples without a subgoal. Other
            labels are real in all samples, even if their field is empty.
    """

    name: str
    source: Source
    text: str
    attends: Attends
    when: When
    hidden_without_subgoal: bool = False

    @property
    def is_optional(self) -> bool:
        """Whether it depends on the data if the block is laid out."""
        return self.when not in (When.ALWAYS, When.TRAINING)


_CAUSAL = Attends.CAUSAL
PREFIX_BLOCKS: tuple[Block, ...] = (
    Block("videos", Source.VIDEOS, "", Attends.JOINED, When.ALWAYS),
    Block("language", Source.FIELD, "lang", _CAUSAL, When.ALWAYS),
    Block("state_label", Source.LABEL, "State: ", _CAUSAL, When.ALWAYS),
    Block("state", Source.STATE, "", Attends.TOGETHER, When.ALWAYS),
    Block("state_end", Source.LABEL, ", ", _CAUSAL, When.ANY_FIELD),
    Block("state_end_alone", Source.LABEL, ":\n", _CAUSAL, When.NO_FIELD),
    Block("response", Source.FIELD, "response", _CAUSAL, When.RESPONSE),
    Block("metadata", Source.FIELD, "metadata", _CAUSAL, When.METADATA),
    Block("fields_end", Source.LABEL, ";\n ", _CAUSAL, When.ANY_FIELD),
    Block("subgoal_label", Source.LABEL, "Subgoal: ", _CAUSAL, When.SUBGOAL, True),
    Block("subgoals", Source.SUBGOALS, "", Attends.TOGETHER, When.SUBGOAL),
    Block("subgoal_end", Source.LABEL, ", ", _CAUSAL, When.SUBGOAL, True),
    # The action tail: the expert never sees what follows.
    Block("action_label", Source.LABEL, "Action: ", _CAUSAL, When.TRAINING),
    Block("actions", Source.ACTIONS, "", _CAUSAL, When.TRAINING),
)
MEMORY_LABEL, RESPONSE_LABEL = "Updated Memory: ", "Subtask: "
# The planner reads the state as text; its outputs are in the prefix in training only.
PLANNER_BLOCKS: tuple[Block, ...] = (
    Block("images", Source.IMAGES, "", Attends.JOINED, When.ALWAYS),
    Block("language", Source.FIELD, "lang", _CAUSAL, When.ALWAYS),
    Block("metadata", Source.FIELD, "metadata", _CAUSAL, When.METADATA),
    Block("fields_end", Source.LABEL, ";\n ", _CAUSAL, When.METADATA),
    Block("memory_label", Source.LABEL, MEMORY_LABEL, _CAUSAL, When.ALWAYS),
    Block("memory", Source.FIELD, "memory", _CAUSAL, When.TRAINING),
    Block("response_label", Source.LABEL, RESPONSE_LABEL, _CAUSAL, When.TRAINING),
    Block("response", Source.FIELD, "response", _CAUSAL, When.TRAINING),
)


def labels_of(blocks: tuple[Block, ...]) -> tuple[str, ...]:
    """The labels among blocks, each once."""
    return tuple(dict.fromkeys(b.text for b in blocks if b.source is Source.LABEL))


LABELS, PLANNER_LABELS = labels_of(PREFIX_BLOCKS), labels_of(PLANNER_BLOCKS)


class Presence(NamedTuple):
    """Optional fields: those that a batch has, or those with content in any sample."""

    response: bool
    metadata: bool
    subgoal: bool

    def has(self, block: Block, training: bool) -> bool:
        """Whether the block belongs to the prefix."""
        return {
            When.ALWAYS: True,
            When.RESPONSE: self.response,
            When.METADATA: self.metadata,
            When.SUBGOAL: self.subgoal,
            When.ANY_FIELD: any(self),
            When.NO_FIELD: not any(self),
            When.TRAINING: training,
        }[block.when]


def fields_of(batch: Mapping[str, Any]) -> Presence:
    """The optional fields that a batch has, with or without content."""
    return Presence(
        batch.get("response_tokens") is not None,
        batch.get("metadata_tokens") is not None,
        bool(batch.get("subgoal_images")),
    )


def presence_of(batch: Mapping[str, Any]) -> Presence:
    """The optional fields with a real token or image in any sample.

    Call it on the collated NumPy batch: reading a mask on a GPU would wait for the device.
    """

    def any_real(*masks: Any) -> bool:
        return any(bool(mask.any()) for mask in masks if mask is not None)

    return Presence(
        any_real(batch.get("response_masks")),
        any_real(batch.get("metadata_masks")),
        any_real(*(batch.get("subgoal_img_masks") or ())),
    )


def real_frames(batch: Mapping[str, Any], xp: Any) -> Any:
    """Which frames of the history are inside the episode: `[B, F]` bool; always the current one."""
    history, (size, frames) = batch.get("obs_history_is_pad"), batch["state"].shape[:2]
    is_current = xp.arange(frames) == frames - 1
    if history is None:
        return xp.broadcast_to(is_current, [size, frames])
    return xp.logical_or(xp.logical_not(history), is_current)


class PrefixMasks(NamedTuple):
    """The masks of a prefix.

    Attributes:
        pad_masks: `[B, L]` bool.
        att_masks: `[B, L]` bool marks, see `paddle_vl.nn.attention.BlockMask`.
        num_seen: number of leading tokens that the expert sees: those before the action tail, which
            exists in training only.
    """

    pad_masks: Any
    att_masks: Any
    num_seen: int


class PrefixTokens:
    """Lengths, masks and token ids of a layout's blocks in a batch.

    It needs no weights, so a pipeline stage without embeddings can compute the masks too.

    Args:
        blocks: the layout.
        label_ids: token ids, without special tokens, of each label of the layout.
        camera_tokens: M.

    Raises:
        ValueError: a label has no ids.
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
        """The blocks to embed, laid out or not: the same on all ranks whose batches have the same
        fields.

        Raises:
            ValueError: a block of `presence` has no field in the batch.
        """
        fields = fields_of(batch)
        found = [b for b in self.blocks if fields.has(b, training) or b.when is When.NO_FIELD]
        lacking = [b.name for b in self.blocks if presence.has(b, training) and b not in found]
        if lacking:
            raise ValueError(
                f"the blocks {lacking} are to be laid out, but the batch has no field for them: "
                "give every rank's batches the same fields, masked where there is nothing"
            )
        return found

    def length(self, batch: Mapping[str, Any], presence: Presence, training: bool = True) -> int:
        """L, from the shapes of the batch alone."""
        return sum(
            self._num_tokens(block, batch) for block in self._laid_out(batch, presence, training)
        )

    def masks(
        self,
        batch: Mapping[str, Any],
        presence: Presence,
        training: bool = True,
        xp: Any = paddle,
    ) -> PrefixMasks:
        """The masks of the blocks that are laid out.

        Args:
            batch: see `PI07LowLevelFlowMatching.forward`; the masks of the images, not the images.
        """
        pads, marks, num_seen = [], [], 0
        for block in self._laid_out(batch, presence, training):
            pads.append(self.pad(block, batch, xp))
            # Made on the device: an array would be copied to it in every step.
            marks.append(self.marks(block, pads[-1][:1], xp))
            num_seen += pads[-1].shape[1] if block.when is not When.TRAINING else 0
        pad_BL, marks_1L = (
            (np.concatenate if xp is np else paddle.concat)(each, axis=1) for each in (pads, marks)
        )
        return PrefixMasks(pad_BL, xp.broadcast_to(marks_1L, pad_BL.shape), num_seen)

    def marks(self, block: Block, pad_Bn: Any, xp: Any = paddle) -> Any:
        """Marks of a block with this mask, `[B, n]` bool, see `nn.attention.BlockMask`."""
        if block.attends is Attends.CAUSAL:
            return xp.ones_like(pad_Bn)
        if block.attends is Attends.JOINED:
            return xp.zeros_like(pad_Bn)
        place_n = xp.arange(pad_Bn.shape[1])
        if block.source in CAMERA_MASKS:
            place_n = place_n % self.camera_tokens
        return xp.logical_or((place_n == 0)[None], xp.zeros_like(pad_Bn))

    def counts(self, batch: Mapping[str, np.ndarray], presence: Presence) -> "PrefixCounts":
        """Sums over a training batch of NumPy arrays, see `PrefixCounts`."""
        pad_BL, marks_BL, num_seen = self.masks(batch, presence, xp=np)
        seen_BL = np.zeros(pad_BL.shape, dtype=np.int64)
        for number, block_L in enumerate(np.cumsum(marks_BL, axis=1)):
            pad_L = pad_BL[number]
            real = block_L[pad_L]
            seen_BL[number, pad_L] = np.cumsum(np.bincount(real))[real]
        num_actions = batch["discrete_actions"].shape[1] if "discrete_actions" in batch else 0
        predicting = slice(pad_BL.shape[1] - 1 - num_actions, pad_BL.shape[1] - 1)
        return PrefixCounts(
            int(pad_BL.sum()),
            int(seen_BL.sum()),
            int(pad_BL[:, :num_seen].sum()),
            int(pad_BL[:, predicting].sum()),
            int(seen_BL[:, predicting].sum()),
        )

    def texts(self, blocks: Sequence[Block], batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Token ids, int64 `[B, n]`, of those blocks that are text, by name."""
        texts = [block for block in blocks if block.source in (Source.FIELD, Source.LABEL)]
        return {block.name: self.ids(block, batch) for block in texts}

    def ids(self, block: Block, batch: Mapping[str, Any]) -> Tensor:
        """Token ids of a block of text, int64 `[B, n]`."""
        if block.source is Source.FIELD:
            return batch[f"{block.text}_tokens"]
        row = _label_row(tuple(self.label_ids[block.text]))
        return paddle.tile(row, [batch["lang_tokens"].shape[0], 1])

    def _laid_out(
        self, batch: Mapping[str, Any], presence: Presence, training: bool
    ) -> list[Block]:
        embedded = self.embedded(batch, presence, training)
        return [block for block in embedded if presence.has(block, training)]

    def _num_tokens(self, block: Block, batch: Mapping[str, Any]) -> int:
        if block.source in CAMERA_MASKS:
            return len(batch[CAMERA_MASKS[block.source]]) * self.camera_tokens
        if block.source is Source.LABEL:
            return len(self.label_ids[block.text])
        names = {Source.STATE: "state", Source.ACTIONS: "discrete_actions"}
        return batch[names.get(block.source, f"{block.text}_tokens")].shape[1]

    def pad(self, block: Block, batch: Mapping[str, Any], xp: Any = paddle) -> Any:
        """Which tokens of a block are real, `[B, n]` bool."""
        if block.source in CAMERA_MASKS:
            pad_Bc = _by_camera(batch[CAMERA_MASKS[block.source]], xp)
            if xp is np:
                return np.repeat(pad_Bc, self.camera_tokens, axis=1)
            pad_BcM = paddle.expand(pad_Bc.unsqueeze(-1), [-1, -1, self.camera_tokens])
            return pad_BcM.flatten(1, 2)
        if block.source is Source.STATE:
            return real_frames(batch, xp)
        if block.source is Source.ACTIONS:
            return batch["discrete_action_masks"]
        if block.source is Source.FIELD:
            return batch[f"{block.text}_masks"]
        shape = [batch["lang_masks"].shape[0], len(self.label_ids[block.text])]
        pad = xp.ones(shape, dtype="bool")
        if block.hidden_without_subgoal:
            has_goal = _by_camera(batch[CAMERA_MASKS[Source.SUBGOALS]], xp).any(axis=1)
            pad = xp.logical_and(pad, has_goal[:, None])
        return pad


@host_table
def _label_row(ids: tuple[int, ...]) -> np.ndarray:
    return np.array([ids], dtype=np.int64)


def _by_camera(masks: Any, xp: Any) -> Any:
    """The masks of all cameras, `[B, c]`; a list has one for each."""
    return xp.stack(list(masks), axis=1) if isinstance(masks, list | tuple) else masks


class PrefixCounts(NamedTuple):
    """Sums over a batch.

    Attributes:
        num_tokens: real tokens.
        num_pairs: pairs of real tokens of which the first sees the second.
        num_seen: real tokens that the expert sees.
        num_predicting: real tokens, each before an action token.
        predicting_pairs: pairs of which the first is one of these.
    """

    num_tokens: int
    num_pairs: int
    num_seen: int
    num_predicting: int
    predicting_pairs: int
