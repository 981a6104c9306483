"""The prefix, the backbone's input of images, texts and states: its layout as blocks of data, the
masks that follow from them, and its embedding.

Embedding, masks and FLOPs, in training and sampling, all use `PREFIX_BLOCKS` or, for the planner,
`PLANNER_BLOCKS`. The optional fields that a batch has depend on the data set and are the same on
all ranks: their blocks are always embedded. Which of these fields have content in any sample
differs between batches and ranks: only their blocks are laid out, that is, part of the prefix.
Every layer runs once per batch, and blocks that are not laid out stay in the graph with zero
tokens: ranks that shard parameters issue the same collectives.

Shapes: B batch, L prefix tokens, n tokens of a block, M tokens of an image, c cameras, F frames of
the history, S state values, Z images of all samples and cameras, D backbone width, U tower width;
G groups of data, I inputs and O outputs of a linear. Masks are True for real tokens. `xp` is
`numpy` or `paddle`.

Source: `embed_prefix` of OpenTau's PI07LowLevelFlowMatching and PI07HighLevelPlannerModel.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

import numpy as np
import paddle
from paddle import Tensor, nn
from paddle.nn.initializer import Initializer, Normal, Uniform

from paddle_vl.families.pi07.config import PI07Config, PI07PlannerConfig
from paddle_vl.families.pi07.vision import VideoEncoder
from paddle_vl.families.policy.model_inputs import fields_present
from paddle_vl.nn.linear import Embedding, Linear, linear
from paddle_vl.nn.operations import MaskGradient, slice_axis
from paddle_vl.nn.placement import Placement
from paddle_vl.nn.transfer import host_table

PAD_ID = 0
# From names of `IMAGES` to the tower's pooled rows `[Z * M, U]` of these images of a batch.
ImageRows = Callable[[Sequence[str]], Tensor]


class TokenSource(Enum):
    """Where the tokens of a block come from."""

    VIDEOS = auto()  # the video of every camera, one after the other
    IMAGES = auto()  # the image of every camera
    SUBGOALS = auto()  # the goal image of every camera
    STATE = auto()  # one token per frame of the history
    FIELD = auto()  # token ids of the batch: `<Block.text>_tokens` and `_masks`
    LABEL = auto()  # `Block.text` itself, tokenized
    ACTIONS = auto()  # discrete action tokens


# Batch entries with images, and the entry with the camera masks of each source.
IMAGES = {
    "videos": TokenSource.VIDEOS,
    "images": TokenSource.IMAGES,
    "subgoal_images": TokenSource.SUBGOALS,
}
CAMERA_MASKS = {
    TokenSource.VIDEOS: "vid_masks",
    TokenSource.IMAGES: "img_masks",
    TokenSource.SUBGOALS: "subgoal_img_masks",
}


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
    source: TokenSource
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
    Block("videos", TokenSource.VIDEOS, "", Attends.JOINED, When.ALWAYS),
    Block("language", TokenSource.FIELD, "lang", _CAUSAL, When.ALWAYS),
    Block("state_label", TokenSource.LABEL, "State: ", _CAUSAL, When.ALWAYS),
    Block("state", TokenSource.STATE, "", Attends.TOGETHER, When.ALWAYS),
    Block("state_end", TokenSource.LABEL, ", ", _CAUSAL, When.ANY_FIELD),
    Block("state_end_alone", TokenSource.LABEL, ":\n", _CAUSAL, When.NO_FIELD),
    Block("response", TokenSource.FIELD, "response", _CAUSAL, When.RESPONSE),
    Block("metadata", TokenSource.FIELD, "metadata", _CAUSAL, When.METADATA),
    Block("fields_end", TokenSource.LABEL, ";\n ", _CAUSAL, When.ANY_FIELD),
    Block("subgoal_label", TokenSource.LABEL, "Subgoal: ", _CAUSAL, When.SUBGOAL, True),
    Block("subgoals", TokenSource.SUBGOALS, "", Attends.TOGETHER, When.SUBGOAL),
    Block("subgoal_end", TokenSource.LABEL, ", ", _CAUSAL, When.SUBGOAL, True),
    # The action tail: the expert never sees what follows.
    Block("action_label", TokenSource.LABEL, "Action: ", _CAUSAL, When.TRAINING),
    Block("actions", TokenSource.ACTIONS, "", _CAUSAL, When.TRAINING),
)
MEMORY_LABEL, RESPONSE_LABEL = "Updated Memory: ", "Subtask: "
# The planner reads the state as text; its outputs are in the prefix in training only.
PLANNER_BLOCKS: tuple[Block, ...] = (
    Block("images", TokenSource.IMAGES, "", Attends.JOINED, When.ALWAYS),
    Block("language", TokenSource.FIELD, "lang", _CAUSAL, When.ALWAYS),
    Block("metadata", TokenSource.FIELD, "metadata", _CAUSAL, When.METADATA),
    Block("fields_end", TokenSource.LABEL, ";\n ", _CAUSAL, When.METADATA),
    Block("memory_label", TokenSource.LABEL, MEMORY_LABEL, _CAUSAL, When.ALWAYS),
    Block("memory", TokenSource.FIELD, "memory", _CAUSAL, When.TRAINING),
    Block("response_label", TokenSource.LABEL, RESPONSE_LABEL, _CAUSAL, When.TRAINING),
    Block("response", TokenSource.FIELD, "response", _CAUSAL, When.TRAINING),
)


def labels_of(blocks: tuple[Block, ...]) -> tuple[str, ...]:
    """The labels among blocks, each once."""
    return tuple(dict.fromkeys(b.text for b in blocks if b.source is TokenSource.LABEL))


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


def presence_of(batch: Mapping[str, Any]) -> Presence:
    """The optional fields to lay out: the batch's `presence`, or those with content in any sample.

    Call it on the collated NumPy batch: reading a mask on a GPU would wait for the device.
    """
    given = batch.get("presence")
    return Presence(*(fields_present(batch) if given is None else given))


def real_frames(batch: Mapping[str, Any], xp: Any) -> Any:
    """Which frames of the history are inside the episode: `[B, F]` bool; always the current one."""
    history, (size, frames) = batch.get("obs_history_is_pad"), batch["state"].shape[:2]
    is_current = xp.arange(frames) == frames - 1
    if history is None:
        return xp.broadcast_to(is_current, [size, frames])
    return xp.logical_or(xp.logical_not(history), is_current)


class Prefix(NamedTuple):
    """The masks `[B, L]` of a prefix, see `paddle_vl.nn.attention_masks.BlockMask`, and its rows
    `[B, L, D]` once it is embedded.

    Attributes:
        num_seen: number of leading tokens that the expert sees: those before the action tail, which
            exists in training only.
    """

    pad_masks: Any
    att_masks: Any
    num_seen: int
    embs: Any = None


class PaddedEmbedding(nn.Layer):
    """A table whose rows are scaled, in its dtype as in OpenTau; that of `PAD_ID` gets no gradient.

    Paddle's `padding_idx` would return zeros for it.
    """

    def __init__(self, table: nn.Layer, scale: float = 1.0):
        super().__init__()
        self.table, self.scale = table, scale

    @property
    def weight(self) -> Tensor:
        """`[num, D]`, or this rank's rows of it."""
        return self.table.weight

    def rows(self, ids_BL: Tensor) -> Tensor:
        """`forward` for inference: every row may have a gradient."""
        rows_BLD = self.table(ids_BL)
        if self.scale == 1.0:
            return rows_BLD
        return rows_BLD * paddle.full([], float(np.float32(self.scale)), rows_BLD.dtype)

    def forward(self, ids_BL: Tensor) -> Tensor:
        """int64 `[B, L]` to `[B, L, D]`."""
        return MaskGradient.apply(self.rows(ids_BL), ids_BL != PAD_ID)


