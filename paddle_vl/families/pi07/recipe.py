"""pi07's policy and planner as families: see `paddle_vl.families.base.Family`.

The planner's recipe differs little from the policy's: it has no actions, so neither flow nor
action tokenizer.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from paddle import nn

from paddle_vl.config.families import EncoderShape, FamilyEntry, ModelShape
from paddle_vl.config.patterns import matching_names
from paddle_vl.data.loader import PrefetchLoader
from paddle_vl.families.base import (
    BuiltModel,
    Evaluation,
    EvaluationOptions,
    Family,
    losses_report,
)
from paddle_vl.families.flops import FlopCounter
from paddle_vl.families.pi07.checkpoint_map import is_reached
from paddle_vl.families.pi07.config import Gemma3Config, PI07Config, PI07PlannerConfig
from paddle_vl.families.pi07.flops import PI07Flops, layer_costs
from paddle_vl.families.pi07.gemma import base_config
from paddle_vl.families.pi07.objective import (
    PLANNER_LOSSES,
    POLICY_LOSSES,
    PolicyBatchAdapter,
    PolicyLoss,
    first_batch,
    predicted_actions,
    with_lengths,
)
from paddle_vl.families.pi07.pipeline import (
    ON_HOST,
    ColocatedBatchAdapter,
    PI07Encoder,
    PI07Stage,
)
from paddle_vl.families.pi07.planner import PI07HighLevelPlanner
from paddle_vl.families.pi07.policy import (
    ACTION_TOKENIZER_FOLDER,
    BasePolicy,
    PI07LowLevelPolicy,
    check_features,
)
from paddle_vl.families.pi07.settings import PARTS, PI07Run, with_settings
from paddle_vl.families.policy.action_errors import ActionErrors
from paddle_vl.families.policy.demonstrations.dataset import (
    UNNAMED_GROUP,
    DemonstrationsDataset,
)
from paddle_vl.families.policy.demonstrations.robot_mixture import RobotDemonstrations
from paddle_vl.families.policy.demonstrations.sample import (
    NO_DROPS,
    OPTIONAL_FIELDS,
    DemonstrationShapes,
    DemonstrationSource,
    DrawnDemonstrations,
    FlowDraws,
)
from paddle_vl.families.policy.demonstrations.synthetic import SyntheticDemonstrations
from paddle_vl.families.policy.images import cameras_of
from paddle_vl.families.policy.model_inputs import PolicyCollator
from paddle_vl.families.policy.normalize import (
    demonstration_statistics,
    read_statistics,
)
from paddle_vl.families.policy.robot_settings import (
    DatasetMixtureConfig,
    folders_among,
    mixture_of,
)
from paddle_vl.files.hub import local_folder
from paddle_vl.nn.linear import default_dtype
from paddle_vl.nn.placement import Placement

# All evaluations draw the same noise.
EVALUATION_SEED = 0
PolicyConfig = PI07Config | PI07PlannerConfig


class PI07Recipe(Family):
    """A run that trains a pi07 policy on demonstrations."""

    config: PI07Run
    policy_class: type[BasePolicy] = PI07LowLevelPolicy
    loss: PolicyLoss
    # Of training samples, once these are open.
    fields: Mapping[str, bool] | None = None
    # Optional fields that the model cannot do without.
    needed_fields: Sequence[str] = ()
    losses: Sequence[str] = POLICY_LOSSES
    parts: Mapping[str, Sequence[str]] = PARTS
    make_stage = PI07Stage
    item_encoder = PI07Encoder
    key_prefix = "model."

    def __init__(self, config: PI07Run, checkpoint: Path | None):
        self._open(config, checkpoint)
        mixture, held_out = config.data.dataset_mixture, None
        if mixture is None:
            self.source = self._source(config.data.train)
        else:
            self.source, held_out = self._robots(mixture).parts()
        self.source.check_history()
        self.check_fields(self.source)
        self.fields = self.source.fields
        flow, seed = flow_draws(self.model_config), config.train.seed
        data = config.data
        self.train_data = DrawnDemonstrations(
            self.source, data.drops, flow, seed, transforms=data.image_transforms
        )
        self.eval_data = None
        if data.eval:
            held_out = self._source(data.eval)
        if held_out is not None:
            has_drops = mixture is not None and mixture.val_enable_optional_key_dropout
            drops = data.drops if has_drops else NO_DROPS
            self.eval_data = DrawnDemonstrations(held_out, drops, flow, EVALUATION_SEED)
        elif config.train.eval_steps is not None:
            raise ValueError(
                f"train.eval_steps is {config.train.eval_steps}, but data.dataset_mixture keeps "
                "nothing for evaluation, since each of its datasets has one episode: set "
                "val_split_by: frame, or val_split_ratio: 0.0 and data.eval"
            )

    def _open(self, config: PI07Run, checkpoint: Path | None) -> None:
        """Set what does not depend on the data: the configuration, the loss, and their sizes."""
        self.checkpoint, pretrained = checkpoint, config.model.pretrained
        # Folder of the policy to start or continue from, or of its backbone; None for fresh
        # weights.
        self.folder = checkpoint or (None if pretrained is None else Path(pretrained))
        self.config = config
        self.is_new = self.folder is None or Gemma3Config.is_folder(self.folder)
        if self.is_new and config.trains_adapters:
            raise ValueError(
                f"model.lora adapts a policy, and {self.folder} has no weights of an expert, which "
                "adapters do not hold: name a policy in model.pretrained, or remove model.lora"
            )
        # Changed by model.policy.
        self.model_config = with_settings(
            base_config(self.policy_class.config_class, config.model.config, self.folder),
            config.model.policy,
            "model.config" if self.is_new else str(self.folder),
            has_weights=not self.is_new,
            new_statistics=config.data.statistics is not None,
        )
        if config.train.recompute == "none" and self.model_config.gradient_checkpointing:
            self.recompute = "full"
        self.loss = PolicyLoss(self.losses, config.train.loss_weighting)
        self.shape, self.costs = model_shape(self.model_config), layer_costs(self.model_config)
        self.encoder_shape = encoder_shape(self.model_config)

    def build_model(self, placement: Placement) -> BuiltModel:
        statistics, config = self._statistics(), self.model_config
        dtype = self.config.model.compute_dtype
        settings = {"statistics": statistics, "placement": placement, "materialize": False}
        if self.config.data.processor is not None:
            # The others come from the checkpoint.
            folder = Path(self.config.data.processor)
            settings["tokenizer"], actions = folder, folder / ACTION_TOKENIZER_FOLDER
            if self.policy_class is PI07LowLevelPolicy and actions.is_dir():
                settings["action_tokenizer"] = actions
        if isinstance(config, PI07Config) and self.is_new and "action_tokenizer" not in settings:
            settings["action_tokenizer"] = _action_tokenizer(config.discrete_action_tokenizer_path)
        if self.folder is None:
            with default_dtype(dtype):
                policy = self.policy_class.from_config(config, **settings)
        else:
            if statistics is not None and not self.is_new:
                # The given statistics replace the checkpoint's.
                config = replace(config, skip_normalization_weights=True)
            is_adapter = self.folder == self.checkpoint and self.config.trains_adapters
            base = self.config.model.pretrained if is_adapter else None
            policy = self.policy_class.from_pretrained(
                self.folder, config=config, dtype=dtype, base=base, **settings
            )
            if self.config.model.lora is not None and not is_adapter:
                policy.model.add_lora(self.config.model.lora)
        check_trainable(policy)
        policy.model.train()
        policy.model.untrained_losses = frozenset(self.loss.terms) - {*self.loss.trained_terms}
        parallel = self.config.parallel
        is_colocated = parallel.schedule == "colocated"
        agrees = parallel.branch_sync == "all_reduce"
        collator = PolicyCollator(policy.inputs, agrees, ON_HOST if is_colocated else ())
        samples = self.train_data if self.eval_data is None else self.eval_data
        adapter_class = ColocatedBatchAdapter if is_colocated else PolicyBatchAdapter
        adapter = adapter_class(partial(first_batch, samples, collator), agrees)
        self._with_lengths = partial(with_lengths, policy.model.tokens)
        # Of adapters, final/ has the merged policy.
        save = of_step = policy.save_pretrained
        if policy.model.adapter is not None:
            of_step = policy.save_adapter
        data, measure = self.config.data, None
        # Stages sample no actions.
        if data.action_errors or (
            data.action_errors is None and placement.stage_layers.is_full and not is_colocated
        ):
            measure = action_errors(policy, data.action_groups)
        return BuiltModel(
            policy.model,
            adapter,
            collator,
            of_step,
            save_streamed=save,
            measure=measure,
        )

    def loader(self, *data: Any, **settings: Any) -> PrefetchLoader:
        loader = super().loader(*data, **settings)
        # A model's layout of its prefix, which workers do not import.
        loader.own_rows = self._with_lengths
        return loader

    def trainable_names(self, model: nn.Layer) -> Iterable[str]:
        """Unfrozen parameters that a loss with a non-zero weight reaches."""
        # Names of the full model, since this rank may have only some.
        full = model.whole()
        reached = {
            id(parameter)
            for name, parameter in full.named_parameters()
            if not parameter.stop_gradient
            and is_reached(name, self.model_config, self.loss.trained_terms)
        }
        named = self.named_parameters(full)
        names = [name for name, parameter in named if id(parameter) in reached]
        if self.config.model.policy.given.get("freeze_vision_encoder") is False:
            self._check_tower_is_trained([name for name, _ in named], names)
        return names

    def flop_counter(self, model: nn.Layer, trained: Collection[str]) -> FlopCounter:
        sizes = {} if model.adapter is None else model.adapter.sizes
        ranks, losses = {m: size.r for m, size in sizes.items()}, self.loss.trained_terms
        return PI07Flops(model.config, model.label_ids, trained, losses, ranks)

    @classmethod
    def check_fields(cls, source: DemonstrationSource) -> None:
        """Refuse demonstrations without a needed field."""
        if missing := [name for name in cls.needed_fields if not source.fields[name]]:
            raise ValueError(
                f"{source.place(0)}: the demonstration has no {', '.join(map(repr, missing))}, nor "
                'has any other, and a planner reads or writes them: add them ("" where there is '
                "nothing yet), and name them in data.fields where that is set"
            )

    def _check_tower_is_trained(self, names: Sequence[str], reached: Sequence[str]) -> None:
        """Refuse settings that freeze the whole tower although model.policy unfreezes it."""
        freeze, parts = self.config.model.freeze, self.parts
        tower = matching_names(["vision"], names, "model.policy", groups=parts) & {*reached}
        if tower - matching_names(freeze, names, "model.freeze", groups=parts):
            return
        if tower:
            reason = f"model.freeze {freeze} freezes all of it"
        else:
            vlm = self.model_config.vlm_config
            reason = f"train.loss_weighting {self.config.train.loss_weighting} leaves out its loss"
            if self.config.model.lora is not None:
                reason = "model.lora names nothing of it"
            elif vlm.train_state_action_representation_only:
                reason = "train_state_action_representation_only is true"
        raise ValueError(
            "model.policy.freeze_vision_encoder is false, but no parameter of the vision tower "
            f"would be trained, since {reason}: change one of the two"
        )

    @property
    def _fields(self) -> list[str] | None:
        """Of the training samples, once these are open; None for those that any of them has."""
        found = self.fields
        return self.config.data.fields if found is None else [n for n, has in found.items() if has]

    def _source(self, files: Sequence[str]) -> DemonstrationSource:
        data, names = self.config.data, self.model_config.dataset_names
        shapes = sample_shapes(self.model_config)
        if not files:
            chosen = OPTIONAL_FIELDS if data.fields is None else data.fields
            groups = {} if names is None else {"group_names": names}
            seed = self.config.train.seed
            assert data.synthetic_samples is not None, "PI07Run demands it without files"
            return SyntheticDemonstrations(data.synthetic_samples, shapes, chosen, seed, **groups)
        if folders_among(files):
            return self._robots(mixture_of(files, data.data_features_name_mapping))
        of_group: dict[str, list[str]] = {}
        for file in files if data.groups else ():
            of_group.setdefault(data.groups[file], []).append(file)
        return DemonstrationsDataset(
            of_group or files,
            shapes,
            self._fields,
            names,
            data.on_bad_sample,
            allow_outside=data.allow_outside,
            max_line_bytes=data.max_line_bytes,
        )

    def _robots(self, mixture: DatasetMixtureConfig) -> RobotDemonstrations:
        """LeRobot datasets; they name the groups of a new policy, if there are several."""
        data, names = self.config.data, self.model_config.dataset_names
        if names is None and not self.is_new:
            names = [UNNAMED_GROUP]
        source = RobotDemonstrations(
            mixture,
            sample_shapes(self.model_config),
            self._fields,
            names,
            data.on_bad_sample,
            seed=self.config.train.seed,
            groups=data.groups,
        )
        if names is None and len(source.group_names) > 1:
            self.model_config = replace(self.model_config, dataset_names=[*source.group_names])
        return source

    def _statistics(self) -> list[Mapping[str, Mapping[str, Any]]] | None:
        """Statistics of every group of data; None for the checkpoint's."""
        file, names = self.config.data.statistics, self.model_config.dataset_names
        if file is not None:
            return list(read_statistics(file, names).values())
        if not self.is_new:
            return None
        if isinstance(self.source, RobotDemonstrations):
            has_quantiles = "QUANTILE" in self.model_config.normalization_mapping.values()
            return list(self.source.statistics(has_quantiles).values())
        return list(demonstration_statistics(self.source).values())


