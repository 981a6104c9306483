"""Floating point operations of decoders that mix gated DeltaNet layers and attention.

The scores of gated attention grow with the length, products per token of a DeltaNet do not. Of the
convolution and the forward substitution only the latter counts, as the matrix product that it is in
blocks.
"""

from typing import Any

from paddle_vl.families.flops import Operations
from paddle_vl.families.vlm.modeling.flops import VLFlops, attention
from paddle_vl.nn.delta_rule import chunked_size


class DeltaFlops(VLFlops):
    """Counts the operations of batches, see `FlopCounter`."""

    @classmethod
    def mixer(cls, layer: Operations, text: Any, number: int, normed: bool) -> bool:
        if text.is_full(number):
            return cls.attention(layer, text, normed)
        width, heads, values = text.hidden_size, text.linear_num_value_heads, text.value_width
        columns = {"qkv": 2 * text.key_width + values, "z": values, "b": heads, "a": heads}
        flows = {
            name: layer.linear(f"linear_attn.in_proj_{name}", width, count, normed)
            for name, count in columns.items()
        }
        inside = flows["qkv"] or flows["b"] or flows["a"]
        inside |= layer.trains(*(f"linear_attn.{n}" for n in ("conv1d.weight", "A_log", "dt_bias")))
        # Every product of the delta rule has two operands with a gradient.
        size = heads * chunked_size(text.linear_key_head_dim, text.linear_value_head_dim)
        layer.forward["tokens"] += 2 * size
        layer.backward["tokens"] += 4 * size * inside
        normed = layer.norm("linear_attn.norm", inside or flows["z"])
        return layer.linear("linear_attn.out_proj", values, width, normed)

    @classmethod
    def attention(cls, layer: Operations, text: Any, normed: bool) -> bool:
        """Count the attention of a layer that has it."""
        return attention(layer, text, normed, query_parts=2)
