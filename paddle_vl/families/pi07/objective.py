"""Losses and batch adapters of pi07's policies.

A policy's optional branches are the optional fields of its prefix (`Presence`). With
`parallel.branch_sync: all_reduce` every rank lays out the fields that any rank's micro-batch has;
otherwise each rank those of its own samples.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import paddle
from paddle import Tensor, nn

from paddle_vl.batch.schema import Batch
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.samples import Collator
from paddle_vl.families.pi07.prefix import PrefixTokens, presence_of
from paddle_vl.families.policy.demonstrations.sample import DrawnDemonstrations
from paddle_vl.families.policy.model_inputs import PromptBatch, fields_present, planner_targets
from paddle_vl.nn.objective import BatchAdapter, Loss

# The losses of the low-level policy and of the planner, in the order of a batch's counts: `MSE` of
# the flow and `CE` of discrete actions; cross entropies of the planner's memory and response.
POLICY_LOSSES = ("MSE", "CE")
PLANNER_LOSSES = ("CE_memory", "CE_response")


class PolicyLoss(Loss):
    """Weighted losses of a model; a loss of weight 0 is not part of the graph."""

    def __init__(self, names: Collection[str], given: Mapping[str, float] | None = None):
        """
        Args:
            names: of the model's losses.
            given: weights, train.loss_weighting; 1 by default.

        Raises:
            ValueError: an unknown loss, or no loss with a weight above 0.
        """
        given = given or {}
        if unknown := sorted(set(given) - set(names)):
            raise ValueError(
                f"train.loss_weighting has {', '.join(unknown)}; the losses of this policy are "
                f"{', '.join(names)}"
            )
        self.terms = dict.fromkeys(names, 1.0) | dict(given)
        if not any(self.terms.values()):
            raise ValueError(f"train.loss_weighting is {self.terms}: a loss needs a weight above 0")

    @property
    def trained_terms(self) -> list[str]:
        """Losses that are part of the graph."""
        return [name for name, weight in self.terms.items() if weight]

    def check_counts(self, totals: Sequence[int], num_batches: int) -> None:
        for (name, weight), total in zip(self.terms.items(), totals, strict=True):
            if weight and total == 0:
                raise ValueError(
                    f"the {num_batches} micro-batch(es) of this step have nothing that the loss "
                    f"{name} could be about: the actions or texts of all samples are padding, or "
                    "settled in advance (max_delay against chunk_size); look at the data"
                )

    def share(
        self, output: dict[str, Any], totals: Sequence[int], num_batches: int
    ) -> tuple[Tensor, Tensor]:
        # As in OpenTau, whose batches may have padded actions only.
        divisors = [
            total + 1e-8 if name == "MSE" else max(total, 1)
            for name, total in zip(self.terms, totals, strict=True)
        ]
        terms = [x / total for x, total in zip(self._sums(output), divisors, strict=True)]
        weighted = [w * term for w, term in zip(self.terms.values(), terms, strict=True) if w]
        return sum(weighted[1:], weighted[0]), paddle.stack([term.detach() for term in terms])

    def sums(self, output: dict[str, Any]) -> Tensor:
        return paddle.stack(self._sums(output))

    def _sums(self, output: dict[str, Any]) -> list[Tensor]:
        return [
            output[f"{name}_sum"]
            if f"{name}_sum" in output
            else output[f"{name}_per_sample"][0].sum()
            for name in self.terms
        ]


class PolicyBatchAdapter(BatchAdapter[PromptBatch]):
    """Batches of the low-level policy (`PolicyBatch`) and of the planner (`PlannerBatch`).

    Args:
        make_example: makes some batch of the run, from which an idle batch is derived.
        agrees_on_presence: whether ranks lay out the optional fields that any of them has.
    """

    def __init__(self, make_example: Callable[[], PromptBatch], agrees_on_presence: bool = False):
        self.make_example, self.agrees_on_presence = make_example, agrees_on_presence

    def synchronized(
        self, batch: PromptBatch, needed: Sequence[int], model: nn.Layer
    ) -> PromptBatch:
        return batch | {"presence": tuple(map(bool, needed))} if self.agrees_on_presence else batch

    def idle_batch(self, model: nn.Layer) -> PromptBatch:
        example = self.make_example()
        if "actions" in example:
            changed = {"actions_is_pad": np.ones(example["actions"].shape[:2], dtype=bool)}
            masks = ["discrete_action_masks"]
        else:
            changed, masks = {}, ["memory_masks", "response_masks"]
        changed |= {name: np.zeros_like(example[name]) for name in masks}
        if "actions" not in example:
            changed |= planner_targets({**example, **changed})
        return self.as_prepared(example | changed) | {"counts": (0,) * len(example.counts)}

    def as_prepared(self, batch: PromptBatch) -> PromptBatch:
        """A batch whose masks were changed."""
        if self.agrees_on_presence:
            return batch | {"optional_branches": fields_present(batch)}
        return batch | {"presence": fields_present(batch)}

    def forward(self, model: nn.Layer, batch: PromptBatch) -> dict[str, Tensor]:
        return model(batch, per_sample=True)


def with_lengths(tokens: PrefixTokens, batch: PromptBatch) -> PromptBatch:
    """The batch with the real tokens of each sample's prefix: images, texts, states and discrete
    actions."""
    pad_BL = tokens.masks(batch, presence_of(batch), xp=np).pad_masks
    return batch | {"lengths": tuple(pad_BL.sum(axis=1).tolist())}


# Entries of a batch that are not of the observation.
_TARGETS = {
    *("actions", "actions_is_pad", "real_action_dim", "noise", "time", "delay", "presence"),
    *("discrete_actions", "discrete_action_masks"),
}


def predicted_actions(model: Any, batch: Batch) -> np.ndarray:
    """Chunks that the low-level model samples for a batch, normalized, from the batch's noise."""
    observed = {name: value for name, value in batch.items() if name not in _TARGETS}
    return model.sample_actions(observed, batch["noise"]).numpy()


def first_batch(samples: DrawnDemonstrations, collator: Collator) -> Any:
    """A batch of the first usable sample."""
    for number in range(len(samples) - 1):
        try:
            return collator([samples[number]])
        except BadSampleError:
            if samples.on_bad_sample == "fail":
                raise
    return collator([samples[len(samples) - 1]])
