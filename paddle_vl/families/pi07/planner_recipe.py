"""A run of pi07's planner: demonstrations with memories and subtasks, no actions."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from paddle_vl.data.worker_pool import Collator
from paddle_vl.families.pi07.demonstrations.sample import DemonstrationShapes
from paddle_vl.families.pi07.demonstrations.training_set import FlowDraws
from paddle_vl.families.pi07.flops import PI07PlannerFlops
from paddle_vl.families.pi07.inputs.collate import PlannerCollator
from paddle_vl.families.pi07.inputs.model_inputs import cameras_of
from paddle_vl.families.pi07.objective import PlannerObjective, PolicyObjective
from paddle_vl.families.pi07.pipeline import Costs, PI07PlannerStage, planner_costs
from paddle_vl.families.pi07.planner import PI07HighLevelPlanner
from paddle_vl.families.pi07.recipe import PI07Recipe, feature_dims


class PI07PlannerRecipe(PI07Recipe):
    """What `paddle_vl.train.build` asks of a family, for the planner; see `Qwen3VLRecipe`."""

    losses = ("CE_memory", "CE_response")
    policy_class = PI07HighLevelPlanner
    counter_class = PI07PlannerFlops
    make_part = PI07PlannerStage

    def _objective(self, weights: Mapping[str, float], agrees_on_presence: bool) -> PolicyObjective:
        return PlannerObjective(weights, agrees_on_presence)

    def _collator(self) -> Collator:
        return PlannerCollator(self.policy.inputs)

    def _flow_draws(self) -> FlowDraws | None:
        return None

    def _tokenizers(self) -> dict[str, Path]:
        processor = self.config.data.processor
        return {} if processor is None else {"tokenizer": Path(processor)}

    def _check_policy(self) -> None:
        """There is no more to a planner than its backbone's tokenizer."""

    def _is_reached(self, name: str, losses: Sequence[str]) -> bool:
        return True

    def _costs(self) -> Costs:
        return planner_costs(self.form)

    def _shapes(self) -> DemonstrationShapes:
        form = self.form
        return DemonstrationShapes(
            cameras=tuple(cameras_of(form.input_features)),
            image_size=form.resize_imgs_with_padding,
            state_dim=feature_dims(form.input_features, "state", "input_features"),
        )