class PI07PlannerRecipe(PI07Recipe):
    """A run that trains pi07's planner: demonstrations with memories and subtasks, no actions."""

    policy_class = PI07HighLevelPlanner
    needed_fields = ("past_memory", "next_memory", "response")
    losses = PLANNER_LOSSES


def flow_draws(config: PolicyConfig) -> FlowDraws | None:
    """The random draws of each sample; None without flow."""
    if isinstance(config, PI07PlannerConfig):
        return None
    return FlowDraws(config.chunk_size, config.max_action_dim, config.max_delay)


def sample_shapes(config: PolicyConfig) -> DemonstrationShapes:
    """Shapes that the policy needs of its data."""
    check_features(config)
    size = config.resize_imgs_with_padding
    assert size is not None, "the configuration gives it a value"
    shapes = DemonstrationShapes(
        cameras=tuple(cameras_of(config.input_features)),
        image_size=size,
        state_dim=config.input_features["state"].shape[0],
        n_obs_steps=config.n_obs_steps,
        empty_cameras=config.empty_cameras,
    )
    if isinstance(config, PI07PlannerConfig):
        return shapes
    return replace(
        shapes,
        chunk_size=config.chunk_size,
        action_dim=config.output_features["actions"].shape[0],
        history_interval=config.history_interval,
    )


