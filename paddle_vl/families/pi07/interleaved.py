"""The decoder: layers that own a backbone half and an expert half, and run either or both.

Shapes: B batch, L prefix tokens of width D, C suffix tokens of width E; S keys. Inside, tokens are
rows, batch-major: T = B * L of the prefix and T' = B * C of the suffix, under sequence parallelism
this rank's part of them.

Both halves of a layer meet in attention alone: the suffix reads keys and values of the prefix, and
never the other way round. So the three ways to run it give the same numbers: both streams at once,
the prefix first and the suffix with what it left, or (decoding) pieces of the prefix in turn.

`sliding_window` has no effect on pi07, as in the original: every layer sees the whole prefix.
"""

from typing import NamedTuple

from paddle import Tensor, nn

from paddle_vl.families.pi07.engine_config import Gemma3WithExpertConfig
from paddle_vl.families.pi07.gemma_layers import BackboneLayer, ExpertLayer, KeyValue, StreamView
from paddle_vl.families.pi07.norms import AdaptiveRMSNorm, GemmaRMSNorm
from paddle_vl.families.pi07.rotary import Rotary
from paddle_vl.nn.attention import AttentionMask
from paddle_vl.nn.placement import Placement


class SuffixView:
    """How a suffix reads the prefix. Not a tuple: Paddle would look for tensors in it.

    Args:
        own: positions and mask of the suffix.
        num_keys: it sees so many of the prefix, the first ones.
        insulated: no gradient passes from it into the prefix.
    """

    def __init__(self, own: StreamView, num_keys: int, insulated: bool):
        self.own, self.num_keys, self.insulated = own, num_keys, insulated

    def read(self, prefix: KeyValue) -> KeyValue:
        """The keys and values that the suffix sees."""
        key, value = prefix
        if key.shape[1] != self.num_keys:
            key, value = key[:, : self.num_keys], value[:, : self.num_keys]
        return (key.detach(), value.detach()) if self.insulated else (key, value)


class InterleavedDecoderLayer(nn.Layer):
    """One layer of each stream; a unit for recomputation and sharding."""

    def __init__(self, config: Gemma3WithExpertConfig, number: int, placement: Placement):
        super().__init__()
        text = config.gemma3_config.text_config
        base, dropout = text.rope_base(number), config.dropout
        has_expert = not config.disable_action_expert
        is_last = number == text.num_hidden_layers - 1
        self.backbone_layer = BackboneLayer(
            text, base, dropout, placement, serves_tokens_alone=has_expert and is_last
        )
        self.expert_layer = (
            ExpertLayer(config.gemma_expert_config, base, dropout, placement)
            if has_expert
            else None
        )

    def forward(
        self,
        prefix_TD: Tensor | None,
        suffix_TE: Tensor | None = None,
        cond_TE: Tensor | None = None,
        prefix_view: StreamView | None = None,
        suffix_view: SuffixView | None = None,
        past: KeyValue | None = None,
        keep: bool = False,
    ) -> tuple[Tensor | None, ...]:
        """Run the streams that are given.

        Args:
            past: keys and values of an earlier call with a prefix; a suffix alone needs them.
            keep: return keys and values of the prefix too.

        Returns:
            The streams that are given, in order, and keys and values if they are to be kept.
        """
        rows: list[Tensor] = []
        if prefix_TD is not None:
            prefix_TD, past = self.backbone_layer(prefix_TD, prefix_view, past)
            rows.append(prefix_TD)
        if suffix_TE is not None:
            rows.append(
                self.expert_layer(suffix_TE, cond_TE, suffix_view.own, suffix_view.read(past))
            )
        return (*rows, *past) if keep else tuple(rows)


class DecoderOutput(NamedTuple):
    """`prefix` `[B, L, D]` and `suffix` `[B, C, E]` behind the final norms, None if not given."""

    prefix: Tensor | None
    suffix: Tensor | None
    cache: list[KeyValue] | None


class Streams(NamedTuple):
    """This rank's token rows of both streams, and what conditions the norms of the suffix; None for
    a stream that is not given.

    Attributes:
        prefix: `[T, D]`.
        suffix: `[T', E]`.
        cond: `[T', E]`, or `[C, E]` where all samples share it and ranks have all rows.
    """

    prefix: Tensor | None
    suffix: Tensor | None
    cond: Tensor | None


