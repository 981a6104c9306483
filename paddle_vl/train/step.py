"""One training step: gradients over the micro-batches, then one update or none.

Nothing of it is read back on the host: its losses, its gradient norm and whether it counted stay on
the device until somebody asks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import paddle
from paddle import Tensor, nn

from paddle_vl.nn.master_weights import ParameterStore
from paddle_vl.train.feeding.micro_batch import MicroBatch, totals_of
from paddle_vl.train.objective import LANGUAGE, Batch, Objective, no_terms
from paddle_vl.train.optimizer import Optimizer
from paddle_vl.train.phases import Phase, phase
from paddle_vl.train.processes import ONE_PROCESS, SingleProcess

# Samples, tokens, packed places.
_NUM_REST = 3


@dataclass(frozen=True)
class StepTotals:
    """What all processes together put into a step, known on the host before it begins.

    Attributes:
        counts: what each loss term is the mean of.
        num_samples, num_tokens: samples of all micro-batches; real tokens, visual ones too.
        num_packed_places: tokens that packed rows have place for, padding included; 0 without.
        asked: for each micro-batch how many processes asked for what, see `Objective.asks`.
        signal: a stop signal that any process received; the step is not to be begun then.
    """

    counts: tuple[int, ...]
    num_samples: int
    num_tokens: int
    num_packed_places: int
    asked: tuple[tuple[int, ...], ...]
    signal: int | None = None

    @property
    def num_agreed(self) -> int:
        """How many numbers were agreed on, the same for every step of a run."""
        return len(self.counts) + _NUM_REST + sum(map(len, self.asked))


@dataclass(frozen=True)
class StepOutcome:
    """What a step did, on the device.

    Attributes:
        terms: `[n]` float32, the mean of each loss term over all its micro-batches: for a language
            model cross entropy over the target tokens; and, if the model computes it, the mean of
            the micro-batches' load-balancing losses times its weight.
        grad_norm: float32, the global gradient norm before clipping.
        is_good: bool; False when a loss or the norm was not finite, and nothing was updated.
        totals: of the step.
    """

    terms: Tensor
    grad_norm: Tensor
    is_good: Tensor
    totals: StepTotals

    def means(self, objective: Objective) -> dict[str, float]:
        """The terms by name, read from the device."""
        return dict(zip(objective.terms, self.terms.tolist(), strict=True))


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

    def accumulate_gradients(
        self,
        batches: Sequence[Batch],
        totals: Sequence[int],
        store: ParameterStore | None = None,
    ) -> Tensor:
        """Add up the gradients of the loss over all batches.

        Args:
            totals: what the terms are divided by.
            store: of the model's parameters; None leaves gradients where autograd put them.

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
                if store is not None:
                    store.end_micro_batch()
            terms = terms + parts
        return terms

    @paddle.no_grad()
    def loss_sums(self, batches: Sequence[Batch]) -> Tensor:
        """`[n]`, each term summed over all batches."""
        return sum(
            self.objective.sums(self.objective.output(self.model, batch)) for batch in batches
        )


def agree_on_step(
    micro_batches: Sequence[MicroBatch],
    objective: Objective,
    processes: SingleProcess = ONE_PROCESS,
    signal: int | None = None,
) -> StepTotals:
    """What all processes bring to a step; the only message before it. Called by all together.

    Args:
        signal: a stop signal that this process received.

    Raises:
        ValueError: there is nothing to learn in all of the step.
    """
    own, asks = totals_of(micro_batches), [batch.asks for batch in micro_batches]
    with phase(Phase.AGREEMENT):
        totals, signal = processes.agree([*own, *(int(a) for of in asks for a in of)], signal)
    num_terms, num_asks = len(objective.terms), len(asks[0])
    counts, rest = totals[:num_terms], totals[num_terms:]
    (num_samples, num_tokens, num_places), asked = rest[:_NUM_REST], rest[_NUM_REST:]
    if signal is None:
        objective.check_counts(counts, len(micro_batches))
    of_batches = (asked[i * num_asks : (i + 1) * num_asks] for i in range(len(asks)))
    return StepTotals(
        tuple(counts), num_samples, num_tokens, num_places, tuple(map(tuple, of_batches)), signal
    )


def leave_step(num_agreed: int, processes: SingleProcess, signal: int | None) -> int | None:
    """Bring nothing but a stop signal to a step that the others may have batches for; returns the
    signal that all stop for. In place of `agree_on_step`.

    Args:
        num_agreed: of an earlier step.
    """
    return processes.agree([0] * num_agreed, signal)[1]


def train_step(
    runner: WholeModel,
    optimizer: Optimizer,
    micro_batches: Sequence[MicroBatch],
    learning_rate: float,
    processes: SingleProcess = ONE_PROCESS,
    totals: StepTotals | None = None,
) -> StepOutcome:
    """Train on the micro-batches of all processes as if they were one batch.

    Every micro-batch counts by what its losses are means of, not equally.

    Args:
        runner: the model, or this process's stages of it.
        micro_batches: this process's.
        learning_rate: of this update.
        processes: those that train together; all of them call this together.
        totals: what they agreed on; None to do so here.

    Raises:
        ValueError: no micro-batch has anything to learn, so that there is no loss.
    """
    objective, store = runner.objective, optimizer.store
    totals = totals or agree_on_step(micro_batches, objective, processes)
    batches = [
        objective.settled(micro_batch.batch, asked, runner.model)
        for micro_batch, asked in zip(micro_batches, totals.asked, strict=True)
    ]
    store.begin_step(len(batches))
    terms = runner.accumulate_gradients(batches, totals.counts, store)
    with phase(Phase.GRADIENT_SUM):
        store.end_backward()
        processes.sum_gradients(optimizer.tensors_with_specs)
    with phase(Phase.CLIP):
        terms, norm = _summed(terms, optimizer, processes)
        is_good = paddle.isfinite(terms).all() & paddle.isfinite(norm)
    with phase(Phase.OPTIMIZER):
        optimizer.update(learning_rate, norm, is_good)
        optimizer.clear_gradients()
    return StepOutcome(terms, norm, is_good, totals)


@paddle.no_grad()
def _summed(terms: Tensor, optimizer: Optimizer, processes: SingleProcess) -> tuple[Tensor, Tensor]:
    """The step's terms and its gradient norm, in one sum over all processes."""
    own = terms if processes.counts_losses else paddle.zeros_like(terms)
    squares = optimizer.squared_norm(processes)
    totals = processes.sum_over_all(paddle.concat([own, squares.reshape([1])]))
    return totals[:-1], totals[-1].sqrt()
