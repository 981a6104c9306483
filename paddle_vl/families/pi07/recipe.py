"""A pi07 run: demonstrations, tokenizers, statistics, the policy."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from paddle import Tensor, nn

from paddle_vl.checkpoint.safetensors_io import FileWriter
from paddle_vl.config.patterns import POLICY_PARTS
from paddle_vl.config.schema import RunConfig
from paddle_vl.data.bad_sample import BadSampleError
from paddle_vl.data.loader import PrefetchLoader
from paddle_vl.data.worker_pool import Collator
from paddle_vl.families.flops import FlopCounter
from paddle_vl.families.pi07.base_policy import BasePolicy
from paddle_vl.families.pi07.config import PI07Config, PI07PlannerConfig
from paddle_vl.families.pi07.demonstrations.dataset import DemonstrationsDataset, present_fields
from paddle_vl.families.pi07.demonstrations.sample import (
    OPTIONAL_FIELDS,
    DemonstrationShapes,
    DemonstrationSource,
)
from paddle_vl.families.pi07.demonstrations.statistics import (
    demonstration_statistics,
    read_statistics,
)
from paddle_vl.families.pi07.demonstrations.synthetic import SyntheticDemonstrations
from paddle_vl.families.pi07.demonstrations.training_set import (
    NO_DROPS,
    DrawnDemonstrations,
    DropProbabilities,
    FlowDraws,
)
from paddle_vl.families.pi07.flops import PI07Flops, PI07PlannerFlops
from paddle_vl.families.pi07.inputs.collate import PolicyCollator
from paddle_vl.families.pi07.inputs.model_inputs import cameras_of
from paddle_vl.families.pi07.objective import PolicyObjective
from paddle_vl.families.pi07.pipeline import Costs, PI07LowLevelStage, PI07Stage, low_level_costs
from paddle_vl.families.pi07.policy import ACTION_TOKENIZER_FOLDER, PI07LowLevelPolicy
from paddle_vl.families.pi07.policy_config import PolicyFeature
from paddle_vl.families.pi07.policy_model import is_reached
from paddle_vl.families.qwen3_vl.build_model import default_dtype
from paddle_vl.nn.placement import SingleDevicePlacement
from paddle_vl.parallel.degrees import ModelShape
from paddle_vl.train.processes import SingleProcess

# Evaluations of all runs draw the same noise.
EVALUATION_SEED = 0


class PI07Recipe:
    """What `paddle_vl.train.build` asks of a family, for pi07; see `Qwen3VLRecipe`.

    Attributes:
        losses: names of the losses that train.loss_weighting weighs.
    """

    losses: tuple[str, ...] = ("MSE", "CE")
    policy_class: type[BasePolicy] = PI07LowLevelPolicy
    counter_class: type[PI07Flops] | type[PI07PlannerFlops] = PI07Flops
    parts: Mapping[str, Sequence[str]] = POLICY_PARTS
    make_part: type[PI07Stage] = PI07LowLevelStage
    sample_kind = "samples"
    pad_to_multiple_of = None

    def __init__(
        self, config: RunConfig, form: PI07Config | PI07PlannerConfig, folder: Path | None
    ):
        """
        Args:
            form: the policy's configuration.
            folder: of the policy to start or continue from; None for fresh weights.
        """
        self.config, self.form, self.folder = config, form, folder
        weights = loss_weights(config.train.loss_weighting or {}, self.losses)
        self.objective = self._objective(weights, config.parallel.branch_sync == "all_reduce")
        self.source = self._source(config.data.train)
        eval_source = self._source(config.data.eval) if config.data.eval else None
        flow, seed = self._flow_draws(), config.train.seed
        drops = DropProbabilities(**config.data.drops.model_dump())
        self.train_data = DrawnDemonstrations(self.source, drops, flow, seed)
        self.eval_data = (
            None
            if eval_source is None
            else DrawnDemonstrations(eval_source, NO_DROPS, flow, EVALUATION_SEED)
        )
        self.shape = self._shape()
        self.costs = self._costs()
        self.policy: BasePolicy | None = None

    @property
    def fields(self) -> Mapping[str, bool]:
        """Which optional fields the data has."""
        return self.source.fields

    @property
    def recomputes(self) -> bool:
        """Whether layers run again in the backward pass; the policy may ask for it too."""
        return self.config.train.recompute == "full" or self.form.gradient_checkpointing

    def build_model(self, placement: SingleDevicePlacement) -> nn.Layer:
        """This process's part of the model, without values until `fill`."""
        statistics = self._statistics()
        dtype = self.config.model.compute_dtype
        settings = {"statistics": statistics, "placement": placement, "materialize": False}
        settings |= self._tokenizers()
        if self.folder is None:
            with default_dtype(dtype):
                self.policy = self.policy_class.from_config(self.form, **settings)
        else:
            form = self.form
            if statistics is not None:
                # They stand in place of the checkpoint's.
                form = replace(form, skip_normalization_weights=True)
            self.policy = self.policy_class.from_pretrained(
                self.folder, config=form, dtype=dtype, **settings
            )
        self._check_policy()
        self.policy.model.train()
        return self.policy.model

    def named_parameters(self, model: nn.Layer) -> list[tuple[str, Tensor]]:
        return [(f"model.{item.key}", item.parameter) for item in model.stored_parameters()]

    def whole_shapes(self, model: nn.Layer) -> dict[str, tuple[int, ...]]:
        return {f"model.{key}": shape for key, shape in model.whole_shapes().items()}

    def trainable_names(self, model: nn.Layer) -> Iterable[str]:
        """Names of what the policy's own settings train and a loss that counts reaches."""
        losses = self._counted_losses()
        # This process may have parts of it only, and the names are those of the run.
        whole = model.whole()
        reached = {
            id(parameter)
            for name, parameter in whole.named_parameters()
            if not parameter.stop_gradient and self._is_reached(name, losses)
        }
        return [
            name for name, parameter in self.named_parameters(whole) if id(parameter) in reached
        ]

    def flop_counter(self, model: nn.Layer, trained: Collection[str]) -> FlopCounter:
        """See `Qwen3VLRecipe.flop_counter`."""
        return self.counter_class(model.config, model.label_ids, trained, self._counted_losses())

    def save_model(self, model: nn.Layer, folder: Path, write: FileWriter) -> None:
        self.policy.save_pretrained(folder, write=write)

    def save_files(self, model: nn.Layer, folder: Path) -> None:
        """The policy's folder is complete."""

    def train_loader(
        self, placement: SingleDevicePlacement, processes: SingleProcess
    ) -> PrefetchLoader:
        """Batches without end, this process's part of them."""
        batch_size = self.config.train.per_device_train_batch_size
        return self._loader(self.train_data, processes, batch_size, shuffle=True, drop_last=True)

    def eval_loader(
        self, placement: SingleDevicePlacement, processes: SingleProcess
    ) -> PrefetchLoader:
        """Every evaluation sample once, this process's part of them."""
        return self._loader(
            self.eval_data,
            processes,
            self.config.train.per_device_eval_batch_size,
            shuffle=False,
            drop_last=False,
            num_epochs=1,
        )

    def _loader(
        self,
        samples: DrawnDemonstrations,
        processes: SingleProcess,
        batch_size: int,
        **settings: Any,
    ) -> PrefetchLoader:
        collator = self._collator()
        self.objective.make_example = partial(_first_batch, samples, collator)
        return PrefetchLoader(
            samples,
            collator,
            batch_size,
            seed=self.config.train.seed,
            num_workers=self.config.data.num_workers,
            prefetch_batches=self.config.data.prefetch_batches,
            rank=processes.data_rank,
            size=processes.data_size,
            **settings,
        )

    def _source(self, files: Sequence[str]) -> DemonstrationSource:
        data, names = self.config.data, self.form.dataset_names
        shapes = self._shapes()
        if not files:
            chosen = OPTIONAL_FIELDS if data.fields is None else data.fields
            groups = {} if names is None else {"group_names": names}
            seed = self.config.train.seed
            return SyntheticDemonstrations(data.synthetic_samples, shapes, chosen, seed, **groups)
        chosen = data.fields
        if chosen is None:
            chosen = present_fields(data.train or files, shapes, data.max_line_bytes)
        of_group: dict[str, list[str]] = {}
        for file in files if data.groups else ():
            of_group.setdefault(data.groups[file], []).append(file)
        return DemonstrationsDataset(
            of_group or files,
            shapes,
            chosen,
            names,
            data.on_bad_sample,
            allow_outside=data.allow_outside,
            max_line_bytes=data.max_line_bytes,
        )

    def _statistics(self) -> list[Mapping[str, Mapping[str, Any]]] | None:
        """Of every group; None for the checkpoint's."""
        file, names = self.config.data.statistics, self.form.dataset_names
        if file is not None:
            shapes = self._shapes()
            sizes = {"state": shapes.state_dim}
            if shapes.action_dim is not None:
                sizes["actions"] = shapes.action_dim
            return list(read_statistics(file, names, sizes).values())
        if self.folder is not None:
            return None
        return list(demonstration_statistics(self.source).values())

    def _objective(self, weights: Mapping[str, float], agrees_on_presence: bool) -> PolicyObjective:
        return PolicyObjective(weights, agrees_on_presence)

    def _collator(self) -> Collator:
        return PolicyCollator(self.policy.inputs, self.form.max_action_dim)

    def _flow_draws(self) -> FlowDraws | None:
        form = self.form
        return FlowDraws(form.chunk_size, form.max_action_dim, form.max_delay)

    def _tokenizers(self) -> dict[str, Path]:
        """What data.processor has of them; the checkpoint has the others."""
        if self.config.data.processor is None:
            return {}
        folder = Path(self.config.data.processor)
        actions = folder / ACTION_TOKENIZER_FOLDER
        return {"tokenizer": folder} | ({"action_tokenizer": actions} if actions.is_dir() else {})

    def _check_policy(self) -> None:
        if self.policy.action_tokenizer is None:
            raise ValueError(
                "the policy has no tokenizer of discrete actions, which training needs: put its "
                f"files into {ACTION_TOKENIZER_FOLDER}/ of data.processor"
            )

    def _counted_losses(self) -> list[str]:
        """Names of the losses that are a part of the graph."""
        return [name for name, weight in self.objective.terms.items() if weight]

    def _is_reached(self, name: str, losses: Sequence[str]) -> bool:
        return is_reached(name, self.form.vlm_config, self.form.knowledge_insulation, losses)

    def _costs(self) -> Costs:
        return low_level_costs(self.form)

    def _shape(self) -> ModelShape:
        """The sizes that processes have to divide among themselves."""
        vlm = self.form.vlm_config
        text, inner = vlm.gemma3_config.text_config, vlm.gemma3_config.text_config.intermediate_size
        if not vlm.disable_action_expert:
            # What divides both divides this.
            inner = math.gcd(inner, vlm.gemma_expert_config.intermediate_size)
        return ModelShape(
            num_attention_heads=text.num_attention_heads,
            num_key_value_heads=text.num_key_value_heads,
            vocab_size=text.vocab_size,
            intermediate_size=inner,
            num_hidden_layers=text.num_hidden_layers,
        )

    def _shapes(self) -> DemonstrationShapes:
        """What the policy asks of its data."""
        form = self.form
        return DemonstrationShapes(
            cameras=tuple(cameras_of(form.input_features)),
            image_size=form.resize_imgs_with_padding,
            state_dim=feature_dims(form.input_features, "state", "input_features"),
            n_obs_steps=form.n_obs_steps,
            chunk_size=form.chunk_size,
            action_dim=feature_dims(form.output_features, "actions", "output_features"),
        )


