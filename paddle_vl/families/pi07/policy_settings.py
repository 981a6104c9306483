"""`model.policy`: a run's changes of the policy's configuration. Read without Paddle.

Precedence, highest first: the run's `model.policy`; the `config.json` of the checkpoint that a
resumed run continues; otherwise that of `model.pretrained`, or `model.config`. The result is what
the run saves as `config.json`. `docs/policy_settings.md` has the settings and what they change.
"""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field

from paddle_vl.config.section import Section
from paddle_vl.families.pi07.config import PI07Config, PI07PlannerConfig
from paddle_vl.families.pi07.policy_config import ONLY_VALUES, UNUSED_SETTINGS
from paddle_vl.files.text_file import shown

Config = TypeVar("Config", bound=PI07Config | PI07PlannerConfig)
_Count = Annotated[int, Field(ge=1)]

# Settings of OpenTau that nothing here reads in a run, and what does their work.
_WITHOUT_EFFECT = dict.fromkeys(UNUSED_SETTINGS | set(ONLY_VALUES), "remove it") | {
    "optimizer_lr": "set train.learning_rate",
    "optimizer_betas": "set train.adam_beta1 and train.adam_beta2",
    "optimizer_eps": "set train.adam_epsilon",
    "optimizer_weight_decay": "set train.weight_decay",
    "scheduler_warmup_steps": "set train.warmup_steps",
    "scheduler_decay_steps": "set train.decay_steps",
    "scheduler_decay_lr": "set train.min_lr_ratio",
    "skip_normalization_weights": "set data.statistics",
    "pretrained_path": "set model.pretrained",
    "use_amp": "set model.compute_dtype",
    "device": "the launcher chooses the devices",
    "disable_internal_bf16_cast": "set model.compute_dtype",
    "load_pretrained_gemma3": "set model.pretrained",
}
# It says which policy the configuration is of.
del _WITHOUT_EFFECT["type"]
# What to do instead of changing a setting that belongs to a checkpoint.
_REMEDIES = {
    "discrete_action_tokenizer_path": "data.processor names the folder of the run's tokenizers",
    "vlm_config.discrete_action_vocab_size": "it follows from the action tokenizer",
    "normalization_mapping": "data.statistics gives other statistics of the same mode",
    "output_features": "data.statistics gives the statistics that other actions need",
}
# OpenTau has these in `vlm_config` only.
_ENGINE_ONLY = ("train_vision_encoder_only",)
_VISUAL = "VISUAL"