def action_errors(policy: Any, parts: Mapping[str, Sequence[int]] = {}) -> ActionErrors | None:
    """Measures a policy's actions, also of `parts`, data.action_groups; None for a planner."""
    if not isinstance(policy, PI07LowLevelPolicy):
        return None
    num_dims = policy.config.output_features["actions"].shape[0]
    beyond = {name: dims for name, dims in parts.items() if not {*dims} <= {*range(num_dims)}}
    if beyond:
        raise ValueError(
            f"data.action_groups has {beyond}, and the actions have dims 0 to {num_dims - 1}"
        )
    normalizer = policy.normalizers["unnormalize_outputs"]
    names = policy.config.dataset_names or [str(i) for i in range(normalizer.num_groups)]
    predict = partial(predicted_actions, policy.model)
    return ActionErrors(predict, normalizer, num_dims, names, parts)


def check_trainable(policy: Any) -> None:
    """Raise ValueError if the policy lacks something that its losses need."""
    if isinstance(policy, PI07LowLevelPolicy) and policy.action_tokenizer is None:
        raise ValueError(
            "the policy has no tokenizer of discrete actions, which training needs: put its "
            f"files into {ACTION_TOKENIZER_FOLDER}/ of data.processor"
        )


def _action_tokenizer(path: str) -> Path:
    """The folder of a new policy's action tokenizer."""
    try:
        return local_folder(path)
    except RuntimeError as error:
        raise RuntimeError(
            f"discrete_action_tokenizer_path: {error}; or put a FAST tokenizer into "
            f"{ACTION_TOKENIZER_FOLDER}/ of data.processor"
        ) from error


