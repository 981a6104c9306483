"""Fleet's pipeline engine over the functions of this stage's model chunks.

`fleet.distributed_model` turns a `PipelineLayer` into the class that runs the schedule. Here that
layer contains functions instead of layers, so the model keeps its own parameter names,
initialization and files.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any

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

from paddle_vl.nn.linear import use_product
from paddle_vl.parallel.degrees import ParallelDegrees
from paddle_vl.parallel.pipeline.schedule import num_chunks

# (chunk number, micro-batch number, rows of the previous chunk) -> rows for the next chunk.
RunChunk = Callable[[int, int, Tensor | None], Any]


class Engine:
    """Fleet's engine for this stage. All stages construct and run it together.

    Args:
        run_chunk: runs one of this stage's chunks on a micro-batch.
        loss: of the last chunk's output.
        end_micro_batch: called after each backward pass of a chunk.
    """

    def __init__(
        self,
        degrees: ParallelDegrees,
        run_chunk: RunChunk,
        loss: Callable[[Any], Tensor],
        end_micro_batch: Callable[[], None],
    ):
        # Micro-batches that each chunk has run.
        self._num_run: dict[int, int] = {}
        self._run_chunk = run_chunk
        is_v = degrees.pp_schedule == "dualpipev"
        chunks = PipelineLayer(
            [self._function(number) for number in range(num_chunks(degrees))],
            # DualPipeV passes a single tensor as a list.
            loss_fn=lambda output, _: loss(output[0] if isinstance(output, list) else output),
            seg_method="layer:chunk",
            topology=fleet.get_hybrid_communicate_group().topology(),
            num_virtual_pipeline_stages=degrees.num_virtual_stages,
            use_dualpipev=is_v,
        )
        # A PipelineParallel; Any, as its stubs lack the attributes used here.
        self.fleet: Any = fleet.distributed_model(chunks)
        # Fleet shares one list of callbacks between all engines of a process.
        self.fleet.callbacks = PipelineParallelMicroStepCallback()
        if is_v:
            _complete_dualpipev(self.fleet, end_micro_batch)
        else:
            self.fleet.register_hook(
                PipelineParallelMicroStepLocations.BACKWARD_END, lambda **_: end_micro_batch()
            )
        # Fleet would read the loss on the host in every step.
        self.fleet._broadcast_final_loss = lambda *_, **__: None

    def train(self, num_batches: int) -> None:
        """Run forward and backward of all micro-batches."""
        self.fleet.forward_backward_pipeline(self._begin(num_batches), None)

    def evaluate(self, num_batches: int) -> None:
        """Run forward passes only; call it with gradients disabled."""
        data = self._begin(num_batches)
        if isinstance(self.fleet, DualPipeVParallel):
            self.fleet.forward_backward_pipeline(data, None, forward_only=True)
        else:
            self.fleet.eval_batch(data, compute_loss=True)

    def set_shapes(
        self, arriving: Sequence[int] | None, leaving: Sequence[int] | None, dtype: str
    ) -> None:
        """Set the shapes of all messages of the next run, so that fleet sends none."""
        helper, number = self.fleet._p2p_helper, paddle_2_number(getattr(paddle, dtype))
        meta = helper._send_recv_meta
        meta.init_or_erase_meta()
        if arriving is not None:
            meta.recv_shape_message, meta.recv_dtype_message = list(arriving), number
            meta.recv_stop_gradient, meta.has_recv_meta = False, True
        if leaving is not None:
            meta.send_shape_message, meta.send_dtype_message = list(leaving), number
            meta.has_send_meta = True
        if isinstance(self.fleet, DualPipeVParallel):
            self.fleet.need_broadcast_meta = self.fleet.need_recv_meta = False

    def forget_shapes(self) -> None:
        """Clear the shapes that fleet received, so that the next run sends new ones."""
        helper = self.fleet._p2p_helper
        helper._send_recv_meta_list, helper._dynamic_cnt = [], 0

    def _begin(self, num_batches: int) -> Iterator[tuple]:
        self._num_run.clear()
        self.fleet.accumulate_steps = num_batches
        self.fleet._init_user_hooks()
        # Fleet needs no data: every stage has the batches.
        return repeat(((), None))

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