class PolicySettings(Section):
    """Changes of the policy's configuration, under OpenTau's names; what is left out stays.

    Other fields of the configuration are accepted too: over weights only with the value that the
    checkpoint has, with `model.config` with any value.
    """

    model_config = ConfigDict(extra="allow")

    freeze_vision_encoder: bool | None = None
    """do not train the vision tower (the projector is trained)"""
    train_expert_only: bool | None = None
    """do not train the backbone, its heads and the tower"""
    train_vision_encoder_only: bool | None = None
    """train only the vision tower and the projector"""
    train_state_action_representation_only: bool | None = None
    """train only the projections of states and actions, and the discrete actions' embedding and
    head"""
    knowledge_insulation: bool | None = None
    """the action loss does not train the backbone"""
    attention_implementation: Literal["eager", "sdpa"] | None = None
    """softmax in float32 over all keys (eager), or masked keys left out (sdpa)"""
    dropout: Annotated[float | None, Field(ge=0, lt=1)] = None
    """dropout probability after attention and MLP of both streams"""
    gradient_checkpointing: bool | None = None
    """activation recomputation; true does what train.recompute=full does"""
    n_obs_steps: _Count | None = None
    """frames of an observation, the current one included"""
    history_interval: _Count | None = None
    """steps of the data between two frames of an observation"""
    empty_cameras: Annotated[int | None, Field(ge=0)] = None
    """most cameras that a sample may lack; they are black and masked"""
    chunk_size: _Count | None = None
    """actions that the policy predicts at once"""
    n_action_steps: _Count | None = None
    """actions that the saved policy executes before its next prediction"""
    max_delay: Annotated[int | None, Field(ge=0)] = None
    """most actions of a chunk that are already given"""
    num_steps: _Count | None = None
    """steps of the saved policy from noise to actions"""
    prompt_max_length: _Count | None = None
    """tokens to which prompts are padded or cut"""
    response_max_length: _Count | None = None
    """tokens to which responses are padded or cut"""
    memory_max_length: _Count | None = None
    """tokens to which the planner's memories are padded or cut"""
    metadata_max_length: _Count | None = None
    """tokens to which metadata are padded or cut"""
    discrete_action_max_length: _Count | None = None
    """tokens to which discrete actions are padded or cut"""
    warn_outlier_threshold: Annotated[float | None, Field(ge=0)] = None
    """absolute value of normalized training data that logs a warning; 0 for never"""
    input_features: dict[str, Any] | None = None
    """features of an observation by name, all of them; over weights only the cameras may differ"""
    vlm_config: dict[str, Any] | None = None
    """the engine's level of the configuration, where OpenTau has some of these settings too"""

    @property
    def given(self) -> dict[str, Any]:
        """The settings that are not left out, those of `vlm_config` as `vlm_config.<name>`.

        Settings that are accepted at both levels have the name of the policy's level.
        """
        return {name: found[0] for name, found in self._found().items() if found[0] is not None}

    def problems(self) -> Iterator[str]:
        """Messages about settings that are unknown, without effect, or given twice."""
        known = _known_names()
        for name, values in self._found().items():
            setting = f"model.policy.{name}"
            last = name.rpartition(".")[2]
            if last in _WITHOUT_EFFECT:
                yield f"{setting} has no effect on a run here: {_WITHOUT_EFFECT[last]}"
            elif name.split(".")[0] not in known:
                nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
                yield f"{setting} is not a setting; did you mean model.policy.{nearest}?"
            if len(values) > 1 and values[0] != values[1]:
                yield (
                    f"{setting} is {shown(values[0])} and model.policy.vlm_config.{name} "
                    f"{shown(values[1])}: give one of them, or the same value twice"
                )

    def _found(self) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {}
        own = {name: value for name, value in self if name != "vlm_config"}
        at_both = {*PI07Config.shared_settings, *_ENGINE_ONLY}
        engine = {
            name if name in at_both else f"vlm_config.{name}": value
            for name, value in _leaves(self.vlm_config or {})
        }
        for level in (own, engine):
            for name, value in level.items():
                found.setdefault(name, []).append(value)
        # A level that is null says nothing.
        return {
            name: [value for value in values if value is not None] or [None]
            for name, values in found.items()
        }


def with_settings(
    base: Config, settings: PolicySettings, source: str, has_weights: bool, new_statistics: bool
) -> Config:
    """A policy's configuration with a run's `model.policy`.

    Args:
        base: of the checkpoint, or of model.config.
        source: where `base` comes from, for messages.
        has_weights: whether the model's weights come from there too.
        new_statistics: whether data.statistics replaces the checkpoint's statistics.

    Raises:
        ValueError: a setting contradicts the weights, other settings or the data's features, or has
            no effect; names it, both values and the remedy.
    """
    given = settings.given
    if not given:
        return base
    before = base.to_dict()
    for name, value in given.items():
        _check_exists(base, before, name)
        if has_weights and name == "input_features":
            _check_features(base, value, source, new_statistics)
        elif (
            has_weights
            and name not in PolicySettings.model_fields
            and value != (found := _at(before, name))
        ):
            remedy = _REMEDIES.get(name, "a policy of another form needs weights of its own")
            raise ValueError(
                f"model.policy.{name} is {shown(value)}, but {source}, whose weights the run "
                f"takes, has {shown(found)}: remove it ({remedy})"
            )
    for name, value in given.items():
        if name not in _ENGINE_ONLY:
            _set(before, name, value)
        if name in _ENGINE_ONLY or name in base.shared_settings:
            _set(before, f"vlm_config.{name}", value)
    try:
        changed = type(base).from_dict(before)
    except ValueError as error:
        listed = ", ".join(f"{name}: {shown(value)}" for name, value in given.items())
        raise ValueError(f"model.policy {{{listed}}} over {source}: {error}") from error
    for problem in _without_effect(changed, given):
        raise ValueError(problem)
    return changed


