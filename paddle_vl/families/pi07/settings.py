"""Settings of a pi07 policy or planner run, beyond those of every run. Read without Paddle."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from paddle_vl.config.parallel_settings import ParallelConfig
from paddle_vl.config.schema import DataConfig, ModelConfig, RunConfig, TrainConfig
from paddle_vl.config.section import Section
from paddle_vl.families.pi07.policy_settings import PolicySettings

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
_Probability = Annotated[float, Field(ge=0, le=1)]


# Settings of model.policy that the trained parameters or the samples depend on.
_FIXED_POLICY_SETTINGS = (
    *("freeze_vision_encoder", "train_expert_only", "train_vision_encoder_only"),
    *("train_state_action_representation_only", "knowledge_insulation", "n_obs_steps"),
    *("history_interval", "empty_cameras", "chunk_size", "max_delay", "input_features"),
    *("prompt_max_length", "response_max_length", "memory_max_length", "metadata_max_length"),
    "discrete_action_max_length",
)


class DropProbabilities(Section):
    """Probabilities of leaving optional fields out of a training sample; OpenTau's names and
    defaults."""

    history_state_drop_prob: _Probability = 0.3
    """probability of dropping the past: its frames become black and count as padding; the state
    stays and the policy masks it"""
    subgoal_drop_prob: _Probability = 0.75
    """probability of dropping the goal images of all cameras"""
    response_drop_prob: _Probability = 0.3
    """probability of dropping the response of a sample that keeps its goal images; without goal
    images the response stays, since it tells the policy the next step"""
    metadata_drop_all_prob: _Probability = 0.15
    """probability of dropping all metadata but fps"""
    metadata_drop_each_prob: _Probability = 0.05
    """probability of dropping each metadata field, if not all are dropped"""


class PI07ModelConfig(ModelConfig):
    """The policy or planner to train."""

    policy: PolicySettings = PolicySettings()
    """changes of the configuration that the checkpoint or model.config has, under OpenTau's names;
    see docs/policy_settings.md"""


class PI07DataConfig(DataConfig):
    """Demonstrations, their statistics, and what is dropped from them."""

    synthetic_samples: Annotated[int | None, Field(ge=1, le=10_000_000)] = None
    """number of generated demonstrations to train on instead of data.train"""
    groups: dict[str, str] = Field(default={})
    """statistics group (robot::control mode) of each file of data.train and data.eval; each group
    is normalised with its own statistics"""
    fields: list[str] | None = None
    """optional fields that samples have (response, subgoal, speed, ...), the same on every rank;
    default: the fields found in any line of data.train"""
    statistics: str | None = None
    """JSON file with the statistics that normalise states and actions; default: the checkpoint's,
    or for a new policy those of data.train"""
    drops: DropProbabilities = DropProbabilities()
    """probabilities of dropping optional fields from a training sample"""


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
    parts: ClassVar[dict[str, tuple[str, ...]]] = PARTS
    fixed_settings: ClassVar[tuple[str, ...]] = (
        *RunConfig.fixed_settings,
        *("data.synthetic_samples", "data.groups", "data.fields", "data.drops"),
        "train.loss_weighting",
        # Not dropout and the like, which a resumed run may change as it may change train.recompute.
        *(f"model.policy.{name}" for name in _FIXED_POLICY_SETTINGS),
    )

    model: PI07ModelConfig
    data: PI07DataConfig
    parallel: PI07ParallelConfig = PI07ParallelConfig()
    train: PI07TrainConfig

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
        if bool(data.train) == (data.synthetic_samples is not None):
            found = "both are" if data.train else "neither is"
            yield (
                f"{found} set of data.train and data.synthetic_samples: name the files of "
                "demonstrations in data.train, or set data.synthetic_samples to train on generated "
                "ones"
            )
        files, grouped = {*data.train, *data.eval}, set(data.groups)
        if grouped and (wrong := sorted(files ^ grouped)):
            yield (
                f"data.groups and the files of data.train and data.eval differ in "
                f"{', '.join(wrong)}: give every file its group, or none"
            )

    @property
    def input_files(self) -> dict[str, str]:
        file = self.data.statistics
        return {} if file is None else {"data.statistics": file}
