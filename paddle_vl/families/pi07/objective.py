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

from paddle_vl.batch.positions import target_rows
from paddle_vl.batch.rows import IGNORE_INDEX
from paddle_vl.batch.schema import Batch
from paddle_vl.data.jsonl import BadSampleError
from paddle_vl.data.samples import Collator
from paddle_vl.families.pi07.flow import as_tensors
from paddle_vl.families.pi07.prefix import PrefixTokens, Presence, presence_of
from paddle_vl.families.policy.demonstrations.sample import DrawnDemonstrations
from paddle_vl.nn.objective import BatchAdapter, Loss

# The losses of the low-level policy and of the planner, each with its divisor in a batch: `MSE` of
# the flow and `CE` of discrete actions; cross entropies of the planner's memory and response.
POLICY_LOSSES = {"MSE": "num_flow_values", "CE": "num_action_slots"}
PLANNER_LOSSES = {"CE_memory": "num_memory_slots", "CE_response": "num_response_slots"}
_DIVISORS = (*POLICY_LOSSES.values(), *PLANNER_LOSSES.values())


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


class PolicyBatchAdapter(BatchAdapter[Batch]):
    """Batches of the low-level policy (`PolicyBatch`) and of the planner (`PlannerBatch`).

    Args:
        make_example: makes some batch of the run, from which an idle batch is derived.
        agrees_on_presence: whether ranks lay out the optional fields that any of them has.
        tokens: layout of the model's prefix, for the lengths of samples; None counts none.
    """

    def __init__(
        self,
        make_example: Callable[[], Batch],
        agrees_on_presence: bool = False,
        tokens: PrefixTokens | None = None,
    ):
        self.make_example, self.agrees_on_presence = make_example, agrees_on_presence
        self.tokens = tokens

    def counts(self, batch: Batch) -> list[int]:
        return [batch[name] for name in _DIVISORS if name in batch]

    def num_samples(self, batch: Batch) -> int:
        return len(batch["lang_tokens"])

    def lengths(self, batch: Batch) -> list[int]:
        """Real tokens of each sample's prefix: images, texts, states and discrete actions."""
        if self.tokens is None:
            return []
        pad_BL = self.tokens.masks(batch, presence_of(batch), xp=np).pad_masks
        return pad_BL.sum(axis=1).tolist()

    def optional_branches(self, batch: Batch) -> list[bool]:
        return list(presence_of(batch)) if self.agrees_on_presence else []

    def prepared(self, batch: Batch) -> Batch:
        """The batch with what only the host knows: token slots with a target, and its fields."""
        batch = with_target_rows(batch)
        # With agreement `synchronized` sets it.
        return batch if self.agrees_on_presence else {**batch, "presence": presence_of(batch)}

    def synchronized(self, batch: Batch, needed: Sequence[int], model: nn.Layer) -> Batch:
        if not self.agrees_on_presence:
            return batch
        return {**batch, "presence": Presence(*map(bool, needed))}

    def idle_batch(self, model: nn.Layer) -> Batch:
        example = self.make_example()
        if "actions" in example:
            targets = {"actions_is_pad": np.ones(example["actions"].shape[:2], dtype=bool)}
            masks = ["discrete_action_masks"]
        else:
            targets, masks = {}, ["memory_masks", "response_masks"]
        targets |= {name: np.zeros_like(example[name]) for name in masks}
        return {**example, **{name: 0 for name in _DIVISORS if name in example}, **targets}

    def to_device(self, batch: Batch) -> Batch:
        batch = with_target_rows(batch)
        fields = {name: value for name, value in batch.items() if name not in _DIVISORS}
        presence = fields.pop("presence", None)
        # Masks are read on the host, before they become tensors.
        presence = presence_of(fields) if presence is None else presence
        return {**as_tensors(fields), "presence": presence}

    def forward(self, model: nn.Layer, batch: Batch) -> dict[str, Tensor]:
        fields = dict(batch)
        return model(fields, presence=fields.pop("presence"), per_sample=True)


# Entries of a batch that are not of the observation.
_TARGETS = {
    *("actions", "actions_is_pad", "real_action_dim", "noise", "time", "delay", "presence"),
    *("discrete_actions", "discrete_action_masks", *_DIVISORS),
}


def predicted_actions(model: Any, batch: Batch) -> np.ndarray:
    """Chunks that the low-level model samples for a batch, normalized, from the batch's noise."""
    observed = {name: value for name, value in batch.items() if name not in _TARGETS}
    return model.sample_actions(observed, batch["noise"]).numpy()


def with_target_rows(batch: Batch) -> Batch:
    """The planner's batch with the token slots of its texts that have a target; the policy's as it
    is."""
    added = {}
    if "memory_masks" not in batch:
        return batch
    for text in ("memory", "response"):
        name, masks_BL = f"{text}_target_rows", batch[f"{text}_masks"]
        # Only the host knows them; each token predicts the next.
        if name not in batch and isinstance(masks_BL, np.ndarray):
            targets_BL = np.where(masks_BL, batch[f"{text}_tokens"], IGNORE_INDEX)[:, 1:]
            added[name] = target_rows(targets_BL.reshape(-1))
    return {**batch, **added}


def first_batch(samples: DrawnDemonstrations, collator: Collator) -> Batch:
    """A batch of the first usable sample."""
    for number in range(len(samples) - 1):
        try:
            return collator([samples[number]])
        except BadSampleError:
            if samples.on_bad_sample == "fail":
                raise
    return collator([samples[len(samples) - 1]])
