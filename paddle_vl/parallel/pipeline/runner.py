"""One stage's side of a step: its parts of the model, run by fleet's pipeline engine.

A part is a function of a batch and of the rows that the part before made. Gradients add up in the
parameters; nothing is scaled on the way, the last part divides by what the losses are means of.

Every stage has the batches of a step, and so knows the size of each message beforehand. Fleet's
schedules want messages of one size: rows are filled up to the largest of the step, or to what is
reserved, and no shapes travel. With `pp_shapes: dynamic` fleet sends each message's shape instead.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import paddle
from paddle import Tensor, nn

from paddle_vl.batch.schema import Batch
from paddle_vl.nn.loss import Loss, zero_terms
from paddle_vl.nn.master_weights import ParameterStore
from paddle_vl.parallel.degrees import ParallelDegrees
from paddle_vl.parallel.pipeline.engine import Engine
from paddle_vl.parallel.pipeline.schedule import evaluated_batches, parts_of_stage


class Part(Protocol):
    """Consecutive layers of a model."""

    is_first: bool
    is_last: bool

    def input_shape(self, batch: Batch) -> tuple[int, ...]:
        """Shape of the rows that arrive, known without them and without the layers."""

    def reserved_shape(self, batch: Batch, rows: "ReservedRows") -> tuple[int, ...]:
        """The same of the largest micro-batch that is provided for. Asked with `reserved` only.

        Raises:
            ValueError: the batch is larger; with what to set.
        """

    def __call__(self, batch: Batch, rows: Tensor | None = None) -> Any:
        """Rows for the next part; of the last part the model's output."""


class ReservedRows(Protocol):
    """The largest micro-batch that messages are made for, over all mp processes.

    Attributes:
        tokens, visual: its token rows, and those of them that are visual.
    """

    tokens: int
    visual: int


