"""Base of both models of pi07: parameters, their checkpoint keys, and which are trained."""

from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
import paddle
from paddle import Tensor, nn

from paddle_vl.checkpoint.reading import Materializable, MaterializeStep, drawn_values
from paddle_vl.checkpoint.rules import StoredParameter, place_parameters
from paddle_vl.families.pi07.checkpoint_map import checkpoint_rules
from paddle_vl.families.pi07.config import PI07Config, PI07PlannerConfig
from paddle_vl.families.pi07.decoder import (
    DecoderOutput,
    InterleavedDecoder,
    StreamView,
    SuffixView,
    prefix_positions,
)
from paddle_vl.families.pi07.engine_config import Gemma3WithExpertConfig
from paddle_vl.families.pi07.prefix import Prefix, PrefixEmbedding
from paddle_vl.families.pi07.prefix_layout import (
    Block,
    PrefixMasks,
    PrefixTokens,
    Presence,
    presence_of,
)
from paddle_vl.nn.attention_masks import BlockMask
from paddle_vl.nn.linear import separate
from paddle_vl.nn.placement import Placement, SingleDevicePlacement

Model = TypeVar("Model", bound="PolicyModel")

_TOWER = "prefix.video_encoder.tower."
# Parameters of images and language alone.
_BACKBONE = (
    "prefix.video_encoder.",
    "prefix.embed_tokens.",
    "prefix.discrete_action_embedding.",
    "decoder.norm.",
    "da_head.",
)
_REPRESENTATION = (
    "prefix.discrete_action_embedding.",
    "prefix.state_proj.",
    "suffix.action_in_proj.",
    "action_out_proj.",
    "da_head.",
)
# Parameters that only the flow loss reaches, and those that only the token loss reaches.
_FLOW = ("suffix.", "action_out_proj.", "decoder.expert_norm.")
_TOKENS = ("decoder.norm.", "da_head.")
# The parameters of the last backbone layer whose outputs the expert reads.
_KEYS_AND_VALUES = (
    "input_layernorm",
    "self_attn.k_norm",
    "self_attn.qkv_proj.k_proj",
    "self_attn.qkv_proj.v_proj",
)


