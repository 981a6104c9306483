"""What both policies of pi07 share: building with fresh weights, whole or a rank's part."""

from typing import Any, TypeVar

import paddle
from paddle import nn

from paddle_vl.families.pi07.config import PI07Config
from paddle_vl.families.pi07.placed_model import PlacedModel
from paddle_vl.families.pi07.planner_config import PI07PlannerConfig
from paddle_vl.nn.placement import Placement

Policy = TypeVar("Policy", bound="PlacedPolicy")


class PlacedPolicy(nn.Layer):
    """A policy around a model that may be a rank's part."""

    model: PlacedModel

    @classmethod
    def from_config(
        cls: type[Policy],
        config: PI07Config | PI07PlannerConfig,
        *parts: Any,
        placement: Placement | None = None,
        materialize: bool = True,
        **named_parts: Any,
    ) -> Policy:
        """A policy with fresh weights, drawn from Paddle's global random state.

        A rank that holds parts gets its parts of what a single device with the same seed draws.

        Args:
            parts, named_parts: tokenizers and statistics, as the class takes them.
            placement: what this process has of the model; None for all of it.
            materialize: draw the weights now; otherwise the model's `materialize` does.
        """
        with paddle.LazyGuard():
            policy = cls(config, *parts, placement=placement, **named_parts)
        policy.model.materialize_later(policy.model.fresh_values)
        if materialize:
            policy.model.materialize_all()
        return policy

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all parameters of the whole model, by key, without `model.` in front."""
        return self.model.whole_shapes()
