"""One training step: gradients over the micro-batches, then one update or none."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import paddle
from paddle import Tensor, nn

from paddle_vl.train.in_step import has_visual, in_step
from paddle_vl.train.optimizer import Optimizer
from paddle_vl.train.processes import ONE_PROCESS, SingleProcess

Batch = dict[str, Any]


@dataclass(frozen=True)
class StepResult:
    """What a step did.

    Attributes:
        loss: mean cross entropy over the target tokens of all its micro-batches; and, if the model
            computes it, the mean of the micro-batches' load-balancing losses times its weight.
        grad_norm: global gradient norm before clipping.
        num_target_tokens: how many tokens the loss is the mean of.
        num_tokens: real tokens of all micro-batches, visual ones too.
        num_packed_places: tokens that packed rows have place for, padding included; 0 without.
        is_skipped: True when loss or norm was not finite, and nothing was updated.
    """

    loss: float
    grad_norm: float
    num_target_tokens: int
    num_tokens: int
    is_skipped: bool
    num_packed_places: int = 0


class WholeModel:
    """A model on one process, or on several that all run every layer of it."""

    def __init__(self, model: nn.Layer, processes: SingleProcess = ONE_PROCESS):
        self.model, self.processes = model, processes

    def accumulate_gradients(self, batches: Sequence[Batch], num_target_tokens: int) -> Tensor:
        """Add up the gradients of the mean loss over all batches, and return that loss."""
        total = None
        for batch in batches:
            num_batches = len(batches) * self.processes.data_size
            loss = self.model(**batch).share_of_step(num_target_tokens, num_batches)
            loss.backward()
            self.model.placement.trained.end_micro_batch()
            total = loss.detach() if total is None else total + loss.detach()
        return total

    batches_at_once = 1

    @paddle.no_grad()
    def loss_sum(self, batches: Sequence[Batch]) -> Tensor:
        """Summed cross entropy of all batches."""
        return sum(self.model(**batch).loss_sum for batch in batches)


def train_step(
    model: WholeModel,
    optimizer: Optimizer,
    micro_batches: Sequence[Batch],
    learning_rate: float,
    processes: SingleProcess = ONE_PROCESS,
) -> StepResult:
    """Train on the micro-batches of all processes as if they were one batch.

    Every micro-batch counts by its number of target tokens, not equally.

    Args:
        model: the model, or this process's stages of it.
        micro_batches: this process's, as the collator makes them, `num_target_tokens` included.
        learning_rate: of this update.
        processes: those that train together; all of them call this together.

    Raises:
        ValueError: no micro-batch has a target token, so that there is no loss.
    """
    total, num_tokens, num_places, *with_visual = processes.totals(
        [
            sum(batch["num_target_tokens"] for batch in micro_batches),
            sum(int(batch["attention_mask"].sum()) for batch in micro_batches),
            sum(batch["input_ids"].size for batch in micro_batches if "cu_seqlens" in batch),
            *map(has_visual, micro_batches),
        ]
    )
    if total == 0:
        raise ValueError(
            f"the {len(micro_batches)} micro-batch(es) of this step have no target token, every "
            "label is -100: nothing can be learned from them; check that the samples have "
            "assistant turns within data.max_length"
        )
    placement = model.model.placement
    if placement.layers_are_collective:
        micro_batches = in_step(micro_batches, with_visual, model.model.config.vision_config)
    loss = model.accumulate_gradients(micro_batches, total)
    placement.trained.end_backward()
    processes.sum_gradients(optimizer.tensors)
    loss = float(processes.sum_losses(loss))
    norm = float(optimizer.gradient_norm(processes))
    is_finite = math.isfinite(loss) and math.isfinite(norm)
    if is_finite:
        optimizer.clip_gradients(norm)
        optimizer.step(learning_rate)
        placement.trained.spread_parameters()
    optimizer.clear_gradients()
    return StepResult(loss, norm, total, num_tokens, not is_finite, num_places)
