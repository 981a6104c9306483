"""One stage's side of a step: its parts of the model run as the plan says.

A part is a function of a batch and of the rows that the part before made. Gradients add up in the
parameters; nothing is scaled on the way, the last part divides by what the losses are means of.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import paddle
from paddle import Tensor, nn

from paddle_vl.parallel.pipeline.exchange import Arriving, Exchange
from paddle_vl.parallel.pipeline.schedule import Operation, plan

Batch = dict[str, Any]


class Objective(Protocol):
    """What the last part's output is worth, see `paddle_vl.train.objective`."""

    terms: Mapping[str, float]

    def share(self, output: Any, totals: Sequence[int], num_batches: int) -> tuple[Tensor, Tensor]:
        """What a batch adds to a step: to its loss, and to each of its terms."""

    def sums(self, output: Any) -> Tensor:
        """Each term of a batch before it is divided."""


class Part(Protocol):
    """Consecutive layers of a model."""

    is_first: bool
    is_last: bool

    def input_shape(self, batch: Batch) -> tuple[int, ...]:
        """Shape of the rows that arrive, known without them."""

    def __call__(self, batch: Batch, rows: Tensor | None = None) -> Any:
        """Rows for the next part; of the last part the model's output."""


class PipelineRunner:
    """Trains and evaluates a model whose layers are spread over a pipeline.

    The same two methods as `WholeModel` of `paddle_vl.train.step`; all stages call them together,
    with the same batches.

    Args:
        model: what the parts are of, on this stage.
        parts: those of this stage, by their place in the model; part i is number
            `i * num_stages + stage` of all.
        group: the processes of the pipeline, by stage.
        dtype: of the rows between parts.
        objective: the losses of the model.
        data_size: parts of the data, each with such a pipeline.
    """

    def __init__(
        self,
        model: nn.Layer,
        parts: Sequence[Part],
        group,
        dtype: str,
        objective: Objective,
        data_size: int = 1,
    ):
        self.model, self.objective, self.data_size = model, objective, data_size
        self.parts = {i * group.nranks + group.rank: part for i, part in enumerate(parts)}
        self.num_stages, self.num_virtual, self.stage = group.nranks, len(parts), group.rank
        self.exchange = Exchange(group, dtype)

    def accumulate_gradients(self, batches: Sequence[Batch], totals: Sequence[int]) -> Tensor:
        """Add up the gradients of the loss over all batches.

        Returns:
            `[n]`, this pipeline's part of each term on the last stage, zeros on the others.
        """
        num_batches = len(batches) * self.data_size

        def share(output: Any) -> tuple[Tensor, Tensor]:
            return self.objective.share(output, totals, num_batches)

        return _Step(self, batches, share).run(self._operations(len(batches)))

    @property
    def batches_at_once(self) -> int:
        """How many batches of an evaluation keep all stages at work."""
        return 2 * self.num_stages

    @paddle.no_grad()
    def loss_sums(self, batches: Sequence[Batch]) -> Tensor:
        """`[n]`, each term summed over all batches on the last stage, zeros on the others."""

        def sums(output: Any) -> tuple[None, Tensor]:
            return None, self.objective.sums(output)

        return _Step(self, batches, sums).run(self._operations(len(batches), forward_only=True))

    def _operations(self, num_batches: int, forward_only: bool = False) -> list[Operation]:
        plans = plan(self.num_stages, self.num_virtual, num_batches, forward_only)
        return plans[self.stage]


class _Step:
    """What a stage holds during a step.

    Args:
        losses_of: of a batch's output the loss to go back from, and what it adds to the terms.
    """

    def __init__(
        self,
        runner: PipelineRunner,
        batches: Sequence[Batch],
        losses_of: Callable[[Any], tuple[Tensor | None, Tensor]],
    ):
        self.parts, self.exchange = runner.parts, runner.exchange
        self.batches, self.losses_of = batches, losses_of
        self.trained = runner.model.placement.trained
        self.terms = paddle.zeros([len(runner.objective.terms)])
        # By part and micro-batch: what entered a part, what it made, and what is on its way here.
        self.entered: dict[tuple[int, int], Tensor | None] = {}
        self.made: dict[tuple[int, int], Tensor] = {}
        self.arriving: dict[tuple[str, int, int], Arriving] = {}

    def run(self, operations: Sequence[Operation]) -> Tensor:
        does = {
            "forward": self.forward,
            "backward": self.backward,
            "send": self.send,
            "receive": self.receive,
        }
        for operation in operations:
            does[operation.kind](operation)
        self.exchange.finish()
        return self.terms

    def forward(self, operation: Operation) -> None:
        _, _, number, micro_batch, _ = operation
        part, rows = self.parts[number], None
        if not part.is_first:
            rows = self.arriving.pop(("forward", number - 1, micro_batch)).wait()
            rows.stop_gradient = not paddle.is_grad_enabled()
        made = part(self.batches[micro_batch], rows)
        if part.is_last:
            made, terms = self.losses_of(made)
            self.terms = self.terms + terms.astype("float32")
        self.entered[number, micro_batch], self.made[number, micro_batch] = rows, made

    def backward(self, operation: Operation) -> None:
        _, _, number, micro_batch, _ = operation
        made = self.made.pop((number, micro_batch))
        gradient = None
        if not self.parts[number].is_last:
            gradient = self.arriving.pop(("backward", number + 1, micro_batch)).wait()
        # A first part that is frozen made rows that nothing depends on.
        if not made.stop_gradient:
            paddle.autograd.backward([made], [gradient])
        self.trained.end_micro_batch()

    def send(self, operation: Operation) -> None:
        _, of, number, micro_batch, peer = operation
        if of == "forward":
            made = self.made[number, micro_batch]
            self.exchange.send(made.detach(), peer)
            if not paddle.is_grad_enabled():
                del self.made[number, micro_batch]
        else:
            self.exchange.send(self.entered.pop((number, micro_batch)).grad, peer)

    def receive(self, operation: Operation) -> None:
        """Rows of the part before one of ours, or the gradient of the rows that ours made."""
        _, of, number, micro_batch, peer = operation
        if of == "forward":
            shape = self.parts[number + 1].input_shape(self.batches[micro_batch])
        else:
            shape = self.made[number - 1, micro_batch].shape
        self.arriving[of, number, micro_batch] = self.exchange.receive(shape, peer)