def model_shape(config: PolicyConfig) -> ModelShape:
    """Decoder sizes, checked against the degrees of parallelism."""
    vlm = config.vlm_config
    text, inner = vlm.gemma3_config.text_config, vlm.gemma3_config.text_config.intermediate_size
    if not vlm.disable_action_expert:
        # A degree divides both widths if it divides this.
        inner = math.gcd(inner, vlm.gemma_expert_config.intermediate_size)
    return ModelShape(
        num_attention_heads=text.num_attention_heads,
        num_key_value_heads=text.num_key_value_heads,
        vocab_size=text.vocab_size,
        intermediate_size=inner,
        num_hidden_layers=text.num_hidden_layers,
    )


def encoder_shape(config: PolicyConfig) -> EncoderShape:
    """Sizes of the tower that its tensor parallelism divides."""
    vision = config.vlm_config.gemma3_config.vision_config
    return EncoderShape(
        {
            "vision_config.num_attention_heads": vision.num_attention_heads,
            "vision_config.intermediate_size": vision.intermediate_size,
        }
    )


def build_evaluation(family: FamilyEntry, folder: Path, options: EvaluationOptions) -> Evaluation:
    """Losses, and errors of actions, over all samples; nothing is dropped, noise and times are
    the same every time."""
    replace(options, base=None).refuse_answer_options(f"{folder} is a pi07 policy")
    recipe, policy_class = family.recipe_class(), family.model_class()
    config = policy_class.config_class.from_pretrained(folder)
    shapes, files = sample_shapes(config), options.files
    if folders_among(files):
        source = RobotDemonstrations(mixture_of(files), shapes, None, config.dataset_names)
    else:
        source = DemonstrationsDataset(files, shapes, None, config.dataset_names)
    recipe.check_fields(source)
    samples = DrawnDemonstrations(source, NO_DROPS, flow_draws(config), EVALUATION_SEED)
    policy = policy_class.from_pretrained(folder, config=config, base=options.base)
    check_trainable(policy)
    collator = PolicyCollator(policy.inputs)
    loader = PrefetchLoader(
        samples, collator, options.batch_size, shuffle=False, drop_last=False, num_epochs=1
    )
    adapter = PolicyBatchAdapter(partial(first_batch, samples, collator))
    loss, measure = PolicyLoss(recipe.losses), action_errors(policy)
    return Evaluation(policy.model, loss, adapter, loader, losses_report, measure)