class UnitRows(Initializer):
    """Draws a table as torch does by default: N(0, 1), and zero for padding."""

    def __init__(self):
        super().__init__()
        self.normal = Normal(std=1.0)

    def forward(self, var: Tensor, block=None) -> Tensor | None:
        drawn = paddle.empty(var.shape, dtype=var.dtype)
        self.normal(drawn, block)
        drawn[PAD_ID] = 0.0
        drawn._share_underline_tensor_to(var)
        return None


class GroupLinear(nn.Layer):
    """`x @ weight[group] + bias[group]`, weights `[G, I, O]`; group 0 by default."""

    def __init__(self, in_features: int, out_features: int, num_groups: int):
        super().__init__()
        bound = in_features**-0.5
        self.num_groups = num_groups
        self.weight = self.create_parameter(
            [num_groups, in_features, out_features], default_initializer=Uniform(-bound, bound)
        )
        self.bias = self.create_parameter(
            [num_groups, out_features], default_initializer=Uniform(-bound, bound)
        )

    def forward(self, x_BLI: Tensor, group_B: Tensor | None = None) -> Tensor:
        """`[B, L, I]` to `[B, L, O]`, with the int64 group of each sample."""
        if self.num_groups == 1 or group_B is None:
            return linear(x_BLI, self.weight[0], self.bias[0])
        weight_BIO = paddle.index_select(self.weight, group_B)
        bias_B1O = paddle.index_select(self.bias, group_B).unsqueeze(1)
        return paddle.matmul(x_BLI, weight_BIO) + bias_B1O


