"""Which parameters train, by the settings of the engine."""

from paddle import nn

from paddle_vl.models.pi07.engine_config import Gemma3WithExpertConfig

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


def freeze(model: nn.Layer, config: Gemma3WithExpertConfig) -> None:
    """Stop the gradients of the parameters that do not train."""
    for name, parameter in model.named_parameters():
        parameter.stop_gradient = not is_trained(name, config)


def uses_dropout(config: Gemma3WithExpertConfig) -> bool:
    """Whether dropout is active in training: not where the whole engine only carries gradients."""
    return not config.train_state_action_representation_only
