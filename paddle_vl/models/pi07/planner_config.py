"""Configuration of pi07's high-level planner, under OpenTau's field names."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from paddle_vl.models.pi07.config import ATTENTION_IMPLEMENTATIONS
from paddle_vl.models.pi07.engine_config import Gemma3WithExpertConfig

# Settings that stand in `vlm_config` too, with their defaults.
_SHARED = {
    "attention_implementation": "eager",
    "dropout": 0.1,
    "freeze_vision_encoder": True,
    "gradient_checkpointing": False,
}


def _engine_without_expert() -> Gemma3WithExpertConfig:
    return Gemma3WithExpertConfig(disable_action_expert=True)


@dataclass(frozen=True)
class PI07PlannerConfig:
    """The planner: what it reads and writes, in tokens.

    Attributes:
        n_obs_steps: 1, it sees no history.
        memory_max_length, response_max_length: tokens that it writes at most, BOS among them.
        subtask_indicator_max_length, memory_indicator_max_length: tokens of the labels
            `Subtask: ` and `Updated Memory: `; None takes what the tokenizer gives.
    """

    vlm_config: Gemma3WithExpertConfig = field(default_factory=_engine_without_expert)
    n_obs_steps: int = 1
    max_state_dim: int = 32
    prompt_max_length: int = 256
    memory_max_length: int = 52
    response_max_length: int = 52
    metadata_max_length: int = 52
    subtask_indicator_max_length: int | None = None
    memory_indicator_max_length: int | None = None
    attention_implementation: str | None = None
    dropout: float | None = None
    freeze_vision_encoder: bool | None = None
    gradient_checkpointing: bool | None = None

    def __post_init__(self):
        if self.n_obs_steps != 1:
            raise ValueError(f"n_obs_steps is {self.n_obs_steps}; the planner sees one frame only")
        settled = {}
        for name, default in _SHARED.items():
            own, engine = getattr(self, name), getattr(self.vlm_config, name)
            if None not in (own, engine) and own != engine:
                raise ValueError(
                    f"{name} is {own} in the planner's configuration and {engine} in vlm_config: "
                    "give one of them, or the same value twice"
                )
            settled[name] = next((v for v in (own, engine) if v is not None), default)
        for name, value in settled.items():
            object.__setattr__(self, name, value)
        if self.attention_implementation not in ATTENTION_IMPLEMENTATIONS:
            raise ValueError(
                f"attention_implementation is {self.attention_implementation!r}; choose one of "
                f"{', '.join(ATTENTION_IMPLEMENTATIONS)}"
            )
        object.__setattr__(self, "vlm_config", replace(self.vlm_config, **settled))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "PI07PlannerConfig":
        """From a mapping with a `vlm_config` in it.

        Raises:
            ValueError: unknown or contradictory settings, named.
        """
        values, names = dict(values), {f.name for f in fields(cls)}
        if unknown := sorted(set(values) - names):
            raise ValueError(f"the planner does not know the settings {unknown}; remove them")
        if "vlm_config" in values:
            values["vlm_config"] = Gemma3WithExpertConfig.from_dict(values["vlm_config"])
        return cls(**values)
