"""Which parameters train, by the settings of the engine."""

from collections.abc import Collection

from paddle import nn

from paddle_vl.families.pi07.engine_config import Gemma3WithExpertConfig

_TOWER = "prefix.video_encoder.tower."
# Everything that learns from language and images alone.
_BACKBONE = (
    "prefix.video_encoder.",
    "prefix.embed_tokens.",
    "prefix.discrete_action_embedding.",
    "decoder.norm.",
    "da_head.",
)
_REPRESENTATION = (
    "prefix.discrete_action_embedding.",
    "prefix.state_proj.",
    "suffix.action_in_proj.",
    "action_out_proj.",
    "da_head.",
)

# What the flow's loss alone is about, and what the tokens' is.
_FLOW = ("suffix.", "action_out_proj.", "decoder.expert_norm.")
_TOKENS = ("decoder.norm.", "da_head.")
# Of the last backbone layer the expert reads keys and values only.
_KEYS_AND_VALUES = (
    "input_layernorm",
    "self_attn.k_norm",
    "self_attn.qkv_proj.k_proj",
    "self_attn.qkv_proj.v_proj",
)


def is_trained(name: str, config: Gemma3WithExpertConfig) -> bool:
    """Whether the parameter of this name trains.

    `freeze_vision_encoder` leaves the projector trainable; `train_expert_only` the projections of
    states, actions and time too.
    """
    if config.train_state_action_representation_only:
        return name.startswith(_REPRESENTATION)
    if config.train_vision_encoder_only:
        return name.startswith("prefix.video_encoder.")
    if config.train_expert_only and (name.startswith(_BACKBONE) or ".backbone_layer." in name):
        return False
    return not (config.freeze_vision_encoder and name.startswith(_TOWER))


def is_reached(
    name: str, config: Gemma3WithExpertConfig, insulated: bool, losses: Collection[str]
) -> bool:
    """Whether a gradient of these losses, of `MSE` and `CE`, comes to the parameter of this name.

    One that is always zero counts, as in the original: of the embedding of discrete actions, which
    are rows of the prefix that the expert does not see.

    Args:
        insulated: `knowledge_insulation`.
    """
    if name.startswith(_FLOW) or ".expert_layer." in name:
        return "MSE" in losses
    if "CE" in losses:
        return True
    if insulated or "MSE" not in losses or name.startswith(_TOKENS):
        return False
    last = config.gemma3_config.text_config.num_hidden_layers - 1
    end = name.removeprefix(f"decoder.layers.{last}.backbone_layer.")
    return end == name or end.startswith(_KEYS_AND_VALUES)


def freeze(model: nn.Layer, config: Gemma3WithExpertConfig) -> None:
    """Stop the gradients of the parameters that do not train."""
    for name, parameter in model.named_parameters():
        parameter.stop_gradient = not is_trained(name, config)


def uses_dropout(config: Gemma3WithExpertConfig) -> bool:
    """Whether dropout is active in training: not where the whole engine only carries gradients."""
    return not config.train_state_action_representation_only