class GroupedProjection(nn.Layer):
    """A linear for all samples, whose weights have no group axis, or one per group."""

    def __init__(self, in_features: int, out_features: int, num_groups: int | None):
        super().__init__()
        self.is_grouped = num_groups is not None
        if num_groups is not None:
            self.linear = GroupLinear(in_features, out_features, num_groups)
        else:
            self.linear = Linear(in_features, out_features, True, bound=in_features**-0.5)

    def forward(self, x_BLI: Tensor, group_B: Tensor | None = None) -> Tensor:
        return self.linear(x_BLI, group_B) if self.is_grouped else self.linear(x_BLI)


class PrefixTokens:
    """Masks and token ids of a layout's blocks in a batch.

    It needs no weights, so a pipeline stage without embeddings can compute the masks too.

    Args:
        label_ids: token ids, without special tokens, of each label of the layout.
        camera_tokens: M.
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
        """
        fields = Presence(
            batch.get("response_tokens") is not None,
            batch.get("metadata_tokens") is not None,
            bool(batch.get("subgoal_images")),
        )
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
        names, length = {TokenSource.STATE: "state", TokenSource.ACTIONS: "discrete_actions"}, 0
        for block in self.embedded(batch, presence, training):
            if not presence.has(block, training):
                continue
            if block.source in CAMERA_MASKS:
                length += len(batch[CAMERA_MASKS[block.source]]) * self.camera_tokens
            elif block.source is TokenSource.LABEL:
                length += len(self.label_ids[block.text])
            else:
                length += batch[names.get(block.source, f"{block.text}_tokens")].shape[1]
        return length

    def masks(
        self,
        batch: Mapping[str, Any],
        presence: Presence,
        training: bool = True,
        xp: Any = paddle,
    ) -> Prefix:
        """The masks of the blocks that are laid out; it reads no images."""
        pads, marks, num_seen = [], [], 0
        for block in self.embedded(batch, presence, training):
            if not presence.has(block, training):
                continue
            pads.append(self.pad(block, batch, xp))
            # Made on the device: an array would be copied to it in every step.
            marks.append(self.marks(block, pads[-1][:1], xp))
            num_seen += pads[-1].shape[1] if block.when is not When.TRAINING else 0
        pad_BL, marks_1L = (
            (np.concatenate if xp is np else paddle.concat)(each, axis=1) for each in (pads, marks)
        )
        return Prefix(pad_BL, xp.broadcast_to(marks_1L, pad_BL.shape), num_seen)

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

    def texts(self, blocks: Sequence[Block], batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Token ids, int64 `[B, n]`, of those blocks that are text, by name."""
        texts = [
            block for block in blocks if block.source in (TokenSource.FIELD, TokenSource.LABEL)
        ]
        return {block.name: self.ids(block, batch) for block in texts}

    def ids(self, block: Block, batch: Mapping[str, Any]) -> Tensor:
        """Token ids of a block of text, int64 `[B, n]`."""
        if block.source is TokenSource.FIELD:
            return batch[f"{block.text}_tokens"]
        row = _label_row(tuple(self.label_ids[block.text]))
        return paddle.tile(row, [batch["lang_tokens"].shape[0], 1])

    def pad(self, block: Block, batch: Mapping[str, Any], xp: Any = paddle) -> Any:
        """Which tokens of a block are real, `[B, n]` bool."""
        if block.source in CAMERA_MASKS:
            pad_Bc = _by_camera(batch[CAMERA_MASKS[block.source]], xp)
            if xp is np:
                return np.repeat(pad_Bc, self.camera_tokens, axis=1)
            pad_BcM = paddle.expand(pad_Bc.unsqueeze(-1), [-1, -1, self.camera_tokens])
            return pad_BcM.flatten(1, 2)
        if block.source is TokenSource.STATE:
            return real_frames(batch, xp)
        if block.source is TokenSource.ACTIONS:
            return batch["discrete_action_masks"]
        if block.source is TokenSource.FIELD:
            return batch[f"{block.text}_masks"]
        shape = [batch["lang_masks"].shape[0], len(self.label_ids[block.text])]
        pad = xp.ones(shape, dtype="bool")
        if block.hidden_without_subgoal:
            has_goal = _by_camera(batch[CAMERA_MASKS[TokenSource.SUBGOALS]], xp).any(axis=1)
            pad = xp.logical_and(pad, has_goal[:, None])
        return pad


@host_table
def _label_row(ids: tuple[int, ...]) -> np.ndarray:
    return np.array([ids], dtype=np.int64)


def _by_camera(masks: Any, xp: Any) -> Any:
    """The masks of all cameras, `[B, c]`; a list has one for each."""
    return xp.stack(list(masks), axis=1) if isinstance(masks, list | tuple) else masks


class PrefixEmbedding(nn.Layer):
    """Embeds a prefix: the policy's of videos, texts, states and, in training, actions; the
    planner's of images and texts. On a pipeline stage without embeddings the tower alone."""

    def __init__(
        self,
        config: PI07Config | PI07PlannerConfig,
        tokens: PrefixTokens,
        placement: Placement,
    ):
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
            Embedding(vlm.discrete_action_vocab_size, width, law=UnitRows())
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
        """Embed a batch of the model, see its `forward`.

        Args:
            presence: the optional fields to lay out.
            training: add what is predicted: the policy's discrete actions, the planner's memory
                and response.
            image_rows: the tower's rows, made elsewhere; None runs the tower.
        """
        blocks = self.tokens.embedded(batch, presence, training)
        rows = self.embed_blocks(batch, blocks, presence.subgoal, image_rows)
        embs_BLD = joined(blocks, rows, presence, training)
        return self.tokens.masks(batch, presence, training)._replace(embs=embs_BLD)

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
        images = {}
        if any(block.source in CAMERA_MASKS for block in blocks):
            images = self._images(batch, with_goals, image_rows)
        for block in blocks:
            if block.source in CAMERA_MASKS:
                found[block.name] = images[block.source]
            elif block.source is TokenSource.STATE:
                found[block.name] = self.embed_state(batch)
            elif block.source is TokenSource.ACTIONS:
                found[block.name] = self.embed_actions(batch)
        return found

    def _images(
        self, batch: Mapping[str, Any], with_goals: bool, image_rows: ImageRows | None
    ) -> dict[TokenSource, Tensor]:
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
            found[IMAGES[name]] = of_cameras(rows, len(given[name]))
        if len(read) < len(given):
            # Never laid out; these rows keep the graph the same as with goals.
            found[TokenSource.SUBGOALS] = of_cameras(slice_axis(rows_ZMD, 0, size), 1)
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
