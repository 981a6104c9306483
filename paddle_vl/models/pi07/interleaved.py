"""The decoder: layers that own a backbone half and an expert half, and run either or both.

Shapes: B batch, L prefix tokens of width D, C suffix tokens of width E; S keys.

Both halves of a layer meet in attention alone: the suffix reads keys and values of the prefix, and
never the other way round. So the three ways to run it give the same numbers: both streams at once,
the prefix first and the suffix with what it left, or (decoding) pieces of the prefix in turn.

`sliding_window` has no effect on pi07, as in the original: every layer sees the whole prefix.
"""

from typing import NamedTuple

from paddle import Tensor, nn

from paddle_vl.models.pi07.engine_config import Gemma3WithExpertConfig
from paddle_vl.models.pi07.gemma_layers import BackboneLayer, ExpertLayer, KeyValue, StreamView
from paddle_vl.models.pi07.norms import AdaptiveRMSNorm, GemmaRMSNorm
from paddle_vl.models.pi07.rotary import Rotary
from paddle_vl.nn.masked_attention import AttentionMask


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

    def __init__(self, config: Gemma3WithExpertConfig, number: int):
        super().__init__()
        text = config.gemma3_config.text_config
        base, dropout = text.rope_base(number), config.dropout
        self.backbone_layer = BackboneLayer(text, base, dropout)
        self.expert_layer = (
            None
            if config.disable_action_expert
            else ExpertLayer(config.gemma_expert_config, base, dropout)
        )

    def forward(
        self,
        prefix_BLD: Tensor | None,
        suffix_BCE: Tensor | None = None,
        cond_BCE: Tensor | None = None,
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
        if prefix_BLD is not None:
            prefix_BLD, past = self.backbone_layer(prefix_BLD, prefix_view, past)
            rows.append(prefix_BLD)
        if suffix_BCE is not None:
            rows.append(
                self.expert_layer(suffix_BCE, cond_BCE, suffix_view.own, suffix_view.read(past))
            )
        return (*rows, *past) if keep else tuple(rows)


class DecoderOutput(NamedTuple):
    """`prefix` `[B, L, D]` and `suffix` `[B, C, E]` behind the final norms, None if not given."""

    prefix: Tensor | None
    suffix: Tensor | None
    cache: list[KeyValue] | None


class InterleavedDecoder(nn.Layer):
    """The layers and the final norm of each stream.

    Attributes:
        attention_implementation: `eager` or `sdpa`, the configuration's until it is changed; read
            at every call.
    """

    def __init__(self, config: Gemma3WithExpertConfig):
        super().__init__()
        self.config = config
        self.attention_implementation: str = config.attention_implementation
        text, expert = config.gemma3_config.text_config, config.gemma_expert_config
        self.layers = nn.LayerList(
            [InterleavedDecoderLayer(config, i) for i in range(text.num_hidden_layers)]
        )
        self.norm = GemmaRMSNorm(text.hidden_size, text.rms_norm_eps)
        self.expert_norm = (
            None
            if config.disable_action_expert
            else AdaptiveRMSNorm(expert.hidden_size, expert.adarms_cond_dim, expert.rms_norm_eps)
        )

    def view(self, position_ids_BL: Tensor, visible_BLS: Tensor) -> StreamView:
        """What all layers need to know of a stream's tokens.

        Args:
            visible_BLS: bool, over keys from before and the stream's own.
        """
        text = self.config.gemma3_config.text_config
        rotary = {
            base: Rotary(
                position_ids_BL,
                text.head_dim,
                base,
                text.num_attention_heads,
                text.num_key_value_heads,
            )
            for base in {text.rope_base(i) for i in range(text.num_hidden_layers)}
        }
        return StreamView(
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
        kept: list[KeyValue] = []
        for i, layer in enumerate(self.layers):
            past = None if cache is None else cache[i]
            rows = list(
                layer(prefix_BLD, suffix_BCE, cond_BCE, prefix_view, suffix_view, past, keep)
            )
            if prefix_BLD is not None:
                prefix_BLD = rows.pop(0)
            if suffix_BCE is not None:
                suffix_BCE = rows.pop(0)
            if keep:
                kept.append((rows[0], rows[1]))
        if prefix_BLD is not None:
            prefix_BLD = self.norm(prefix_BLD)
        if suffix_BCE is not None:
            suffix_BCE, _ = self.expert_norm(suffix_BCE, cond_BCE)
        return DecoderOutput(prefix_BLD, suffix_BCE, kept if keep else None)
