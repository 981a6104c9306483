"""pi07's parameters under OpenTau's checkpoint keys (without `model.`)."""

from dataclasses import dataclass

import numpy as np

from paddle_vl.checkpoint.rules import LinearWeights, PatchKernel, Rule, Same
from paddle_vl.checkpoint.safetensors_io import StoredTensor
from paddle_vl.families.pi07.engine_config import Gemma3WithExpertConfig

# Not read, as in OpenTau: the expert predicts no tokens, and the backbone's head is tied to its
# token embedding.
UNUSED_KEYS = frozenset(
    {"gemma3_with_expert.gemma_expert.lm_head.weight", "gemma3_with_expert.gemma3.lm_head.weight"}
)
_RENAMES = (
    ("action_time_mlp_", "time_mlp_"),
    ("paligemma_with_expert.", "gemma3_with_expert."),
)


@dataclass(frozen=True)
class GroupWeights(Same):
    """Weights of groups are `[G, out, in]` in the checkpoint and `[G, in, out]` here."""

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (shape[0], *shape[:0:-1])

    def to_parameter(self, stored: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(stored.swapaxes(1, -1))

    def to_stored(self, value: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(value.swapaxes(1, -1))


def checkpoint_rules(config: Gemma3WithExpertConfig, is_grouped: bool = False) -> tuple[Rule, ...]:
    """Rules from parameter names to checkpoint keys, special cases first.

    Args:
        is_grouped: whether projections of states and actions have a group axis.
    """
    size = config.gemma3_config.vision_config.patch_size
    engine = "gemma3_with_expert"
    backbone, expert = f"{engine}.gemma3.model", f"{engine}.gemma_expert.model"
    tower, ours = f"{backbone}.vision_tower.vision_model", "prefix.video_encoder.tower"
    projection = GroupWeights() if is_grouped else LinearWeights()
    return (
        Rule(
            f"{ours}.patch_embedding.weight",
            f"{tower}.embeddings.patch_embedding.weight",
            PatchKernel((3, size, size)),
        ),
        Rule(f"{ours}.patch_embedding.bias", f"{tower}.embeddings.patch_embedding.bias", Same()),
        Rule(
            f"{ours}.position_embedding.weight",
            f"{tower}.embeddings.position_embedding.weight",
            Same(),
        ),
        Rule(f"{ours}.layers.*", f"{tower}.encoder.layers.*", LinearWeights()),
        Rule(f"{ours}.post_layernorm.*", f"{tower}.post_layernorm.*", Same()),
        Rule("prefix.video_encoder.projector.*", f"{backbone}.multi_modal_projector.*", Same()),
        Rule("prefix.embed_tokens.table.*", f"{backbone}.language_model.embed_tokens.*", Same()),
        Rule(
            "prefix.discrete_action_embedding.table.*",
            f"{engine}.discrete_action_embedding.*",
            Same(),
        ),
        Rule("prefix.state_proj.linear.*", "state_proj.*", projection),
        Rule("suffix.action_in_proj.linear.*", "action_in_proj.*", projection),
        Rule("action_out_proj.linear.*", "action_out_proj.*", projection),
        Rule("suffix.time_mlp_*", "time_mlp_*", LinearWeights()),
        Rule("decoder.layers.*", f"{engine}.interleaved_layers.*", LinearWeights()),
        Rule("decoder.norm.*", f"{backbone}.language_model.norm.*", Same()),
        Rule("decoder.expert_norm.*", f"{expert}.norm.*", LinearWeights()),
        Rule("da_head.*", f"{engine}.da_head.*", LinearWeights()),
        # The planner's head on a pipeline stage without the tied token embedding.
        Rule("lm_head.*", f"{backbone}.language_model.embed_tokens.*", Same()),
    )


def engine_keys(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """A checkpoint's tensors by key without `model.`; old names are replaced.

    Weights of the expert's norms are left out: adaptive norms have none.

    Source: the key renames of OpenTau's `from_pretrained`.
    """
    found = {}
    for key, tensor in stored.items():
        key = key.removeprefix("model.")
        for old, new in _RENAMES:
            key = key.replace(old, new)
        is_expert = ".expert_layer." in key or ".gemma_expert." in key
        if not (is_expert and key.endswith(("layernorm.weight", "model.norm.weight"))):
            found[key] = tensor
    return found
