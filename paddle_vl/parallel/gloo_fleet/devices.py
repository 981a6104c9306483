"""Places where fleet asks for an accelerator although a CPU would do."""

from collections.abc import Callable

import paddle
from paddle.distributed.fleet.utils import hybrid_parallel_util, recompute

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
        place = paddle.CPUPlace()
        spread = hybrid_parallel_util._broadcast_nested_data
        inputs = spread(hcg, "cpu", place, inputs) if inputs else inputs
        kwargs = spread(hcg, "cpu", place, kwargs) if kwargs else kwargs
        return inputs, kwargs

    return broadcast_input_data


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
    Patch(
        owner="paddle.distributed.fleet.utils.hybrid_parallel_util",
        name="broadcast_input_data",
        parameters=("hcg",),
        reason="Only support xpu, gpu and custom_device now, but this is cpu",
        make=_broadcast_input_data,
    ),
)
