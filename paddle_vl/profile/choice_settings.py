"""The settings of a run that a choice of recomputation or attention stands for. Without Paddle."""

from typing import Any

from paddle_vl.config.schema import RunConfig


def has_policy_settings(config: RunConfig) -> bool:
    """Whether the run's family has `model.policy`, OpenTau's settings of a policy."""
    return "policy" in type(config.model).model_fields


def recompute_settings(config: RunConfig, choice: str) -> dict[str, Any]:
    """The settings that turn activation recomputation on (`full`) or off (`none`)."""
    settings: dict[str, Any] = {"train.recompute": choice}
    if has_policy_settings(config):
        # A policy's own configuration may turn it on too.
        settings["model.policy.gradient_checkpointing"] = "true" if choice == "full" else "false"
    return settings


def attention_settings(config: RunConfig, choice: str) -> dict[str, Any]:
    """The setting of an attention implementation.

    Raises:
        ValueError: the run's family has no choice of it.
    """
    if not has_policy_settings(config):
        raise ValueError(
            f"attention implementation {choice}: a {config.family} run has no such choice, its "
            "device decides; leave --attention and ATTENTION_IMPL out"
        )
    return {"model.policy.attention_implementation": choice}
