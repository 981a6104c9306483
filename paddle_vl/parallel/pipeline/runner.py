"""One stage's side of a step: its model chunks, run by fleet's pipeline engine.

A chunk is a function of a batch and the hidden rows of the previous chunk. Gradients accumulate
without scaling, since the last chunk divides the losses by the counts of the full step.

`fleet.distributed_model` turns a `PipelineLayer` into the class that runs the schedule. Here that
layer contains functions instead of layers, so the model keeps its own parameter names,
initialization and files.

Every stage has the batches of a step, so it knows the shape of each message and none is sent.
Fleet's schedules need messages of one shape: rows are padded to the largest batch of the step, or
to the reserved size. With `pp_shapes: dynamic` fleet sends each shape instead.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import repeat
from typing import Any, Protocol

import paddle
import paddle.distributed as dist
from paddle import Tensor, nn
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import (
    DualPipeVParallel,
    PipelineLayer,
    PipelineParallelMicroStepLocations,
    dualpipev,
)
from paddle.distributed.fleet.meta_parallel.pipeline_parallel import (
    PipelineParallelMicroStepCallback,
)
from paddle.distributed.fleet.meta_parallel.pp_utils.utils import paddle_2_number
from paddle.distributed.fleet.meta_parallel.zero_bubble_utils import SplitBWMatmul

from paddle_vl.batch.schema import Batch
from paddle_vl.config.parallel_settings import ReservedRows
from paddle_vl.nn.linear import use_product
from paddle_vl.nn.master_weights import ParameterStore
from paddle_vl.nn.objective import Loss
from paddle_vl.parallel.degrees import ParallelDegrees
from paddle_vl.parallel.pipeline.schedule import chunks_of_stage, evaluated_batches, num_chunks


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

    Attributes:
        engine: fleet's, for this stage; all stages construct and run it together.
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
        # Micro-batches that each chunk has run.
        self._num_run: dict[int, int] = {}
        is_v = degrees.pp_schedule == "dualpipev"
        layers = PipelineLayer(
            [self._function(number) for number in range(num_chunks(degrees))],
            # DualPipeV passes a single tensor as a list.
            loss_fn=lambda out, _: self._loss(out[0] if isinstance(out, list) else out),
            seg_method="layer:chunk",
            topology=fleet.get_hybrid_communicate_group().topology(),
            num_virtual_pipeline_stages=degrees.num_virtual_stages,
            use_dualpipev=is_v,
        )
        # A PipelineParallel; Any, as its stubs lack the attributes used here.
        self.engine: Any = fleet.distributed_model(layers)
        # Fleet shares one list of callbacks between all engines of a process.
        self.engine.callbacks = PipelineParallelMicroStepCallback()
        if is_v:
            _complete_dualpipev(self.engine, self._end_micro_batch)
        else:
            self.engine.register_hook(
                PipelineParallelMicroStepLocations.BACKWARD_END,
                lambda **_: self._end_micro_batch(),
            )
        # Fleet would read the loss on the host in every step.
        self.engine._broadcast_final_loss = lambda *_, **__: None

    @property
    def batches_at_once(self) -> int:
        """Number of evaluation batches that keeps all stages busy."""
        return 2 * self.degrees.pp_degree

    def accumulate_gradients(
        self,
        batches: Sequence[Batch],
        totals: Sequence[int],
        store: ParameterStore | None = None,
        num_sources: int = 0,
    ) -> Tensor:
        """Forward and backward of all micro-batches.

        Args:
            store: of the model's parameters; None leaves gradients where autograd put them.
            num_sources: S, of batches with sources.

        Returns:
            `[n + S]`, each term of this pipeline's share of the loss, and its sum of each source,
            on the last chunk's stage; zeros on the other stages.

        Raises:
            ValueError: a batch is larger than the reserved size.
        """
        num_batches = len(batches) * self.data_size

        def share(output: Any) -> tuple[Tensor, Tensor]:
            return self.loss.share(output, totals, num_batches)

        self._store = store
        with self.marked():
            terms = self._run(self._train, batches, share, self.reserved)
            self._store = None
            return self._summed(terms, num_sources)

    def loss_sums(self, batches: Sequence[Batch]) -> Tensor:
        """`[n]`, each term summed over all batches on the last chunk's stage; zeros on the other
        stages."""
        return self._summed(self.values(batches, self.loss.sums))

    @paddle.no_grad()
    def values(self, batches: Sequence[Batch], of: Callable[[Any], Tensor]) -> list[Tensor]:
        """A value of the output for each batch on the last chunk's stage, without gradients;
        nothing on the other stages."""

        def sums(output: Any) -> tuple[Tensor, Tensor]:
            found = of(output)
            return found.sum(), found

        # Some schedules need certain numbers of batches; repeated ones are not counted.
        num_batches = evaluated_batches(self.degrees, len(batches))
        repeated = [batches[-1]] * (num_batches - len(batches))
        terms = self._run(self._evaluate, [*batches, *repeated], sums, None)
        return terms[: len(batches)]

    def _run(
        self,
        run: Callable[[Any], None],
        batches: Sequence[Batch],
        losses_of: Callable[[Any], tuple[Tensor, Tensor]],
        reserved: ReservedRows | None,
    ) -> list[Tensor]:
        """The terms of each batch, on the last chunk's stage."""
        self._batches, self._losses_of, self._terms = batches, losses_of, []
        if self.degrees.pp_shapes == "dynamic":
            # Forget the shapes that fleet received, so that this run sends new ones.
            helper = self.engine._p2p_helper
            helper._send_recv_meta_list, helper._dynamic_cnt = [], 0
        else:
            self._shapes = self._message_shapes(batches, reserved)
            self._set_shapes()
        self._num_run.clear()
        self.engine.accumulate_steps = len(batches)
        self.engine._init_user_hooks()
        # Fleet needs no data: every stage has the batches.
        run(repeat(((), None)))
        terms, self._terms, self._batches = self._terms, [], ()
        return terms

    def _train(self, data: Any) -> None:
        self.engine.forward_backward_pipeline(data, None)

    def _evaluate(self, data: Any) -> None:
        if isinstance(self.engine, DualPipeVParallel):
            self.engine.forward_backward_pipeline(data, None, forward_only=True)
        else:
            self.engine.eval_batch(data, compute_loss=True)

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

    def _set_shapes(self) -> None:
        """Set the shapes of all messages of the next run, so that fleet sends none."""
        # Several chunks on a stage: all messages have one shape.
        is_one = len(self.own_chunks) == 1
        number = self.own_chunks[0] if is_one else 1
        arriving = self._shapes.get(number)
        leaving = self._shapes.get(number + 1 if is_one else number)
        meta = self.engine._p2p_helper._send_recv_meta
        meta.init_or_erase_meta()
        dtype = paddle_2_number(getattr(paddle, self.dtype))
        if arriving is not None:
            meta.recv_shape_message, meta.recv_dtype_message = list(arriving), dtype
            meta.recv_stop_gradient, meta.has_recv_meta = False, True
        if leaving is not None:
            meta.send_shape_message, meta.send_dtype_message = list(leaving), dtype
            meta.has_send_meta = True
        if isinstance(self.engine, DualPipeVParallel):
            self.engine.need_broadcast_meta = self.engine.need_recv_meta = False

    def _function(self, number: int) -> Callable[[Any], Any]:
        # Fleet cuts the layers by the name of this function, see seg_method.
        def chunk(rows: Any) -> Any:
            micro_batch = self._num_run.get(number, 0)
            self._num_run[number] = micro_batch + 1
            # DualPipeV passes a tensor as a list; () on the first chunk.
            if isinstance(rows, (list, tuple)):
                rows = rows[0] if rows else None
            return self._run_chunk(number, micro_batch, rows)

        return chunk

    def _run_chunk(self, number: int, micro_batch: int, rows: Tensor | None) -> Any:
        chunk, batch = self.chunks[number], self._batch_of(number, micro_batch)
        if chunk.is_first:
            output = chunk(batch)
        else:
            assert rows is not None, "only the first chunk gets no rows"
            count = chunk.input_shape(batch)[0]
            output = chunk(batch, rows if rows.shape[0] == count else rows[:count])
        if chunk.is_last:
            return output
        if self._shapes:
            missing = self._shapes[number + 1][0] - output.shape[0]
            if missing:
                padding = paddle.zeros([missing, *output.shape[1:]], output.dtype)
                output = paddle.concat([output, padding])
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

    def _summed(self, terms: Sequence[Tensor], num_sources: int = 0) -> Tensor:
        total = paddle.zeros([len(self.loss.terms) + num_sources])
        for each in terms:
            total = total + each.astype("float32")
        return total