class PipelineRunner:
    """Trains and evaluates a model whose layers are spread over a pipeline.

    The same two methods as `WholeModel` of `paddle_vl.train.step`; all stages call them together,
    with the same batches.

    Args:
        model: what this stage has of the model.
        parts: all parts of the model, in order; those of this stage are run.
        stage: this stage's number.
        dtype: of the rows between parts.
        loss: see `paddle_vl.nn.loss`.
        adapter: of the model's batches, for the trainer.
        data_size: parts of the data, each with such a pipeline.
        reserved: the largest micro-batch of training, if that is fixed.
        marked: opens a context around the forwards and backwards of a step: a clock's phase.
    """

    def __init__(
        self,
        model: nn.Layer,
        parts: Sequence[Part],
        degrees: ParallelDegrees,
        stage: int,
        dtype: str,
        loss: Loss,
        adapter: Any,
        data_size: int = 1,
        reserved: ReservedRows | None = None,
        marked: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        self.marked = marked
        self.model, self.loss, self.adapter, self.data_size = model, loss, adapter, data_size
        self.parts, self.degrees, self.dtype, self.reserved = parts, degrees, dtype, reserved
        self.own_parts = parts_of_stage(degrees, stage)
        self._batches: Sequence[Batch] = ()
        self._store: ParameterStore | None = None
        self._shapes: dict[int, tuple[int, ...]] = {}
        self._terms: list[Tensor] = []
        self._losses_of: Callable[[Any], tuple[Tensor, Tensor]]
        self.engine = Engine(degrees, self._run_part, self._loss, self._end_micro_batch)

    @property
    def batches_at_once(self) -> int:
        """How many batches of an evaluation keep all stages at work."""
        return 2 * self.degrees.pp_degree

    def accumulate_gradients(
        self,
        batches: Sequence[Batch],
        totals: Sequence[int],
        store: ParameterStore | None = None,
    ) -> Tensor:
        """Add up the gradients of the loss over all batches.

        Args:
            store: of the model's parameters; None leaves gradients where autograd put them.

        Returns:
            `[n]`, this pipeline's part of each term on the stage with the last part, zeros on the
            others.

        Raises:
            ValueError: a batch is larger than what is reserved.
        """
        num_batches = len(batches) * self.data_size

        def share(output: Any) -> tuple[Tensor, Tensor]:
            return self.loss.share(output, totals, num_batches)

        self._store = store
        with self.marked():
            terms = self._run(self.engine.train, batches, share, self.reserved)
            self._store = None
            return self._summed(terms)

    @paddle.no_grad()
    def loss_sums(self, batches: Sequence[Batch]) -> Tensor:
        """`[n]`, each term summed over all batches on the stage with the last part, zeros on the
        others."""

        def sums(output: Any) -> tuple[Tensor, Tensor]:
            terms = self.loss.sums(output)
            return terms.sum(), terms

        # Some schedules take certain numbers only: what is repeated does not count.
        num_batches = evaluated_batches(self.degrees, len(batches))
        repeated = [batches[-1]] * (num_batches - len(batches))
        terms = self._run(self.engine.evaluate, [*batches, *repeated], sums, None)
        return self._summed(terms[: len(batches)])

    def _run(
        self,
        run: Callable[[int], None],
        batches: Sequence[Batch],
        losses_of: Callable[[Any], tuple[Tensor, Tensor]],
        reserved: ReservedRows | None,
    ) -> list[Tensor]:
        """The terms of each batch, on the stage with the last part."""
        self._batches, self._losses_of, self._terms = batches, losses_of, []
        if self.degrees.pp_shapes == "dynamic":
            self.engine.forget_shapes()
        else:
            self._shapes = self._message_shapes(batches, reserved)
            # One part: its two neighbours. Several have one size everywhere.
            arriving, leaving = self.own_parts[0], self.own_parts[0] + 1
            if len(self.own_parts) > 1:
                arriving = leaving = 1
            self.engine.know_shapes(
                self._shapes.get(arriving), self._shapes.get(leaving), self.dtype
            )
        run(len(batches))
        terms, self._terms, self._batches = self._terms, [], ()
        return terms

    def _message_shapes(
        self, batches: Sequence[Batch], reserved: ReservedRows | None
    ) -> dict[int, tuple[int, ...]]:
        """By number of the part that they arrive at, with room for the largest batch."""

        def shape(part: Part, batch: Batch) -> tuple[int, ...]:
            if reserved is None:
                return part.input_shape(batch)
            return part.reserved_shape(batch, reserved)

        shapes = {
            number: max(shape(part, batch) for batch in batches)
            for number, part in enumerate(self.parts)
            if not part.is_first
        }
        if len(self.own_parts) > 1:
            # A stage sends from several parts, and has one size for all it sends.
            return dict.fromkeys(shapes, max(shapes.values()))
        return shapes

    def _run_part(self, number: int, micro_batch: int, rows: Tensor | None) -> Any:
        part, batch = self.parts[number], self._batches[micro_batch]
        if part.is_first:
            made = part(batch)
        else:
            made = part(batch, _first_rows(rows, part.input_shape(batch)[0]))
        if part.is_last:
            return made
        if self._shapes:
            made = _filled_up(made, self._shapes[number + 1][0])
        if paddle.is_grad_enabled():
            # Of a part that is frozen nothing depends on the rows, but the stages behind it send
            # their gradient back.
            made.stop_gradient = False
        return made

    def _loss(self, output: Any) -> Tensor:
        loss, terms = self._losses_of(output)
        self._terms.append(terms)
        return loss

    def _end_micro_batch(self) -> None:
        if self._store is not None:
            self._store.end_micro_batch()

    def _summed(self, terms: Sequence[Tensor]) -> Tensor:
        total = zero_terms(self.loss)
        for each in terms:
            total = total + each.astype("float32")
        return total


def _first_rows(rows: Tensor, count: int) -> Tensor:
    return rows if rows.shape[0] == count else rows[:count]


def _filled_up(rows: Tensor, count: int) -> Tensor:
    missing = count - rows.shape[0]
    if not missing:
        return rows
    return paddle.concat([rows, paddle.zeros([missing, *rows.shape[1:]], rows.dtype)])
