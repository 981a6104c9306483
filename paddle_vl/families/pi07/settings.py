"""Settings of a pi07 policy or planner run, beyond those of every run. Read without Paddle.

`model.policy` changes the policy's configuration. Precedence, highest first: the run's
`model.policy`; the `config.json` of the checkpoint that a resumed run continues; otherwise that of
`model.pretrained`, or `model.config`, where `model.pretrained` may be the backbone. The result is
what the run saves as `config.json`. `docs/policies.md` has the settings and what they change.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_type_hints

from pydantic import ConfigDict, Field, create_model

from paddle_vl.config.families import model_values
from paddle_vl.config.parallel_settings import ParallelConfig
from paddle_vl.config.schema import DataConfig, LoRAConfig, ModelConfig, RunConfig, TrainConfig
from paddle_vl.config.section import FilePath, Section, flatten, named
from paddle_vl.families.pi07.config import (
    ONLY_VALUES,
    UNUSED_SETTINGS,
    Gemma3Config,
    Gemma3WithExpertConfig,
    PI07Config,
    PI07PlannerConfig,
    PolicyConfig,
)
from paddle_vl.families.policy.features import (
    IMAGE_TRANSFORMS,
    DropProbabilities,
    ImageTransforms,
)
from paddle_vl.families.policy.robot_settings import DatasetMixtureConfig
from paddle_vl.files.names import nearest
from paddle_vl.files.stored_settings import descriptions
from paddle_vl.files.text_file import shown

Config = TypeVar("Config", bound=PolicyConfig)
# Named groups of parameters for model.freeze and train.part_learning_rates, as patterns over
# checkpoint keys.
_ENGINE = "model.gemma3_with_expert"
PARTS: dict[str, tuple[str, ...]] = {
    "vision": (f"{_ENGINE}.gemma3.model.vision_tower.*",),
    "projector": (f"{_ENGINE}.gemma3.model.multi_modal_projector.*",),
    "backbone": (
        f"{_ENGINE}.gemma3.model.language_model.*",
        f"{_ENGINE}.interleaved_layers.*.backbone_layer.*",
    ),
    "expert": (
        f"{_ENGINE}.gemma_expert.*",
        f"{_ENGINE}.interleaved_layers.*.expert_layer.*",
        "model.action_in_proj.*",
        "model.action_out_proj.*",
        "model.time_mlp_*",
    ),
    "state": ("model.state_proj.*",),
    "discrete_actions": (f"{_ENGINE}.discrete_action_embedding.*", f"{_ENGINE}.da_head.*"),
}
# Settings that fit every weight. The trained parameters or the samples depend on the first ones, so
# that a resumed run may change only the others.
_FIXED_POLICY_SETTINGS = (
    *("freeze_vision_encoder", "train_expert_only", "train_vision_encoder_only"),
    *("train_state_action_representation_only", "knowledge_insulation", "n_obs_steps"),
    *("history_interval", "empty_cameras", "chunk_size", "max_delay", "input_features"),
    *("prompt_max_length", "response_max_length", "memory_max_length", "metadata_max_length"),
    "discrete_action_max_length",
)
_CHANGEABLE = (
    *_FIXED_POLICY_SETTINGS,
    *("attention_implementation", "dropout", "gradient_checkpointing", "n_action_steps"),
    *("num_steps", "warn_outlier_threshold", "vlm_config"),
)
# Settings of OpenTau that nothing here reads in a run, and what does their work.
_WITHOUT_EFFECT = dict.fromkeys({*UNUSED_SETTINGS, *ONLY_VALUES} - {"type"}, "remove it") | {
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
# What to do instead of changing a setting that belongs to a checkpoint.
_REMEDIES = {
    "discrete_action_tokenizer_path": "data.processor names the folder of the run's tokenizers",
    "vlm_config.discrete_action_vocab_size": "it follows from the action tokenizer",
    "normalization_mapping": "data.statistics gives other statistics of the same mode",
    "output_features": "data.statistics gives the statistics that other actions need",
}
# OpenTau has these in `vlm_config` only.
_ENGINE_ONLY = ("train_vision_encoder_only",)
_AT_BOTH_LEVELS = {*PI07Config.shared_settings, *_ENGINE_ONLY}


def _optional_fields() -> dict[str, Any]:
    """The changeable settings, of either configuration, as fields of a section."""
    hints: dict[str, Any] = {}
    meanings: dict[str, str | None] = {}
    for config in (Gemma3WithExpertConfig, PI07PlannerConfig, PI07Config):
        hints |= get_type_hints(config, include_extras=True)
        meanings |= descriptions(config)
    # What YAML gives; the configuration checks it.
    hints |= dict.fromkeys(("input_features", "vlm_config"), dict[str, Any])
    return {
        name: (hints[name] | None, Field(default=None, description=meanings[name]))
        for name in _CHANGEABLE
    }


class PolicySettings(create_model("PolicySettings", __base__=Section, **_optional_fields())):
    """Changes of the policy's configuration, under OpenTau's names; what is left out stays.

    Other fields of the configuration are accepted too: over weights only with the value that the
    checkpoint has, with `model.config` with any value.
    """

    model_config = ConfigDict(extra="allow")

    @property
    def given(self) -> dict[str, Any]:
        """The settings that are not left out, those of `vlm_config` as `vlm_config.<name>`.

        Settings that are accepted at both levels have the name of the policy's level.
        """
        return {name: found[0] for name, found in self._found().items() if found[0] is not None}

    def problems(self) -> Iterator[str]:
        """Messages about settings that are unknown, without effect, or given twice."""
        known = sorted({*descriptions(PI07Config), *descriptions(PI07PlannerConfig), *_CHANGEABLE})
        for name, values in self._found().items():
            setting, last = f"model.policy.{name}", name.rpartition(".")[2]
            if last in _WITHOUT_EFFECT:
                yield f"{setting} has no effect on a run here: {_WITHOUT_EFFECT[last]}"
            elif name.split(".")[0] not in (*known, "type"):
                yield f"{setting} is not a setting; {nearest(name, known, 'model.policy.')}"
            if len(values) > 1 and values[0] != values[1]:
                yield (
                    f"{setting} is {shown(values[0])} and model.policy.vlm_config.{name} "
                    f"{shown(values[1])}: give one of them, or the same value twice"
                )

    def _found(self) -> dict[str, list[Any]]:
        """The values of each setting, of the policy's level first; null only if it is alone."""
        own = dict(self)
        engine = flatten(own.pop("vlm_config") or {})
        found = {name: [value] for name, value in own.items()}
        for name, value in engine.items():
            key = name if name in _AT_BOTH_LEVELS else f"vlm_config.{name}"
            found.setdefault(key, []).append(value)
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
        ValueError: a setting contradicts weights, other settings or data, or has no effect.
    """
    given, values = settings.given, base.to_dict()
    if not given:
        return base
    before = flatten(values)
    for name, value in given.items():
        if has_weights and name == "input_features":
            _check_features(base, value, source, new_statistics)
        elif has_weights and name not in _CHANGEABLE and value != (found := before.get(name)):
            remedy = _REMEDIES.get(name, "a policy of another form needs weights of its own")
            raise ValueError(
                f"model.policy.{name} is {shown(value)}, but {source}, whose weights the run "
                f"takes, has {shown(found)}: remove it ({remedy})"
            )
        if name in _AT_BOTH_LEVELS:
            # It would contradict the given one.
            values["vlm_config"].pop(name, None)
        section, path = values, f"vlm_config.{name}" if name in _ENGINE_ONLY else name
        *parents, last = path.split(".")
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    try:
        changed = type(base).from_dict(values)
    except ValueError as error:
        listed = ", ".join(f"{name}: {shown(value)}" for name, value in given.items())
        raise ValueError(f"model.policy {{{listed}}} over {source}: {error}") from error
    if isinstance(changed, PI07Config):
        _refuse_without_effect(changed, given)
    return changed


def _check_features(
    base: PolicyConfig, given: Mapping[str, Any], source: str, new_statistics: bool
) -> None:
    """Refuse features that need other weights or statistics than those of the checkpoint."""
    old = {name: feature.to_dict() for name, feature in base.input_features.items()}
    free = {feature["type"] for feature in old.values()} if new_statistics else {"VISUAL"}
    if not new_statistics and base.normalization_mapping.get("VISUAL", "IDENTITY") != "IDENTITY":
        free = set()
    # The configuration refuses what is no feature.
    wanted, found = (
        {n: f for n, f in of.items() if not isinstance(f, Mapping) or f.get("type") not in free}
        for of in (given, old)
    )
    if names := sorted(n for n in {*wanted, *found} if wanted.get(n) != found.get(n)):
        raise ValueError(
            f"model.policy.input_features has {shown({n: wanted.get(n) for n in names})}, but "
            f"{source} has {shown({n: found.get(n) for n in names})} and the statistics of that: "
            "keep the checkpoint's, or give the statistics of your data in data.statistics"
        )


def _refuse_without_effect(config: PI07Config, given: Mapping[str, Any]) -> None:
    """Refuse settings whose effect another setting takes away."""
    if "history_interval" in given and config.n_obs_steps == 1:
        raise ValueError(
            f"model.policy.history_interval is {config.history_interval}, but n_obs_steps is 1, so "
            "there are no past frames: remove it, or raise model.policy.n_obs_steps"
        )
    if config.train_state_action_representation_only and given.get("dropout"):
        raise ValueError(
            f"model.policy.dropout is {config.dropout}, but "
            "train_state_action_representation_only is true, which trains without dropout: remove "
            "one of them"
        )


# Of pi07's modules, what openpi and LeRobot adapt. Openpi trains all that is not of the language
# model in full; here this is also what embeds and predicts discrete actions.
_LORA: dict[str, dict[str, Any]] = {
    "openpi": {
        "r": 16,
        "lora_alpha": 16,
        "target_modules": ["*_layer.self_attn.*_proj", "*_layer.mlp.*_proj"],
        "rank_pattern": {"expert": 32},
        "alpha_pattern": {"expert": 32},
        "init_lora_weights": "openpi",
        "modules_to_save": [
            *("vision", "projector", "state", "discrete_actions", "action_in_proj"),
            *("action_out_proj", "time_mlp_in", "time_mlp_out"),
        ],
    },
    "lerobot": {
        "r": 16,
        "lora_alpha": 8,
        "target_modules": [
            *("*.expert_layer.self_attn.q_proj", "*.expert_layer.self_attn.v_proj"),
            *("state_proj", "action_in_proj", "action_out_proj", "time_mlp_in", "time_mlp_out"),
        ],
    },
}


class PI07ModelConfig(ModelConfig):
    """The policy or planner to train."""

    lora: Annotated[LoRAConfig | None, named(_LORA)] = None
    """train low-rank adapters on a frozen model.pretrained: settings, or openpi or lerobot for what
    those train"""

    policy: PolicySettings = PolicySettings()
    """changes of the configuration that the checkpoint or model.config has, under OpenTau's names;
    see docs/policies.md"""


class PI07DataConfig(DataConfig):
    """Demonstrations, their statistics, and what is dropped from them."""

    synthetic_samples: Annotated[int | None, Field(ge=1, le=10_000_000)] = None
    """number of generated demonstrations to train on instead of data.train"""
    dataset_mixture: DatasetMixtureConfig | None = None
    """LeRobot datasets to train on instead of data.train, with OpenTau's names; see
    docs/robot_data.md"""
    data_features_name_mapping: dict[str, str] = Field(default={})
    """columns of LeRobot datasets in data.train and data.eval by standard names (camera0, state,
    actions, prompt, ...), as in data.dataset_mixture"""
    groups: dict[str, str] = Field(default={})
    """statistics group (robot::control mode) of each file of data.train and data.eval; each group
    is normalised with its own statistics"""
    fields: list[str] | None = None
    """optional fields that samples have (response, subgoal, speed, ...), the same on every rank;
    default: the fields found in any line of data.train"""
    statistics: FilePath | None = None
    """JSON file with the statistics that normalise states and actions; default: the checkpoint's,
    or for a new policy those of the training data"""
    drops: DropProbabilities = DropProbabilities()
    """probabilities of dropping optional fields from a training sample"""
    action_errors: bool | None = None
    """in evaluations also sample actions, from the same noise every time, and report their errors
    per dim in the units of the data; default: unless the model is divided into pipeline stages"""
    action_groups: dict[str, Annotated[list[int], Field(min_length=1)]] = Field(default={})
    """named action dims whose errors are reported together too, {arm: [0, 1, 2], gripper: [3]}"""
    image_transforms: Annotated[ImageTransforms | None, named(IMAGE_TRANSFORMS)] = None
    """random changes of the images of training samples: settings, or openpi or lerobot for what
    those do"""

    def names_a_file(self, entry: str) -> bool:
        # A folder is a LeRobot dataset.
        return not Path(entry).is_dir()

    @property
    def has_eval(self) -> bool:
        return bool(self.eval or (self.dataset_mixture and self.dataset_mixture.has_held_out))


class PI07ParallelConfig(ParallelConfig):
    """How ranks agree on optional prompt parts."""

    branch_sync: Literal["hoisted", "all_reduce"] = "hoisted"
    """optional prompt parts in a rank's batch: those that its own samples have (hoisted), or, as in
    OpenTau, those that any rank has in this micro-batch (all_reduce)"""


class PI07TrainConfig(TrainConfig):
    """The weights of the losses."""

    loss_weighting: dict[str, Annotated[float, Field(ge=0)]] | None = None
    """weights of the losses MSE (flow matching) and CE (tokens); a weight of 0 leaves the loss out,
    and parameters that only it reaches are not trained; default: 1 each"""


class PI07Run(RunConfig):
    """All settings of a pi07 run, policy or planner."""

    family: ClassVar[str] = "pi07"
    has_colocated: ClassVar[bool] = True
    backbones: ClassVar[tuple[str, ...]] = (Gemma3Config.type_name,)
    parts: ClassVar[dict[str, tuple[str, ...]]] = PARTS
    fixed_settings: ClassVar[tuple[str, ...]] = (
        *RunConfig.fixed_settings,
        *("model.lora", "data.synthetic_samples", "data.groups", "data.fields", "data.drops"),
        *("data.dataset_mixture", "data.data_features_name_mapping", "data.image_transforms"),
        "train.loss_weighting",
        # Not dropout and the like, which a resumed run may change as it may change train.recompute.
        *(f"model.policy.{name}" for name in _FIXED_POLICY_SETTINGS),
    )

    model: PI07ModelConfig
    data: PI07DataConfig
    parallel: PI07ParallelConfig = PI07ParallelConfig()
    train: PI07TrainConfig

    @classmethod
    def backbone_name(cls, config: Any) -> str | None:
        """That of OpenTau's `load_pretrained_gemma3`."""
        vlm = model_values(config).get("vlm_config") if isinstance(config, str | dict) else None
        asks = isinstance(vlm, dict) and vlm.get("load_pretrained_gemma3") is True
        return "google/gemma-3-4b-pt" if asks else None

    def problems(self) -> Iterator[str]:
        yield from self.model.policy.problems()
        if (
            self.train.recompute == "full"
            and self.model.policy.given.get("gradient_checkpointing") is False
        ):
            yield (
                "train.recompute is full, but model.policy.gradient_checkpointing is false: both "
                "turn activation recomputation on; remove one of them"
            )
        data = self.data
        has_files = bool(data.train) or data.dataset_mixture is not None
        if has_files == (data.synthetic_samples is not None):
            found = "both are" if has_files else "neither is"
            yield (
                f"{found} set of data.train and data.synthetic_samples: name the files of "
                "demonstrations in data.train (or data.dataset_mixture), or set "
                "data.synthetic_samples to train on generated ones"
            )
        pipeline = self.parallel.pp_degree > 1 or self.parallel.schedule == "colocated"
        if data.action_errors and pipeline:
            yield (
                "data.action_errors is true, but a stage of a pipeline (parallel.pp_degree, "
                "schedule=colocated) samples no actions: remove it, and call paddle-vl evaluate on "
                "what the run saves"
            )
        if wrong := [n for n in data.action_groups if n.isdigit() or "/" in n]:
            yield f"data.action_groups has the names {wrong}: give others, no numbers, without /"
        files, grouped = {*data.train, *data.eval}, set(data.groups)
        if data.dataset_mixture is not None:
            yield from data.dataset_mixture.problems(data.train, data.eval)
            files |= {dataset.label for dataset in data.dataset_mixture.datasets}
        if grouped and (wrong := sorted(files ^ grouped)):
            yield (
                f"data.groups and the files of data.train and data.eval differ in "
                f"{', '.join(wrong)}: give every file its group, or none"
            )

    @property
    def input_files(self) -> dict[str, str]:
        file = self.data.statistics
        return {} if file is None else {"data.statistics": file}
