"""Functions of fleet that need an accelerator's kernel or device, rewritten on gloo's collectives.

The primitives of tensor-parallel layers have kernels for accelerators only. The last axis
(features, or the vocabulary) is sharded over the group. Layers that split their input or gather
their output are not used here, so their primitives are left out.

| primitive | forward | backward |
| --- | --- | --- |
| `_c_identity` | identity | all-reduce of the gradient |
| `_mp_allreduce` | all-reduce | identity |
| `_c_softmax_with_cross_entropy` | all-reduces: maximum, sum of exp, target logit | local |
"""

import paddle
import paddle.nn.functional as F
from paddle import Tensor
from paddle.autograd import PyLayer
from paddle.base import core
from paddle.distributed import collective

from paddle_vl.parallel.gloo_fleet.patch import PATCHES, Patch, replaces

_FLEET = "paddle.distributed.fleet"
_OPERATIONS = f"{_FLEET}.layers.mpu.mp_ops"
_NO_KERNEL = "Do not support c_... for cpu kernel now"
_NO_FUSION = "tensor fusion helper now only support ['gpu', 'npu', 'xpu'], but got cpu"


class _Identity(PyLayer):
    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        return tensor.clone()

    @staticmethod
    def backward(ctx, grad):
        return _reduced(grad, ctx.group)


class _AllReduce(PyLayer):
    @staticmethod
    def forward(ctx, tensor, group):
        return _reduced(tensor, group)

    @staticmethod
    def backward(ctx, grad):
        return grad.clone()


class _CrossEntropy(PyLayer):
    """Cross entropy of logits whose vocabulary is sharded, computed at least in float32."""

    @staticmethod
    def forward(ctx, logits, label, group, ignore_index):
        x = logits if logits.dtype == paddle.float64 else logits.astype("float32")
        x = x - _reduced(x.max(axis=-1, keepdim=True), group, core.ReduceOp.MAX)
        exp = paddle.exp(x)
        denominator = _reduced(exp.sum(axis=-1, keepdim=True), group)
        label = label.astype("int64")
        is_target = label != ignore_index
        row = label - group.rank * logits.shape[-1]
        is_here = is_target & (row >= 0) & (row < logits.shape[-1])
        row = paddle.where(is_here, row, paddle.zeros_like(row))
        own = paddle.take_along_axis(x, row, axis=-1, broadcast=False) * is_here.astype(x.dtype)
        loss = paddle.log(denominator) - _reduced(own, group)
        # A product would make the loss NaN where an ignored position has infinite logits.
        loss = paddle.where(is_target, loss, paddle.zeros_like(loss))
        softmax = exp / denominator
        ctx.save_for_backward(softmax, row, is_here, is_target)
        ctx.dtype = logits.dtype
        softmax_out = softmax.astype(logits.dtype)
        ctx.mark_non_differentiable(softmax_out)
        return loss, softmax_out

    @staticmethod
    def backward(ctx, grad_loss, grad_softmax=None):
        softmax, row, is_here, is_target = ctx.saved_tensor()
        # Not put_along_axis, which reads the indices on the host.
        hit = F.one_hot(row.squeeze(-1), softmax.shape[-1]).astype(softmax.dtype)
        grad = (softmax - hit * is_here.astype(softmax.dtype)) * grad_loss.astype(softmax.dtype)
        grad = paddle.where(is_target, grad, paddle.zeros_like(grad))
        return grad.astype(ctx.dtype)


def _reduced(tensor: Tensor, group, op=core.ReduceOp.SUM) -> Tensor:
    result = tensor.clone()
    group.process_group.all_reduce(result, op, True).wait()
    return result


@replaces(_OPERATIONS, "_c_identity", _NO_KERNEL)
def _c_identity(tensor, group=None, skip_c_identity_dynamic=False):
    return _Identity.apply(tensor, group or collective._get_default_group())


@replaces(_OPERATIONS, "_mp_allreduce", _NO_KERNEL)
def _mp_allreduce(
    tensor,
    op=paddle.distributed.ReduceOp.SUM,
    group=None,
    use_calc_stream=True,
    use_model_parallel=True,
    skip_c_identity_dynamic=False,
):
    if op != paddle.distributed.ReduceOp.SUM:
        raise ValueError(f"_mp_allreduce sums (ReduceOp.SUM); got operation {op}.")
    return _AllReduce.apply(tensor, group or collective._get_default_group())


@replaces(_OPERATIONS, "_c_softmax_with_cross_entropy", _NO_KERNEL)
def _c_softmax_with_cross_entropy(
    logits, label, group=None, return_softmax=False, ignore_index=-100
):
    if label.ndim == logits.ndim - 1:
        label = label.unsqueeze(-1)
    if label.shape != [*logits.shape[:-1], 1]:
        raise ValueError(f"Logits of {logits.shape} need one label a row, got {label.shape}.")
    group = group or collective._get_default_group()
    loss, softmax = _CrossEntropy.apply(logits, label, group, ignore_index)
    return (loss, softmax) if return_softmax else loss


@replaces("paddle.optimizer.fusion_utils", "get_current_device_type", _NO_FUSION)
@replaces(f"{_FLEET}.utils.tensor_fusion_helper", "get_current_device_type", _NO_FUSION)
def _get_current_device_type() -> str:
    # Chooses the alignment of buffers; that of a GPU suits a CPU too.
    return "gpu"


_NO_DEVICE = "the CPU build never sets it, and PipelineLayer and sharding read it"
PATCHES.append(
    Patch("paddle.distributed.parallel:ParallelEnv", "_device_id", _NO_DEVICE, lambda _: 0)
)
