"""Pipeline stages of a pi07 model, each a function of a batch, and the costs of its layers.

A stage sends one flat tensor: rows of the prefix, rows of the suffix and the condition of the
suffix's norms, concatenated. Every rank has the batch, so positions and masks are not sent, and
sender and receiver know the size from the batch's shapes and optional fields; micro-batches may
differ in both.

Shapes: T rows of the prefix of width D and T' of the suffix of width E on this rank;
R = T * D + 2 * T' * E.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import paddle
from paddle import Tensor

from paddle_vl.families.pi07.config import PI07Config, PI07PlannerConfig
from paddle_vl.families.pi07.decoder import DecoderOutput, Streams, StreamView, SuffixView
from paddle_vl.families.pi07.engine_config import Gemma3Config, Gemma3TextConfig, GemmaExpertConfig
from paddle_vl.families.pi07.flow import PI07LowLevelFlowMatching
from paddle_vl.families.pi07.layers import SharedConditions
from paddle_vl.families.pi07.planner import PI07HighLevelPlannerModel
from paddle_vl.families.pi07.policy_model import PolicyModel, as_tensors
from paddle_vl.families.pi07.prefix import ImageRows
from paddle_vl.families.pi07.prefix_layout import IMAGES, PrefixMasks, Presence, presence_of

_DRAWN = ("noise", "time", "delay")
# Relative cost of a frozen tower: forward only, while a backward pass costs two forward passes.
FROZEN_SHARE = 1 / 3

# Costs of each decoder layer, of everything before the layers, and of everything after them.
Costs = tuple[list[float], float, float]


class PI07Stage(ABC):
    """Consecutive decoder layers; the first stage also embeds, the last one computes the losses.

    Args:
        model: a model with these layers.
        layers: numbers of the layers.
    """

    # Whether the first stage runs the tower.
    reads_images = True

    def __init__(self, model: PolicyModel, layers: range):
        self.model, self.layers = model, layers
        text = model.config.vlm_config.gemma3_config.text_config
        self.is_first = layers.start == 0
        self.is_last = layers.stop == text.num_hidden_layers
        self.width = text.hidden_size

    def input_shape(self, batch: Mapping[str, Any]) -> tuple[int]:
        """(R,), the shape of the message that this stage receives, from the batch on the host."""
        shapes = self._shapes(batch, _presence(batch))
        return (sum(rows * width for rows, width in shapes),)

    def __call__(
        self, batch: Mapping[str, Any], arrived_R: Tensor | None = None
    ) -> Tensor | dict[str, Any]:
        """`[R]` for the next stage; the losses on the last stage.

        Args:
            batch: of the collator; `presence`, if given, replaces the batch's own.
            arrived_R: result of the previous stage; None on the first.
        """
        model, presence = self.model, _presence(batch)
        batch = {name: value for name, value in batch.items() if name != "presence"}
        # Other stages need the masks of the images, not the images.
        unread = () if self.is_first and self.reads_images else IMAGES
        batch |= as_tensors({name: batch[name] for name in batch if name not in unread})
        masks = model.tokens.masks(batch, presence)
        prefix_view, suffix_view = self._prefix_view(masks), self._suffix_view(masks)
        if self.is_first:
            streams = self._embedded(batch, presence)
        else:
            assert arrived_R is not None, "a later stage receives rows"
            streams = self._unpacked(arrived_R, self._shapes(batch, presence))
        decoder = model.decoder
        streams, _ = decoder.run_layers(self.layers, streams, prefix_view, suffix_view)
        if self.is_last:
            return self._losses(decoder.leave(streams, prefix_view, suffix_view), batch)
        sent = [rows for rows in streams if not isinstance(rows, SharedConditions | None)]
        return paddle.concat([rows.reshape([-1]) for rows in sent])

    def image_rows(self, batch: Mapping[str, Any]) -> ImageRows | None:
        """The tower's rows of the batch's images, where it does not run here."""
        return None

    def _shapes(self, batch: Mapping[str, Any], presence: Presence) -> list[tuple[int, int]]:
        """(rows, width) of each tensor of `Streams` in a message."""
        size, length = batch["lang_tokens"].shape[0], self.model.tokens.length(batch, presence)
        return [(self._num_rows(size * length), self.width)]

    def _num_rows(self, of_all: int) -> int:
        """This rank's share of `of_all` rows under sequence parallelism."""
        return -(-of_all // self.model.placement.ops.row_part.size)

    def _unpacked(self, arrived_R: Tensor, shapes: list[tuple[int, int]]) -> Streams:
        pieces = paddle.split(arrived_R, [rows * width for rows, width in shapes])
        streams = [x.reshape(list(shape)) for x, shape in zip(pieces, shapes, strict=True)]
        return Streams(*streams, *[None] * (len(Streams._fields) - len(streams)))

    def _prefix_view(self, masks: PrefixMasks) -> StreamView:
        return self.model.prefix_view(masks)

    def _suffix_view(self, masks: PrefixMasks) -> SuffixView | None:
        return None

    @abstractmethod
    def _embedded(self, batch: Mapping[str, Any], presence: Presence) -> Streams:
        """The rows before the first layer."""

    @abstractmethod
    def _losses(self, out: DecoderOutput, batch: Mapping[str, Any]) -> dict[str, Any]: ...


class PI07LowLevelStage(PI07Stage):
    """A stage of the low-level policy: layers of both streams."""

    model: PI07LowLevelFlowMatching

    def __call__(
        self, batch: Mapping[str, Any], arrived_R: Tensor | None = None
    ) -> Tensor | dict[str, Any]:
        """See `PI07Stage`.

        Raises:
            ValueError: noise, time or delay is missing: every stage would draw its own.
        """
        if missing := [name for name in _DRAWN if batch.get(name) is None]:
            raise ValueError(
                f"the batch has no {', '.join(missing)}: a batch that goes through a pipeline "
                "needs them, as the first stage mixes the actions with the noise and the last one "
                "compares; the collator adds them"
            )
        return super().__call__(batch, arrived_R)

    def _shapes(self, batch: Mapping[str, Any], presence: Presence) -> list[tuple[int, int]]:
        config = self.model.config
        steps = self._num_rows(batch["lang_tokens"].shape[0] * config.chunk_size)
        return [*super()._shapes(batch, presence), *[(steps, config.proj_width)] * 2]

    def _prefix_view(self, masks: PrefixMasks) -> StreamView:
        return self.model.training_view(masks)

    def _suffix_view(self, masks: PrefixMasks) -> SuffixView:
        return self.model.suffix_view(masks)

    def _embedded(self, batch: Mapping[str, Any], presence: Presence) -> Streams:
        model, noisy = self.model, self.model.noisy_actions(batch)
        prefix = model.prefix(batch, presence, image_rows=self.image_rows(batch))
        rows, cond = model.suffix(noisy.x_t, noisy.time, batch.get("group_index"))
        return model.decoder.enter(prefix.embs, rows, cond)

    def _losses(self, out: DecoderOutput, batch: Mapping[str, Any]) -> dict[str, Any]:
        return self.model.losses(out, self.model.noisy_actions(batch), batch)


class PI07PlannerStage(PI07Stage):
    """A stage of the planner: layers of the prefix alone."""

    model: PI07HighLevelPlannerModel

    def _embedded(self, batch: Mapping[str, Any], presence: Presence) -> Streams:
        prefix = self.model.prefix(batch, presence, image_rows=self.image_rows(batch))
        return self.model.decoder.enter(prefix.embs)

    def _losses(self, out: DecoderOutput, batch: Mapping[str, Any]) -> dict[str, Any]:
        return self.model.losses(out, batch)


def _presence(batch: Mapping[str, Any]) -> Presence:
    """The optional fields to lay out: the batch's `presence`, or those with content."""
    given = batch.get("presence")
    return presence_of(batch) if given is None else given


def layer_costs(config: PI07Config | PI07PlannerConfig) -> Costs:
    """Costs for balancing the stages of a pipeline.

    In multiplications for one sample with all optional fields. Attention scores are left out, since
    they cost the same in every layer.
    """
    vlm = config.vlm_config
    backbone, text = vlm.gemma3_config, vlm.gemma3_config.text_config
    cameras = sum(feature.type == "VISUAL" for feature in config.input_features.values())
    tokens = config.prompt_max_length + config.response_max_length + config.metadata_max_length
    if isinstance(config, PI07PlannerConfig):
        tokens += cameras * backbone.mm_tokens_per_image + config.memory_max_length
        layer, images, projected = tokens * _layer_cost(text), cameras, 0
        # The first token of memory and of response is not predicted.
        written = config.memory_max_length + config.response_max_length - 2
        after = written * text.hidden_size * text.vocab_size
    else:
        tokens += 2 * cameras * backbone.mm_tokens_per_image + config.n_obs_steps
        tokens += config.discrete_action_max_length
        layer = tokens * _layer_cost(text)
        layer += config.chunk_size * _expert_cost(vlm.gemma_expert_config)
        # The frames and the goal of every camera.
        images = cameras * (config.n_obs_steps + 1)
        width, actions = config.proj_width, config.max_action_dim
        projected = config.chunk_size * width * (actions + 2 * width)
        vocabulary = vlm.discrete_action_vocab_size or 0
        after = config.discrete_action_max_length * text.hidden_size * vocabulary
        after += config.chunk_size * width * actions
    before = _tower_cost(backbone, images, bool(vlm.freeze_vision_encoder)) + projected
    return [float(layer)] * text.num_hidden_layers, float(before), float(after)


def _layer_cost(config: Gemma3TextConfig | GemmaExpertConfig) -> int:
    """Cost per token."""
    heads = config.num_attention_heads + config.num_key_value_heads
    attention = 2 * config.hidden_size * heads * config.head_dim
    return attention + 3 * config.hidden_size * config.intermediate_size


def _expert_cost(config: GemmaExpertConfig) -> int:
    """Cost per step of a chunk; each of a layer's two norms computes scale, shift and gate."""
    return _layer_cost(config) + 2 * config.adarms_cond_dim * 3 * config.hidden_size


def _tower_cost(config: Gemma3Config, num_frames: int, is_frozen: bool) -> float:
    vision = config.vision_config
    width = vision.hidden_size
    block = 4 * width**2 + 2 * width * vision.intermediate_size
    patch = 3 * vision.patch_size**2 * width + vision.num_hidden_layers * block
    cost = num_frames * vision.num_patches * patch
    return cost * FROZEN_SHARE if is_frozen else cost
