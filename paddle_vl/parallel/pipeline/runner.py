"""One stage's side of a step: its model chunks, run by fleet's pipeline engine.

A chunk is a function of a batch and the hidden rows of the previous chunk. Gradients accumulate
without scaling, since the last chunk divides the losses by the counts of the full step.

Every stage has the batches of a step, so it knows the shape of each message and none is sent.
Fleet's schedules need messages of one shape: rows are padded to the largest batch of the step, or
to the reserved size. With `pp_shapes: dynamic` fleet sends each shape instead.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import paddle
from paddle import Tensor, nn

from paddle_vl.batch.schema import Batch
from paddle_vl.config.parallel_settings import ReservedRows
from paddle_vl.nn.master_weights import ParameterStore
from paddle_vl.nn.objective import Loss, zero_terms
from paddle_vl.parallel.degrees import ParallelDegrees
from paddle_vl.parallel.pipeline.engine import Engine
from paddle_vl.parallel.pipeline.schedule import chunks_of_stage, evaluated_batches


class ModelChunk(Protocol):
    """Consecutive layers of a model."""

    is_first: bool
    is_last: bool

    def input_shape(self, batch: Any) -> tuple[int, ...]:
        """Shape of the received rows, from the batch alone."""
        ...

    def reserved_shape(self, batch: Any, rows: ReservedRows) -> tuple[int, ...]:
        """The same for the largest reserved micro-batch; called only if one is reserved.

        Raises:
            ValueError: the batch is larger.
        """
        ...

    def __call__(self, batch: Any, rows: Tensor | None = None, /) -> Any:
        """Rows for the next chunk; the output of the model for the last one."""


class PipelineRunner:
    """Trains and evaluates a model whose layers are divided over the stages of a pipeline.

    Has the methods of `ModelRunner` in `paddle_vl.train.step`. They are collective over the
    pipeline: all stages call them, with the same batches. Rows go to the next stage in forward, and
    their gradients come back in backward, per micro-batch in the order of the schedule.

    Args:
        model: this stage's layers.
        chunks: all chunks of the model in order; this stage runs its own.
        stage: number of this stage.
        dtype: of the rows between chunks.
        loss: see `paddle_vl.nn.objective`.
        adapter: of the model's batches, for the trainer.
        data_size: number of data shards, each with its own pipeline.
        reserved: the largest micro-batch of training, if it is fixed.
        marked: makes a context around forward and backward of a step, to measure its time.
    """

    def __init__(
        self,
        model: nn.Layer,
        chunks: Sequence[ModelChunk],
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
        self.chunks, self.degrees, self.dtype, self.reserved = chunks, degrees, dtype, reserved
        self.own_chunks = chunks_of_stage(degrees, stage)
        self._batches: Sequence[Batch] = ()
        self._store: ParameterStore | None = None
        self._shapes: dict[int, tuple[int, ...]] = {}
        self._terms: list[Tensor] = []
        self._losses_of: Callable[[Any], tuple[Tensor, Tensor]]
        self.engine = Engine(degrees, self._run_chunk, self._loss, self._end_micro_batch)

    @property
    def batches_at_once(self) -> int:
        """Number of evaluation batches that keeps all stages busy."""
        return 2 * self.degrees.pp_degree

    def accumulate_gradients(
        self,
        batches: Sequence[Batch],
        totals: Sequence[int],
        store: ParameterStore | None = None,
    ) -> Tensor:
        """Forward and backward of all micro-batches.

        Args:
            store: of the model's parameters; None leaves gradients where autograd put them.

        Returns:
            `[n]`, each term of this pipeline's share of the loss on the last chunk's stage; zeros
            on the other stages.

        Raises:
            ValueError: a batch is larger than the reserved size.
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
        """`[n]`, each term summed over all batches on the last chunk's stage; zeros on the other
        stages."""

        def sums(output: Any) -> tuple[Tensor, Tensor]:
            terms = self.loss.sums(output)
            return terms.sum(), terms

        # Some schedules need certain numbers of batches; repeated ones are not counted.
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
        """The terms of each batch, on the last chunk's stage."""
        self._batches, self._losses_of, self._terms = batches, losses_of, []
        if self.degrees.pp_shapes == "dynamic":
            self.engine.forget_shapes()
        else:
            self._shapes = self._message_shapes(batches, reserved)
            # Several chunks on a stage: all messages have one shape.
            arriving, leaving = self.own_chunks[0], self.own_chunks[0] + 1
            if len(self.own_chunks) > 1:
                arriving = leaving = 1
            self.engine.set_shapes(
                self._shapes.get(arriving), self._shapes.get(leaving), self.dtype
            )
        run(len(batches))
        terms, self._terms, self._batches = self._terms, [], ()
        return terms

    def _message_shapes(
        self, batches: Sequence[Batch], reserved: ReservedRows | None
    ) -> dict[int, tuple[int, ...]]:
        """Message shapes by number of the receiving chunk, with room for the largest batch."""

        def shape(chunk: ModelChunk, batch: Batch) -> tuple[int, ...]:
            if reserved is None:
                return chunk.input_shape(batch)
            return chunk.reserved_shape(batch, reserved)

        shapes = {
            number: max(shape(chunk, batch) for batch in batches)
            for number, chunk in enumerate(self.chunks)
            if not chunk.is_first
        }
        if len(self.own_chunks) > 1:
            return dict.fromkeys(shapes, max(shapes.values()))
        return shapes

    def _run_chunk(self, number: int, micro_batch: int, rows: Tensor | None) -> Any:
        chunk, batch = self.chunks[number], self._batch_of(number, micro_batch)
        if chunk.is_first:
            output = chunk(batch)
        else:
            output = chunk(batch, _first_rows(rows, chunk.input_shape(batch)[0]))
        if chunk.is_last:
            return output
        if self._shapes:
            output = _padded(output, self._shapes[number + 1][0])
        if paddle.is_grad_enabled():
            # The output of frozen layers needs no gradient, but the next stage sends one back.
            output.stop_gradient = False
        return output

    def _batch_of(self, number: int, micro_batch: int) -> Any:
        """What a chunk is called with for a micro-batch."""
        return self._batches[micro_batch]

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


def _first_rows(rows: Any, count: int) -> Tensor:
    return rows if rows.shape[0] == count else rows[:count]


def _padded(rows: Tensor, count: int) -> Tensor:
    missing = count - rows.shape[0]
    if not missing:
        return rows
    return paddle.concat([rows, paddle.zeros([missing, *rows.shape[1:]], rows.dtype)])
