"""What the layers of a pi07 model cost, for sharing them among the stages of a pipeline.

Costs are multiplications for a sample in which every optional part is laid out. Attention scores
are left out: they cost every layer the same.
"""

from paddle_vl.families.pi07.config import PI07Config
from paddle_vl.families.pi07.engine_config import (
    Gemma3Config,
    Gemma3TextConfig,
    GemmaExpertConfig,
)
from paddle_vl.families.pi07.planner_config import PI07PlannerConfig

# A backward pass takes twice the time of a forward pass; a frozen tower has none.
FROZEN_SHARE = 1 / 3

Costs = tuple[list[float], float, float]


def low_level_costs(config: PI07Config) -> Costs:
    """Of every decoder layer, and of what comes before and after them."""
    vlm = config.vlm_config
    backbone, text = vlm.gemma3_config, vlm.gemma3_config.text_config
    cameras = _num_cameras(config)
    tokens = 2 * cameras * backbone.mm_tokens_per_image + config.n_obs_steps
    tokens += config.prompt_max_length + config.response_max_length
    tokens += config.metadata_max_length + config.discrete_action_max_length
    layer = tokens * _layer_cost(text)
    layer += config.chunk_size * _expert_cost(vlm.gemma_expert_config)
    # Videos, and a goal of every camera.
    before = _tower_cost(backbone, cameras * (config.n_obs_steps + 1), vlm.freeze_vision_encoder)
    width = config.proj_width
    before += config.chunk_size * width * (config.max_action_dim + 2 * width)
    vocabulary = vlm.discrete_action_vocab_size or 0
    after = config.discrete_action_max_length * text.hidden_size * vocabulary
    after += config.chunk_size * width * config.max_action_dim
    return [float(layer)] * text.num_hidden_layers, float(before), float(after)


def planner_costs(config: PI07PlannerConfig) -> Costs:
    """Of every decoder layer, and of what comes before and after them."""
    vlm = config.vlm_config
    backbone, text = vlm.gemma3_config, vlm.gemma3_config.text_config
    cameras, written = _num_cameras(config), config.memory_max_length + config.response_max_length
    tokens = cameras * backbone.mm_tokens_per_image + written
    tokens += config.prompt_max_length + config.metadata_max_length
    layers = [float(tokens * _layer_cost(text))] * text.num_hidden_layers
    before = _tower_cost(backbone, cameras, vlm.freeze_vision_encoder)
    # No token predicts the first one of a segment.
    return layers, float(before), float((written - 2) * text.hidden_size * text.vocab_size)


def _num_cameras(config: PI07Config | PI07PlannerConfig) -> int:
    return sum(feature.type == "VISUAL" for feature in config.input_features.values())


def _layer_cost(config: Gemma3TextConfig | GemmaExpertConfig) -> int:
    """Of a token."""
    heads = config.num_attention_heads + config.num_key_value_heads
    attention = 2 * config.hidden_size * heads * config.head_dim
    return attention + 3 * config.hidden_size * config.intermediate_size


def _expert_cost(config: GemmaExpertConfig) -> int:
    """Of a step of a chunk: each of a layer's two norms has scale, shift and gate to compute."""
    return _layer_cost(config) + 2 * config.adarms_cond_dim * 3 * config.hidden_size


def _tower_cost(config: Gemma3Config, num_frames: int, is_frozen: bool) -> float:
    vision = config.vision_config
    width = vision.hidden_size
    block = 4 * width**2 + 2 * width * vision.intermediate_size
    patch = 3 * vision.patch_size**2 * width + vision.num_hidden_layers * block
    cost = num_frames * vision.num_patches * patch
    return cost * FROZEN_SHARE if is_frozen else cost
