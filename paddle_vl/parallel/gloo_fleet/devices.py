"""Places where fleet asks for an accelerator although a CPU would do."""

from collections.abc import Callable, Iterator

import paddle
import paddle.distributed as dist
from paddle.distributed.fleet.utils import recompute

from paddle_vl.parallel.gloo_fleet.patch import Patch


def _recompute_hybrid(paddles_own: Callable) -> Callable:
    def recompute_hybrid(ctx, function, *args, **kwargs):
        """Paddle's recomputation for one device, which keeps the CPU's random state too."""
        for option in ("offload", "partition"):
            if ctx.get(option, False):
                raise ValueError(
                    f"recompute_ctx of a PipelineLayer has {option}=True, which moves activations "
                    "off an accelerator; on CPU processes leave it out."
                )
        outputs = recompute(function, *args, **kwargs)
        if isinstance(outputs, tuple):
            for each in outputs:
                if paddle.is_tensor(each) and not each.is_floating_point():
                    each.stop_gradient = True
        return outputs

    return recompute_hybrid


def _broadcast_input_data(paddles_own: Callable) -> Callable:
    def broadcast_input_data(hcg, *inputs, **kwargs):
        """Give all ranks of a model-parallel group its first rank's tensors, in place."""
        with paddle.no_grad():
            for tensor in _tensors_in([inputs, kwargs]):
                _broadcast(tensor, hcg)
        return inputs, kwargs

    return broadcast_input_data


def _aligned_as_gpu(paddles_own: Callable) -> Callable:
    """Fleet asks for the device's alignment of memory; here that of a GPU is as good as any."""
    return lambda: "gpu"


def _tensors_in(values) -> Iterator[paddle.Tensor]:
    for value in values.values() if isinstance(values, dict) else values:
        if paddle.is_tensor(value):
            yield value
        elif isinstance(value, (dict, list, tuple)):
            yield from _tensors_in(value)


def _broadcast(tensor: paddle.Tensor, hcg) -> None:
    """Ranks may hold another shape, with as many axes."""
    group, first = hcg.get_model_parallel_group(), hcg.get_model_parallel_group_src_rank()
    shape = paddle.to_tensor(tensor.shape, dtype="int64")
    dist.broadcast(shape, src=first, group=group)
    is_first = hcg.get_model_parallel_rank() == 0
    received = tensor if is_first else paddle.empty(shape.tolist(), dtype=tensor.dtype)
    dist.broadcast(received, src=first, group=group)
    if not is_first:
        received._share_underline_tensor_to(tensor)


PATCHES = (
    Patch(
        owner="paddle.distributed.parallel:ParallelEnv",
        name="_device_id",
        parameters=None,
        reason="the CPU build never sets it and PipelineLayer and sharding read it",
        make=lambda _: 0,
    ),
    Patch(
        owner="paddle.distributed.fleet.meta_parallel.parallel_layers.pp_layers",
        name="recompute_hybrid",
        parameters=("ctx", "function"),
        reason="Recompute with RNG is not support current device: cpu",
        make=_recompute_hybrid,
    ),
    *(
        Patch(
            owner=owner,
            name="get_current_device_type",
            parameters=(),
            reason="tensor fusion helper now only support ['gpu', 'npu', 'xpu'], but got cpu",
            make=_aligned_as_gpu,
        )
        for owner in (
            "paddle.distributed.fleet.utils.tensor_fusion_helper",
            "paddle.optimizer.fusion_utils",
        )
    ),
    Patch(
        owner="paddle.distributed.fleet.utils.hybrid_parallel_util",
        name="broadcast_input_data",
        parameters=("hcg",),
        reason="Only support xpu, gpu and custom_device now, but this is cpu",
        make=_broadcast_input_data,
    ),
)
