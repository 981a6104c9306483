"""Floating point operations of Qwen3.5's mixers.

Gated attention, whose scores grow with the length, or a gated DeltaNet, whose products per token do
not. Of the convolution and the forward substitution only the latter counts, as the matrix product
that it is in blocks.
"""

from typing import Any

from paddle_vl.families.flops import Operations
from paddle_vl.families.vlm.modeling.flops import VLFlops, attention
from paddle_vl.nn.delta_rule import chunked_size


class Qwen3_5Flops(VLFlops):
    """Counts the operations of batches, see `FlopCounter`."""

    @classmethod
    def mixer(
        cls, operations: Operations, text: Any, number: int, layer: str, normed: bool
    ) -> bool:
        if text.is_full(number):
            return attention(operations, text, f"{layer}.self_attn", normed, query_parts=2)
        module, width = f"{layer}.linear_attn", text.hidden_size
        heads, values = text.linear_num_value_heads, text.value_width
        columns = {"qkv": 2 * text.key_width + values, "z": values, "b": heads, "a": heads}
        flows = {
            name: operations.linear("tokens", f"{module}.in_proj_{name}", width, count, normed)
            for name, count in columns.items()
        }
        inside = flows["qkv"] or flows["b"] or flows["a"]
        own = ("conv1d.weight", "A_log", "dt_bias")
        inside |= operations.trains(*(f"{module}.{name}" for name in own))
        # Every product of the delta rule has two operands with a gradient.
        size = heads * chunked_size(text.linear_key_head_dim, text.linear_value_head_dim)
        operations.forward["tokens"] += 2 * size
        operations.backward["tokens"] += 4 * size * inside
        normed = operations.norm(f"{module}.norm", inside or flows["z"])
        return operations.linear("tokens", f"{module}.out_proj", values, width, normed)