class PolicyModel(Materializable, nn.Layer):
    """A model, or this rank's shards and layers of it.

    Attributes:
        blocks: layout of the prefix.
        tokens: lengths and masks of the prefix.
        prefix: its embedding, a `PrefixEmbedding`; on pipeline stages without it None, or its tower
            alone.
        placement: which shards and layers this rank has.
        untrained_losses: losses that are computed without gradients.
    """

    blocks: ClassVar[tuple[Block, ...]]
    # Entries of a batch that are drawn if it has none.
    drawn: ClassVar[tuple[str, ...]] = ()
    prefix: Any
    decoder: InterleavedDecoder
    untrained_losses: frozenset[str] = frozenset()

    def __init__(
        self,
        config: PI07Config | PI07PlannerConfig,
        label_ids: Mapping[str, Sequence[int]],
        placement: Placement | None = None,
    ):
        """
        Args:
            label_ids: token ids, without special tokens, of each label of `blocks`.

        Raises:
            ValueError: a label has no ids, or the vocabulary of discrete actions is not known.
        """
        super().__init__()
        self.config, self.label_ids = config, label_ids
        self.placement = placement or SingleDevicePlacement()
        camera_tokens = config.vlm_config.gemma3_config.mm_tokens_per_image
        self.tokens, self.prefix = PrefixTokens(self.blocks, label_ids, camera_tokens), None
        if self.placement.stage_layers.tower:
            self.prefix = PrefixEmbedding(config, self.tokens, self.placement)

    def finish(self) -> None:
        """Register and freeze parameters, once all of them are made."""
        self.placement.parameter_table.add_replicated(self.parameters())
        for name, parameter in self.named_parameters():
            parameter.stop_gradient = not is_trained(name, self.config.vlm_config)

    def forward(
        self,
        batch: Mapping[str, Any],
        presence: Presence | None = None,
        per_sample: bool = False,
    ) -> dict[str, Any]:
        """The losses of a batch, see `losses`.

        Args:
            batch: NumPy arrays or tensors, see the model's class; lists have an entry per camera.
                Token ids are int64, masks bool (True: real, not padding), all else float32.
            presence: the optional fields to lay out; None for those with content in the batch.
            per_sample: also the policy's `MSE_per_sample` and `CE_per_sample`.
        """
        presence = presence_of(batch) if presence is None else presence
        batch = self.with_draws(as_tensors(batch))
        prefix = self.prefix(batch, presence)
        prefix_view, suffix_view = self.views(prefix)
        out = self.decoder(prefix.embs, *self.suffix_rows(batch), prefix_view, suffix_view)
        losses = self.losses(out, batch)
        return losses if per_sample else {n: x for n, x in losses.items() if "_per_" not in n}

    def with_draws(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch, on the device, with what is drawn for all parts of a step."""
        return batch

    def views(self, masks: Prefix | PrefixMasks) -> tuple[StreamView, SuffixView | None]:
        """Positions and masks of both streams in training."""
        return self.prefix_view(masks), None

    def suffix_rows(self, batch: Mapping[str, Any]) -> tuple[Tensor | None, Tensor | None]:
        """Rows of the suffix and the condition of its norms; None without one."""
        return None, None

    def stream_shapes(self, batch: Mapping[str, Any], presence: Presence) -> list[tuple[int, int]]:
        """(rows, width) of each tensor of `Streams`, of all ranks that divide the rows."""
        rows = batch["lang_tokens"].shape[0] * self.tokens.length(batch, presence)
        return [(rows, self.config.vlm_config.gemma3_config.text_config.hidden_size)]

    @abstractmethod
    def losses(self, out: DecoderOutput, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The losses by name, from the output of the decoder."""

    @property
    def decoder_layers(self) -> list[nn.Layer]:
        """This rank's decoder layers, the units of recomputation and parameter sharding."""
        layers = enumerate(self.decoder.layers)
        return [layer for i, layer in layers if self.placement.stage_layers.has_layer(i)]

    @property
    def vision_blocks(self) -> list[nn.Layer]:
        """This rank's tower layers, units of the same kind."""
        return [] if self.prefix is None else list(self.prefix.video_encoder.tower.layers)

    @property
    def tables(self) -> list[nn.Layer]:
        """This rank's token embedding and vocabulary head; tied ones share their `weight`."""
        layers = []
        if self.placement.stage_layers.embedding:
            layers.append(self.prefix.embed_tokens.table)
        head = getattr(self, "lm_head", None)
        return layers if head is None else [*layers, head]

    def prefix_view(self, masks: Prefix | PrefixMasks) -> StreamView:
        """Positions and mask of a prefix, for the decoder."""
        pad_BL = masks.pad_masks
        return self.decoder.view(prefix_positions(pad_BL), BlockMask(pad_BL, masks.att_masks))

    def stored_parameters(self) -> list[StoredParameter]:
        """This rank's parameters with checkpoint keys, without `model.`, and their shards.

        Each parameter is listed once, a fused one once for each of its linears.
        """
        rules = checkpoint_rules(self.config.vlm_config, self.config.per_group_projection)
        return place_parameters(self.named_parameters(), rules, self.placement.parameter_table)

    def hf_named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's parameters by checkpoint key; a fused one under the keys of its linears."""
        return ((item.key, item.parameter) for item in self.stored_parameters())

    def separate(self, weights: Iterable[Tensor]) -> None:
        """Split some fused weights into one per linear, see `paddle_vl.nn.linear`."""
        separate(self, weights, self.placement.layers.separate_projections)

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """Unsharded shapes of all parameters of the model, by checkpoint key."""
        return {item.key: item.stored_shape for item in self.whole().stored_parameters()}

    def whole(self: Model) -> Model:
        """The unsharded model, its parameters without storage; this one if it is not sharded."""
        if not self.placement.splits_parameters:
            return self
        with paddle.LazyGuard():
            return type(self)(self.config, self.label_ids)

    def fresh_values(self, keys: Collection[str] | None = None) -> list[MaterializeStep]:
        """Steps that draw initial values from Paddle's global random state.

        The model must have been built under `paddle.LazyGuard`. A rank gets its shards of what a
        single device draws with the same seed.

        Args:
            keys: of the parameters to draw; None for all.
        """

        def chosen(model: PolicyModel) -> list[StoredParameter]:
            return [p for p in model.stored_parameters() if keys is None or p.key in keys]

        splits = self.placement.splits_parameters
        return drawn_values(chosen(self), chosen(self.whole()) if splits else None)


def is_trained(name: str, config: Gemma3WithExpertConfig) -> bool:
    """Whether the configuration trains the parameter of this name.

    `freeze_vision_encoder` leaves the projector trainable; `train_expert_only` also the projections
    of states, actions and time.

    Source: the training settings of OpenTau's Gemma3WithExpertModel.
    """
    if config.train_state_action_representation_only:
        return name.startswith(_REPRESENTATION)
    if config.train_vision_encoder_only:
        return name.startswith("prefix.video_encoder.")
    if config.train_expert_only and (name.startswith(_BACKBONE) or ".backbone_layer." in name):
        return False
    return not (config.freeze_vision_encoder and name.startswith(_TOWER))


def is_reached(name: str, config: PI07Config | PI07PlannerConfig, losses: Collection[str]) -> bool:
    """Whether a gradient of these losses reaches the parameter of this name.

    As in OpenTau, a gradient that is always zero counts: that of the embedding of discrete actions,
    whose rows the expert does not see. All losses of the planner reach all of its parameters.
    """
    if isinstance(config, PI07PlannerConfig):
        return True
    if name.startswith(_FLOW) or ".expert_layer." in name:
        return "MSE" in losses
    if "CE" in losses:
        return True
    if config.knowledge_insulation or "MSE" not in losses or name.startswith(_TOKENS):
        return False
    last = config.vlm_config.gemma3_config.text_config.num_hidden_layers - 1
    end = name.removeprefix(f"decoder.layers.{last}.backbone_layer.")
    return end == name or end.startswith(_KEYS_AND_VALUES)


def as_tensors(values: Any) -> Any:
    """NumPy arrays as tensors, in nested mappings and lists; other values unchanged."""
    if isinstance(values, Mapping):
        return {name: as_tensors(value) for name, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [as_tensors(value) for value in values]
    if isinstance(values, (np.ndarray, np.generic)):
        # Paddle's stub knows no NumPy scalars.
        return paddle.to_tensor(values)  # pyright: ignore[reportArgumentType]
    return values
