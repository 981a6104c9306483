"""One training step: gradients over the micro-batches, then one update or none."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import paddle
from paddle import Tensor, nn

from paddle_vl.train.objective import LANGUAGE, Batch, Objective, no_terms, weighted
from paddle_vl.train.optimizer import Optimizer
from paddle_vl.train.phases import Phase, phase
from paddle_vl.train.processes import ONE_PROCESS, SingleProcess


@dataclass(frozen=True)
class StepResult:
    """What a step did.

    Attributes:
        loss: the weighted sum of its terms.
        terms: by name the mean of each term over all its micro-batches: for a language model cross
            entropy over the target tokens; and, if the model computes it, the mean of the
            micro-batches' load-balancing losses times its weight.
        grad_norm: global gradient norm before clipping.
        counts: by name of what each term is the mean.
        num_samples, num_tokens: samples of all micro-batches; real tokens, visual ones too.
        num_packed_places: tokens that packed rows have place for, padding included; 0 without.
        is_skipped: True when loss or norm was not finite, and nothing was updated.
    """

    loss: float
    terms: dict[str, float]
    grad_norm: float
    counts: dict[str, int]
    num_samples: int
    num_tokens: int
    is_skipped: bool
    num_packed_places: int = 0


class WholeModel:
    """A model on one process, or on several that all run every layer of it.

    Args:
        objective: the losses of the model.
        processes: those of the run.
    """

    batches_at_once = 1

    def __init__(
        self,
        model: nn.Layer,
        processes: SingleProcess = ONE_PROCESS,
        objective: Objective = LANGUAGE,
    ):
        self.model, self.objective, self.processes = model, objective, processes

    def accumulate_gradients(self, batches: Sequence[Batch], totals: Sequence[int]) -> Tensor:
        """Add up the gradients of the loss over all batches.

        Args:
            totals: what the terms are divided by.

        Returns:
            `[n]`, this process's part of each term.
        """
        terms = no_terms(self.objective)
        num_batches = len(batches) * self.processes.data_size
        for batch in batches:
            with phase(Phase.FORWARD):
                output = self.objective.output(self.model, batch)
                loss, parts = self.objective.share(output, totals, num_batches)
            with phase(Phase.BACKWARD):
                loss.backward()
                self.model.placement.trained.end_micro_batch()
            terms = terms + parts
        return terms

    @paddle.no_grad()
    def loss_sums(self, batches: Sequence[Batch]) -> Tensor:
        """`[n]`, each term summed over all batches."""
        return sum(
            self.objective.sums(self.objective.output(self.model, batch)) for batch in batches
        )


def train_step(
    runner: WholeModel,
    optimizer: Optimizer,
    micro_batches: Sequence[Batch],
    learning_rate: float,
    processes: SingleProcess = ONE_PROCESS,
) -> StepResult:
    """Train on the micro-batches of all processes as if they were one batch.

    Every micro-batch counts by what its losses are means of, not equally.

    Args:
        runner: the model, or this process's stages of it.
        micro_batches: this process's, as the collator makes them.
        learning_rate: of this update.
        processes: those that train together; all of them call this together.

    Raises:
        ValueError: no micro-batch has anything to learn, so that there is no loss.
    """
    objective, placement = runner.objective, runner.model.placement
    counts = [sum(column) for column in zip(*map(objective.counts, micro_batches), strict=True)]
    asks = [objective.asks(batch) for batch in micro_batches]
    asked = [int(one) for of_batch in asks for one in of_batch]
    with phase(Phase.AGREEMENT):
        totals = processes.totals(
            [
                *counts,
                sum(map(objective.num_samples, micro_batches)),
                sum(map(objective.num_tokens, micro_batches)),
                sum(map(objective.num_packed_places, micro_batches)),
                *asked,
            ]
        )
    num_terms, num_asks = len(counts), len(asks[0])
    counts, totals = totals[:num_terms], totals[num_terms:]
    (num_samples, num_tokens, num_places), asked = totals[:3], totals[3:]
    objective.check_counts(counts, len(micro_batches))
    micro_batches = [
        objective.settled(batch, asked[i * num_asks : (i + 1) * num_asks], runner.model)
        for i, batch in enumerate(micro_batches)
    ]
    terms = runner.accumulate_gradients(micro_batches, counts)
    with phase(Phase.GRADIENT_SUM):
        placement.trained.end_backward()
        processes.sum_gradients(optimizer.tensors)
    with phase(Phase.METRICS):
        means = processes.sum_losses(terms).tolist()
    with phase(Phase.CLIP):
        loss, norm = weighted(means, objective), float(optimizer.gradient_norm(processes))
        is_finite = math.isfinite(loss) and math.isfinite(norm)
        if is_finite:
            optimizer.clip_gradients(norm)
    with phase(Phase.OPTIMIZER):
        if is_finite:
            optimizer.step(learning_rate)
            placement.trained.spread_parameters()
        optimizer.clear_gradients()
    names = list(objective.terms)
    return StepResult(
        loss=loss,
        terms=dict(zip(names, means, strict=True)),
        grad_norm=norm,
        counts=dict(zip(names, counts, strict=True)),
        num_samples=num_samples,
        num_tokens=num_tokens,
        is_skipped=not is_finite,
        num_packed_places=num_places,
    )
