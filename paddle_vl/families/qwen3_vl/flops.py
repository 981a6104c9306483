"""Floating point operations of Qwen3-VL's decoder layers: linears, or router and K experts."""

from paddle_vl.families.flops import Operations
from paddle_vl.families.vlm.flops import VLFlops


class Qwen3VLFlops(VLFlops):
    """Counts the operations of batches, see `FlopCounter`."""

    def decoder_layer(self, operations: Operations, number: int, rows: bool) -> bool:
        text, layer = self.config.text_config, f"model.language_model.layers.{number}"
        width, attention = text.hidden_size, f"{layer}.self_attn"
        queries = text.num_attention_heads * text.head_dim
        keys = text.num_key_value_heads * text.head_dim
        normed = operations.norm(f"{layer}.input_layernorm", rows)
        q = operations.linear("tokens", f"{attention}.q_proj", width, queries, normed)
        k = operations.linear("tokens", f"{attention}.k_proj", width, keys, normed)
        v = operations.linear("tokens", f"{attention}.v_proj", width, keys, normed)
        q = operations.norm(f"{attention}.q_norm", q)
        k = operations.norm(f"{attention}.k_norm", k)
        seen = operations.attention("token_pairs", queries, q, k, v)
        rows |= operations.linear("tokens", f"{attention}.o_proj", queries, width, seen)
        normed = operations.norm(f"{layer}.post_attention_layernorm", rows)
        experts = text.experts_of(number)
        if experts is None:
            inner = text.intermediate_size
            gate = operations.linear("tokens", f"{layer}.mlp.gate_proj", width, inner, normed)
            up = operations.linear("tokens", f"{layer}.mlp.up_proj", width, inner, normed)
            return operations.linear("tokens", f"{layer}.mlp.down_proj", inner, width, gate or up)
        chosen, inner = experts.num_experts_per_tok, experts.moe_intermediate_size
        module, size = f"{layer}.mlp.experts", chosen * width * inner
        weights = operations.linear(
            "tokens", f"{layer}.mlp.gate", width, experts.num_experts, normed
        )
        hidden = operations.matrix("tokens", f"{module}.gate_up_proj", 2 * size, normed)
        return operations.matrix("tokens", f"{module}.down_proj", size, hidden) or weights
