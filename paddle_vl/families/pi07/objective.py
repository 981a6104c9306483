"""The losses of robot policies as a training step needs them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import paddle
from paddle import Tensor, nn

from paddle_vl.families.pi07.policy_model import as_tensors
from paddle_vl.families.pi07.prefix_layout import Presence, presence_of
from paddle_vl.train.objective import Batch
from paddle_vl.train.phases import Phase, phase
from paddle_vl.train.reporting.gauges import Gauge


class PolicyObjective:
    """The squared error of the flow and the cross entropy of the discrete actions.

    Args:
        weights: of `MSE` and `CE`. A loss of weight 0 is no part of the graph.
        agrees_on_presence: lay out the optional parts that any process has in a micro-batch, not
            those of its own samples alone.
    """

    counted = ("num_flow_values", "num_action_slots")
    reported_counts: Mapping[str, str] = {}

    def __init__(self, weights: Mapping[str, float], agrees_on_presence: bool = False):
        self.terms, self.agrees_on_presence = dict(weights), agrees_on_presence
        # Makes any batch of the run, for processes that have run out of them.
        self.make_example: Callable[[], Batch] = dict

    def counts(self, batch: Batch) -> list[int]:
        return [batch[name] for name in self.counted]

    def check_counts(self, totals: Sequence[int], num_batches: int) -> None:
        for (name, weight), total in zip(self.terms.items(), totals, strict=True):
            if weight and total == 0:
                raise ValueError(
                    f"the {num_batches} micro-batch(es) of this step have nothing that the loss "
                    f"{name} could be about: the actions or texts of all samples are padding, or "
                    "settled in advance (max_delay against chunk_size); look at the data"
                )

    def num_samples(self, batch: Batch) -> int:
        return len(batch["lang_tokens"])

    def num_tokens(self, batch: Batch) -> int:
        return 0

    def num_packed_places(self, batch: Batch) -> int:
        return 0

    def lengths(self, batch: Batch) -> list[int]:
        return []

    def asks(self, batch: Batch) -> list[bool]:
        return list(presence_of(batch)) if self.agrees_on_presence else []

    def prepared(self, batch: Batch) -> Batch:
        # Where processes agree on it, `settled` says.
        return batch if self.agrees_on_presence else batch | {"presence": presence_of(batch)}

    def is_for_device(self, name: str) -> bool:
        return True

    def settled(self, batch: Batch, asked: Sequence[int], model: nn.Layer) -> Batch:
        if not self.agrees_on_presence:
            return batch
        return batch | {"presence": Presence(*map(bool, asked))}

    def idle_batch(self, model: nn.Layer) -> Batch:
        example = self.make_example()
        return example | dict.fromkeys(self.counted, 0) | self._without_targets(example)

    def output(self, model: nn.Layer, batch: Batch) -> dict[str, Tensor]:
        batch = {name: value for name, value in batch.items() if name not in self.counted}
        presence = batch.pop("presence", None)
        # Read on the host, so before the batch leaves it.
        presence = presence_of(batch) if presence is None else presence
        with phase(Phase.HOST_TO_DEVICE):
            batch = as_tensors(batch)
        return model(batch, presence=presence, per_sample=True)

    def share(
        self, output: dict[str, Any], totals: Sequence[int], num_batches: int
    ) -> tuple[Tensor, Tensor]:
        terms = [
            value / total
            for value, total in zip(self._sums(output), self._divisors(totals), strict=True)
        ]
        weighted = [w * term for w, term in zip(self.terms.values(), terms, strict=True) if w]
        return sum(weighted), paddle.stack([term.detach() for term in terms])

    def sums(self, output: dict[str, Any]) -> Tensor:
        return paddle.stack(self._sums(output))

    def gauges(self, model: nn.Layer, counts_losses: bool) -> list[Gauge]:
        return []

    def line(self, values: Mapping[str, Any]) -> dict[str, float]:
        return {}

    def _sums(self, output: dict[str, Any]) -> list[Tensor]:
        return [output[f"{name}_per_sample"][0].sum() for name in self.terms]

    def _divisors(self, totals: Sequence[int]) -> list[float]:
        flow_values, action_slots = totals
        # As the original has it, which may meet a batch whose actions are all padding.
        return [flow_values + 1e-8, max(action_slots, 1)]

    def _without_targets(self, batch: Batch) -> Batch:
        return {
            "actions_is_pad": np.ones(batch["actions"].shape[:2], dtype=bool),
            "discrete_action_masks": np.zeros_like(batch["discrete_action_masks"]),
        }


class PlannerObjective(PolicyObjective):
    """The cross entropies of the planner's memory and of its response, `CE_memory` and
    `CE_response`."""

    counted = ("num_memory_slots", "num_response_slots")

    def output(self, model: nn.Layer, batch: Batch) -> dict[str, Tensor]:
        batch = {name: value for name, value in batch.items() if name not in self.counted}
        return model(batch, presence=batch.pop("presence", None))

    def _sums(self, output: dict[str, Any]) -> list[Tensor]:
        return [output[f"{name}_sum"] for name in self.terms]

    def _divisors(self, totals: Sequence[int]) -> list[float]:
        return [max(total, 1) for total in totals]

    def _without_targets(self, batch: Batch) -> Batch:
        return {name: np.zeros_like(batch[name]) for name in ("memory_masks", "response_masks")}
