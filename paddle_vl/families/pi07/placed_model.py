"""What the models of pi07 share: a place among processes, and parameters in checkpoints."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import paddle
from paddle import Tensor, nn

from paddle_vl.checkpoint.reading import Materializable, MaterializeStep, drawn_values
from paddle_vl.checkpoint.rules import StoredParameter, place_parameters
from paddle_vl.families.pi07.attention_masks import block_mask, prefix_positions
from paddle_vl.families.pi07.checkpoint_map import checkpoint_rules
from paddle_vl.families.pi07.config import PI07Config
from paddle_vl.families.pi07.gemma_layers import StreamView
from paddle_vl.families.pi07.interleaved import InterleavedDecoder
from paddle_vl.families.pi07.planner_config import PI07PlannerConfig
from paddle_vl.families.pi07.prefix import Prefix
from paddle_vl.families.pi07.prefix_tokens import PrefixMasks, PrefixTokens
from paddle_vl.nn.linear import separate
from paddle_vl.nn.placement import Placement, SingleDevicePlacement

Model = TypeVar("Model", bound="PlacedModel")


class PlacedModel(Materializable, nn.Layer):
    """A model, or a rank's part of it.

    Attributes:
        tokens: of the prefix.
        prefix: what embeds it; None where this rank has no embedding.
        decoder_layers, vision_blocks: units for recomputation and sharding, those of this rank.
    """

    tokens: PrefixTokens
    prefix: nn.Layer | None
    decoder: InterleavedDecoder

    def __init__(
        self,
        config: PI07Config | PI07PlannerConfig,
        label_ids: Mapping[str, Sequence[int]],
        placement: Placement | None,
    ):
        super().__init__()
        self.config, self.label_ids = config, label_ids
        self.placement = placement or SingleDevicePlacement()

    @property
    def decoder_layers(self) -> list[nn.Layer]:
        layers = enumerate(self.decoder.layers)
        return [layer for i, layer in layers if self.placement.stage_layers.has_layer(i)]

    @property
    def vision_blocks(self) -> list[nn.Layer]:
        return [] if self.prefix is None else list(self.prefix.video_encoder.tower.layers)

    @property
    def tables(self) -> list[nn.Layer]:
        """The token embedding and the head of a vocabulary, those this rank has; tied ones share
        their `weight`."""
        layers = [] if self.prefix is None else [self.prefix.embed_tokens.table]
        head = getattr(self, "lm_head", None)
        return layers if head is None else [*layers, head]

    def prefix_view(self, masks: Prefix | PrefixMasks) -> StreamView:
        """Positions and mask of a prefix, for the decoder."""
        visible = block_mask(masks.pad_masks, masks.att_masks)
        return self.decoder.view(prefix_positions(masks.pad_masks), visible)

    def stored_parameters(self) -> list[StoredParameter]:
        """All that this rank stores of its parameters, with checkpoint keys (without `model.`) and
        layouts.

        A parameter stands there once, a fused one once for each of its linears.
        """
        rules = checkpoint_rules(self.config.vlm_config, self.config.per_group_projection)
        return place_parameters(self.named_parameters(), rules, self.placement.parameter_table)

    def hf_named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter of this rank under its checkpoint key, a fused one under those of its
        linears."""
        return ((item.key, item.parameter) for item in self.stored_parameters())

    def separate(self, weights: Iterable[Tensor]) -> None:
        """Give the linears of some fused weights a weight each, see `paddle_vl.nn.linear`."""
        separate(self, weights, self.placement.layers.separate_projections)

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all parameters of the whole model, whatever this rank has, by key."""
        return {item.key: item.stored_shape for item in self.whole().stored_parameters()}

    def whole(self: Model) -> Model:
        """The model that this one is a part of, its parameters without storage; or itself."""
        if not self.placement.splits_parameters:
            return self
        with paddle.LazyGuard():
            return type(self)(self.config, self.label_ids)

    def fresh_values(self, keys: Collection[str] | None = None) -> list[MaterializeStep]:
        """Steps that draw parameters, built under `paddle.LazyGuard`, from Paddle's global random
        state.

        A rank that holds parts gets its parts of what a single device with the same seed draws.

        Args:
            keys: of those to draw; None for all.
        """

        def chosen(model: PlacedModel) -> list[StoredParameter]:
            return [p for p in model.stored_parameters() if keys is None or p.key in keys]

        splits = self.placement.splits_parameters
        return drawn_values(chosen(self), chosen(self.whole()) if splits else None)