def _check_exists(base: PI07Config | PI07PlannerConfig, values: Any, name: str) -> None:
    if _at(values, name) is None and name not in {
        *_ENGINE_ONLY,
        *(field.name for field in fields(base)),
        *(f"vlm_config.{field.name}" for field in fields(base.vlm_config)),
    }:
        raise ValueError(
            f"model.policy.{name} is not a setting of a policy of type {base.policy_type}: remove "
            "it"
        )


def _check_features(
    base: PI07Config | PI07PlannerConfig, given: Any, source: str, new_statistics: bool
) -> None:
    """Refuse features that need other weights or statistics than those of the checkpoint."""
    if not isinstance(given, Mapping):
        return
    old = {name: feature.to_dict() for name, feature in base.input_features.items()}
    kinds = {feature.type for feature in base.input_features.values()}
    free = {_VISUAL} if base.normalization_mapping.get(_VISUAL, "IDENTITY") == "IDENTITY" else set()
    free = kinds if new_statistics else free

    def fixed(features: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: feature
            for name, feature in features.items()
            if not (isinstance(feature, Mapping) and feature.get("type") in free)
        }

    if (wanted := fixed(given)) != (found := fixed(old)):
        names = sorted(n for n in {*wanted, *found} if wanted.get(n) != found.get(n))
        raise ValueError(
            f"model.policy.input_features has {shown({n: wanted.get(n) for n in names})}, but "
            f"{source} has {shown({n: found.get(n) for n in names})} and the statistics of that: "
            "keep the checkpoint's, or give the statistics of your data in data.statistics"
        )
    width = base.max_state_dim
    for name, feature in given.items():
        values = feature if isinstance(feature, Mapping) else {}
        shape = values.get("shape")
        if values.get("type") == "STATE" and isinstance(shape, list) and sum(shape[:1]) > width:
            raise ValueError(
                f"model.policy.input_features has {name!r} with {shape[0]} dims, but the weights "
                f"of {source} take {width} (max_state_dim): choose fewer dims"
            )


def _without_effect(
    config: PI07Config | PI07PlannerConfig, given: Mapping[str, Any]
) -> Iterator[str]:
    """Messages about settings whose effect another setting takes away."""
    if isinstance(config, PI07PlannerConfig):
        return
    if "history_interval" in given and config.n_obs_steps == 1:
        yield (
            f"model.policy.history_interval is {config.history_interval}, but n_obs_steps is 1, so "
            "there are no past frames: remove it, or raise model.policy.n_obs_steps"
        )
    if config.train_state_action_representation_only and given.get("dropout"):
        yield (
            f"model.policy.dropout is {config.dropout}, but "
            "train_state_action_representation_only is true, which trains without dropout: remove "
            "one of them"
        )


def _known_names() -> list[str]:
    configs = (PI07Config, PI07PlannerConfig)
    own = {field.name for config in configs for field in fields(config)} - {"other"}
    return sorted({*own, *PolicySettings.model_fields, "type"})


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _at(values: Any, name: str) -> Any:
    for key in name.split("."):
        values = values.get(key) if isinstance(values, Mapping) else None
    return values


def _set(values: dict[str, Any], name: str, value: Any) -> None:
    *sections, last = name.split(".")
    for section in sections:
        values = values.setdefault(section, {})
    values[last] = value
