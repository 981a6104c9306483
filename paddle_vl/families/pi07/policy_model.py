"""Base of both models of pi07: parameters, their checkpoint keys, and which are trained."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import paddle
from paddle import Tensor, nn

from paddle_vl.checkpoint.reading import Materializable, MaterializeStep, drawn_values
from paddle_vl.checkpoint.rules import StoredParameter, place_parameters
from paddle_vl.families.pi07.checkpoint_map import checkpoint_rules
from paddle_vl.families.pi07.config import PI07Config, PI07PlannerConfig
from paddle_vl.families.pi07.decoder import InterleavedDecoder, StreamView, prefix_positions
from paddle_vl.families.pi07.engine_config import Gemma3WithExpertConfig
from paddle_vl.families.pi07.prefix import Prefix
from paddle_vl.families.pi07.prefix_layout import PrefixMasks, PrefixTokens
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
        tokens: lengths and masks of the prefix.
        prefix: its embedding, a `PrefixEmbedding`; on pipeline stages without it None, or its tower
            alone.
        placement: which shards and layers this rank has.
        untrained_losses: losses that are computed without gradients.
    """

    tokens: PrefixTokens
    prefix: Any
    decoder: InterleavedDecoder
    untrained_losses: frozenset[str] = frozenset()

    def __init__(
        self,
        config: PI07Config | PI07PlannerConfig,
        label_ids: Mapping[str, Sequence[int]],
        placement: Placement | None = None,
    ):
        super().__init__()
        self.config, self.label_ids = config, label_ids
        self.placement = placement or SingleDevicePlacement()

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


def is_reached(
    name: str, config: Gemma3WithExpertConfig, insulated: bool, losses: Collection[str]
) -> bool:
    """Whether a gradient of these losses reaches the parameter of this name.

    As in OpenTau, a gradient that is always zero counts: that of the embedding of discrete actions,
    whose rows the expert does not see.

    Args:
        insulated: `knowledge_insulation`.
        losses: of `MSE` and `CE`.
    """
    if name.startswith(_FLOW) or ".expert_layer." in name:
        return "MSE" in losses
    if "CE" in losses:
        return True
    if insulated or "MSE" not in losses or name.startswith(_TOKENS):
        return False
    last = config.gemma3_config.text_config.num_hidden_layers - 1
    end = name.removeprefix(f"decoder.layers.{last}.backbone_layer.")
    return end == name or end.startswith(_KEYS_AND_VALUES)


def freeze(model: nn.Layer, config: Gemma3WithExpertConfig) -> None:
    """Stop the gradients of the parameters that are not trained."""
    for name, parameter in model.named_parameters():
        parameter.stop_gradient = not is_trained(name, config)


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