def _complete_dualpipev(engine: Any, end_micro_batch: Callable[[], None]) -> None:
    """Add what DualPipeV lacks: evaluation, the micro-batch hook, messages without deep_ep."""
    backward, weights = engine._backward_compute, engine._weight_pass

    def forward_inputs(micro_datasets: Any, phase: int, acc_id: int) -> Any:
        # Without a backward pass fleet's method drops the rows before it returns them.
        if engine.is_pipeline_first_stage() and phase == 0:
            engine.input_tensors[phase].append(next(micro_datasets[phase])[0])
        inputs = engine.input_tensors[phase][acc_id]
        if engine.forward_only:
            engine.input_tensors[phase][acc_id] = None
        return inputs

    def backward_compute(*args: Any, **kwargs: Any) -> None:
        backward(*args, **kwargs)
        if not engine.forward_only:
            end_micro_batch()

    def weight_pass() -> None:
        weights()
        if not engine.forward_only:
            end_micro_batch()

    def commit_and_wait(*_: Any, **__: Any) -> None:
        for operations in (engine.comm_forward_ops, engine.comm_backward_ops):
            for request in dist.batch_isend_irecv(operations) if operations else ():
                request.wait()
        engine.comm_forward_ops, engine.comm_backward_ops = [], []
        engine._free_tensors()

    engine._get_forward_inputs = forward_inputs
    engine._backward_compute, engine._weight_pass = backward_compute, weight_pass
    if dualpipev.deep_ep is None:
        engine._commit_and_wait_comm = commit_and_wait


def split_backward(layers: Iterable[nn.Layer]) -> None:
    """Make linears compute the input's gradient first, and the weight's when fleet asks for it.

    Zero-bubble schedules (DualPipeV) compute the weights' gradients where a stage would wait.
    Linears that are split over a tensor-parallel group are fleet's own and have no such form. Hooks
    on the gradients of these weights are not called then.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, https://arxiv.org/abs/2401.10241.
    """
    for layer in layers:
        for parameter in layer.parameters():
            if parameter.ndim == 2:
                use_product(parameter, _split_product)


def _split_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return SplitBWMatmul.apply(x, weight, bias)