class InterleavedDecoder(nn.Layer):
    """The layers and the final norm of each stream. A rank of a pipeline has some of these layers,
    and a placeholder for each of the others.

    Attributes:
        attention_implementation: `eager` or `sdpa`, the configuration's until it is changed; read
            at every call.
    """

    def __init__(self, config: Gemma3WithExpertConfig, placement: Placement):
        super().__init__()
        self.config, self.placement = config, placement
        self.attention_implementation: str = config.attention_implementation
        text, expert = config.gemma3_config.text_config, config.gemma_expert_config
        self.layers = nn.LayerList(
            [
                InterleavedDecoderLayer(config, i, placement)
                if placement.stage_layers.has_layer(i)
                else nn.Identity()
                for i in range(text.num_hidden_layers)
            ]
        )
        self.norm, self.expert_norm = None, None
        if not placement.stage_layers.head:
            return
        self.norm = placement.layers.row_wise(GemmaRMSNorm(text.hidden_size, text.rms_norm_eps))
        if not config.disable_action_expert:
            sizes = (expert.hidden_size, expert.adarms_cond_dim, expert.rms_norm_eps)
            self.expert_norm = placement.layers.row_wise(AdaptiveRMSNorm(*sizes))

    def view(self, position_ids_BL: Tensor, visible_BLS: Tensor) -> StreamView:
        """What all layers need to know of a stream's tokens.

        Args:
            visible_BLS: bool, over keys from before and the stream's own.
        """
        text = self.config.gemma3_config.text_config
        rotary = {
            base: Rotary(position_ids_BL, text.head_dim, base)
            for base in {text.rope_base(i) for i in range(text.num_hidden_layers)}
        }
        return StreamView(
            tuple(position_ids_BL.shape),
            rotary,
            AttentionMask(visible_BLS),
            text.query_pre_attn_scalar**-0.5,
            self.attention_implementation,
        )

    def forward(
        self,
        prefix_BLD: Tensor | None,
        suffix_BCE: Tensor | None = None,
        cond_BCE: Tensor | None = None,
        prefix_view: StreamView | None = None,
        suffix_view: SuffixView | None = None,
        cache: list[KeyValue] | None = None,
        keep: bool = False,
    ) -> DecoderOutput:
        """Run the streams that are given through all layers.

        Args:
            cond_BCE: the condition of the suffix's norms, `[1, C, E]` where all samples share it.
            cache: keys and values by layer of an earlier call with a prefix, kept then.
            keep: return them, with the earlier ones in front.

        Raises:
            ValueError: a suffix without an expert, or without a prefix to see.
        """
        if suffix_BCE is not None and self.config.disable_action_expert:
            raise ValueError(
                "a suffix was given but disable_action_expert leaves no expert to run it"
            )
        if suffix_BCE is not None and prefix_BLD is None and cache is None:
            raise ValueError("a suffix was given without a prefix or the keys that one left")
        streams, every_layer = self.enter(prefix_BLD, suffix_BCE, cond_BCE), range(len(self.layers))
        streams, kept = self.run_layers(every_layer, streams, prefix_view, suffix_view, cache, keep)
        return self.leave(streams, prefix_view, suffix_view)._replace(cache=kept)

    def enter(
        self,
        prefix_BLD: Tensor | None,
        suffix_BCE: Tensor | None = None,
        cond_BCE: Tensor | None = None,
    ) -> Streams:
        """The rows as the layers take them."""
        streams = Streams(None, None, None)
        if prefix_BLD is not None:
            streams = streams._replace(prefix=self._enter(prefix_BLD))
        if suffix_BCE is None:
            return streams
        if self.placement.ops.row_part.size > 1:
            # Each row has a condition of its own.
            cond_BCE = cond_BCE.expand([*suffix_BCE.shape[:2], cond_BCE.shape[-1]])
        return streams._replace(suffix=self._enter(suffix_BCE), cond=self._enter(cond_BCE))

    def run_layers(
        self,
        layers: range,
        streams: Streams,
        prefix_view: StreamView | None = None,
        suffix_view: SuffixView | None = None,
        cache: list[KeyValue] | None = None,
        keep: bool = False,
    ) -> tuple[Streams, list[KeyValue] | None]:
        """Run some layers, one after the other; with the keys and values to be kept."""
        kept: list[KeyValue] = []
        for i in layers:
            past = None if cache is None else cache[i]
            rows = list(self.layers[i](*streams, prefix_view, suffix_view, past, keep))
            if streams.prefix is not None:
                streams = streams._replace(prefix=rows.pop(0))
            if streams.suffix is not None:
                streams = streams._replace(suffix=rows.pop(0))
            if keep:
                kept.append((rows[0], rows[1]))
        return streams, kept if keep else None

    def leave(
        self,
        streams: Streams,
        prefix_view: StreamView | None = None,
        suffix_view: SuffixView | None = None,
    ) -> DecoderOutput:
        """The rows behind the final norms, all of them again."""
        prefix_TD, suffix_TE, cond_TE = streams
        prefix_BLD = suffix_BCE = None
        if prefix_TD is not None:
            prefix_BLD = self._leave(self.norm(prefix_TD), prefix_view)
        if suffix_TE is not None:
            suffix_BCE = self._leave(self.expert_norm(suffix_TE, cond_TE)[0], suffix_view.own)
        return DecoderOutput(prefix_BLD, suffix_BCE, None)

    def _enter(self, x_BLD: Tensor) -> Tensor:
        """This rank's token rows."""
        x_TD = x_BLD.reshape([-1, x_BLD.shape[-1]])
        return self.placement.ops.enter_rows(self.placement.ops.pad_rows(x_TD))

    def _leave(self, x_TD: Tensor, view: StreamView) -> Tensor:
        x_TD = self.placement.ops.leave_rows(x_TD, view.num_rows)
        return x_TD.reshape([*view.shape, -1])
