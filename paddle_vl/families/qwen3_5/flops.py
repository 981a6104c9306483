"""Floating point operations of Qwen3.5's decoder layers.

Gated attention, whose scores grow with the length, or a gated DeltaNet, whose products per token do
not; then an MLP, or experts with a shared one. Of the convolution and the forward substitution only
the latter counts, as the matrix product that it is in blocks.
"""

from paddle_vl.families.flops import Operations
from paddle_vl.families.qwen3_5.config import Qwen3_5MoeTextConfig, Qwen3_5TextConfig
from paddle_vl.families.vlm.flops import VLFlops


class Qwen3_5Flops(VLFlops):
    """Counts the operations of batches, see `FlopCounter`."""

    def decoder_layer(self, operations: Operations, number: int, rows: bool) -> bool:
        text, layer = self.config.text_config, f"model.language_model.layers.{number}"
        normed = operations.norm(f"{layer}.input_layernorm", rows)
        mixer = _attention if text.is_full(number) else _delta_net
        rows |= mixer(operations, text, layer, normed)
        normed = operations.norm(f"{layer}.post_attention_layernorm", rows)
        if not isinstance(text, Qwen3_5MoeTextConfig):
            return rows | _mlp(
                operations, f"{layer}.mlp", text.hidden_size, text.intermediate_size, normed
            )
        return rows | _experts(operations, text, f"{layer}.mlp", normed)


def _attention(operations: Operations, text: Qwen3_5TextConfig, layer: str, normed: bool) -> bool:
    module, width = f"{layer}.self_attn", text.hidden_size
    queries = text.num_attention_heads * text.head_dim
    keys = text.num_key_value_heads * text.head_dim
    gated = operations.linear("tokens", f"{module}.q_proj", width, 2 * queries, normed)
    k = operations.linear("tokens", f"{module}.k_proj", width, keys, normed)
    v = operations.linear("tokens", f"{module}.v_proj", width, keys, normed)
    q = operations.norm(f"{module}.q_norm", gated)
    k = operations.norm(f"{module}.k_norm", k)
    seen = operations.attention("token_pairs", queries, q, k, v)
    return operations.linear("tokens", f"{module}.o_proj", queries, width, seen or gated)


def _delta_net(operations: Operations, text: Qwen3_5TextConfig, layer: str, normed: bool) -> bool:
    module, width = f"{layer}.linear_attn", text.hidden_size
    heads, values = text.linear_num_value_heads, text.value_width
    qkv = operations.linear(
        "tokens", f"{module}.in_proj_qkv", width, 2 * text.key_width + values, normed
    )
    z = operations.linear("tokens", f"{module}.in_proj_z", width, values, normed)
    b = operations.linear("tokens", f"{module}.in_proj_b", width, heads, normed)
    a = operations.linear("tokens", f"{module}.in_proj_a", width, heads, normed)
    inside = qkv or b or a
    inside |= operations.trains(f"{module}.conv1d.weight", f"{module}.A_log", f"{module}.dt_bias")
    # Every product of the delta rule has two operands with a gradient.
    operations.forward["tokens"] += 2 * text.delta_rule_size()
    operations.backward["tokens"] += 4 * text.delta_rule_size() * inside
    normed = operations.norm(f"{module}.norm", inside or z)
    return operations.linear("tokens", f"{module}.out_proj", values, width, normed)


def _mlp(operations: Operations, module: str, width: int, inner: int, normed: bool) -> bool:
    gate = operations.linear("tokens", f"{module}.gate_proj", width, inner, normed)
    up = operations.linear("tokens", f"{module}.up_proj", width, inner, normed)
    return operations.linear("tokens", f"{module}.down_proj", inner, width, gate or up)


def _experts(operations: Operations, text: Qwen3_5MoeTextConfig, module: str, normed: bool) -> bool:
    width = text.hidden_size
    size = text.num_experts_per_tok * width * text.moe_intermediate_size
    weights = operations.linear("tokens", f"{module}.gate", width, text.num_experts, normed)
    hidden = operations.matrix("tokens", f"{module}.experts.gate_up_proj", 2 * size, normed)
    routed = operations.matrix("tokens", f"{module}.experts.down_proj", size, hidden)
    shared = _mlp(
        operations,
        f"{module}.shared_expert",
        width,
        text.shared_expert_intermediate_size,
        normed,
    )
    gate = operations.linear("tokens", f"{module}.shared_expert_gate", width, 1, normed)
    return routed or weights or shared or gate