def feature_dims(features: Mapping[str, PolicyFeature], name: str, where: str) -> int:
    """The dims of a feature.

    Raises:
        ValueError: the policy's configuration does not have it.
    """
    if name not in features:
        raise ValueError(
            f"{where} of the policy's configuration has {sorted(features)}, not {name!r}, which "
            "its data must have: name it there"
        )
    return features[name].shape[0]


def _first_batch(samples: DrawnDemonstrations, collator: Collator) -> dict[str, Any]:
    """A batch of the first sample that can be used."""
    for number in range(len(samples) - 1):
        try:
            return collator([samples[number]])
        except BadSampleError:
            if samples.on_bad_sample == "fail":
                raise
    return collator([samples[len(samples) - 1]])


def loss_weights(given: Mapping[str, float], losses: Sequence[str]) -> dict[str, float]:
    """The weight of each loss, 1 where none is given.

    Raises:
        ValueError: a loss that there is not, or no loss that counts.
    """
    if unknown := sorted(set(given) - set(losses)):
        raise ValueError(
            f"train.loss_weighting has {', '.join(unknown)}; the losses of this policy are "
            f"{', '.join(losses)}"
        )
    weights = dict.fromkeys(losses, 1.0) | dict(given)
    if not any(weights.values()):
        raise ValueError(f"train.loss_weighting is {weights}: a loss needs a weight above 0")
    return weights
