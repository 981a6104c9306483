"""Floating point operations of PaddleOCR-VL: its tower's and projector's names."""

from paddle_vl.families.flops import Operations
from paddle_vl.families.vlm.modeling.flops import VLFlops

_TOWER = "visual.vision_model"


class PaddleOCRVLFlops(VLFlops):
    """Counts the operations of batches, see `VLFlops`."""

    decoder = "model"

    def tower(self, operations: Operations) -> tuple[bool, list[bool]]:
        vision, tower = self.config.vision_config, operations.at("patches", _TOWER)
        width, inner = vision.hidden_size, vision.intermediate_size
        rows = tower.linear("embeddings.patch_embedding", vision.patch_dim, width, False)
        rows |= tower.trains("embeddings.position_embedding.weight")
        for i in range(vision.depth):
            block = operations.at("patches", f"{_TOWER}.encoder.layers.{i}")
            normed = block.norm("layer_norm1", rows)
            q, k, v = (
                block.linear(f"self_attn.{name}", width, width, normed)
                for name in ("q_proj", "k_proj", "v_proj")
            )
            seen = block.attention("patch_pairs", width, q, k, v)
            rows |= block.linear("self_attn.out_proj", width, width, seen)
            hidden = block.linear("mlp.fc1", width, inner, block.norm("layer_norm2", rows))
            rows |= block.linear("mlp.fc2", inner, width, hidden)
        rows = tower.norm("post_layernorm", rows)
        merger, size = operations.at("merged_rows", "mlp_AR"), width * vision.spatial_merge_size**2
        rows = merger.linear("linear_1", size, size, merger.norm("pre_norm", rows))
        return merger.linear("linear_2", size, vision.out_hidden_size, rows), []
