"""Names of fleet's sharding optimizer that Paddle does not promise to keep, checked before use."""

import inspect
from collections.abc import Iterator
from typing import Any

import paddle
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer import (
    DygraphShardingOptimizerV2,
)
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.hybrid_parallel_optimizer import (
    HybridParallelOptimizer,
)
from paddle.distributed.fleet.utils.mix_precision_utils import MixPrecisionLayer
from paddle.distributed.fleet.utils.tensor_fusion_helper import FusedCommBuffer, ShardingGradView

# Functions and their parameters, without self.
_FUNCTIONS: tuple[tuple[Any, str, tuple[str, ...]], ...] = (
    (HybridParallelOptimizer, "_hybrid_sync_grad", ("parameter_list",)),
    (HybridParallelOptimizer, "_set_all_gather_overlap_forward",
     ("all_gather_overlap_forward", "layers")),
    (DygraphShardingOptimizerV2, "_collect_comm_buffers", ()),
    (DygraphShardingOptimizerV2, "_assign_slice_grad", ()),
    (DygraphShardingOptimizerV2, "_sharding_sync_parameters", ()),
    (DygraphShardingOptimizerV2, "_try_start_bucket_param_sync", ("buckets",)),
    (DygraphShardingOptimizerV2, "_reset_comm_buffers_acc_steps", ("acc_steps",)),
    (DygraphShardingOptimizerV2, "step", ()),
    (FusedCommBuffer, "_comm_grads", ()),
    (FusedCommBuffer, "comm_grads", ()),
    (FusedCommBuffer, "add_grad", ("param", "use_comm")),
    (FusedCommBuffer, "sync_params", ("sync", "param2task")),
    (MixPrecisionLayer, "_update_main_grad_hook", ("param",)),
)  # fmt: skip
_ATTRIBUTES: tuple[tuple[type, tuple[str, ...]], ...] = (
    (DygraphShardingOptimizerV2, (
        "_comm_buffer_list", "_slice_params", "comm_overlap", "has_register_forward_hook",
    )),
    (FusedCommBuffer, (
        "grad_storage", "param_storage", "_params_step_dict", "status", "sync_param_task",
        "_sharding_param_grad_view",
    )),
    (ShardingGradView, ("_index", "_padded_size", "_param_buffer")),
)  # fmt: skip


def check_functions() -> None:
    """Raises RuntimeError unless fleet's functions are those this package was written for."""
    _raise(
        f"{owner.__name__}.{name} does not take ({', '.join(parameters)})"
        for owner, name, parameters in _FUNCTIONS
        if _parameters(getattr(owner, name, None)) != parameters
    )


def check_attributes(optimizer: DygraphShardingOptimizerV2) -> None:
    """The same of what its objects hold, some of which they get when they are made."""
    buffers = getattr(optimizer, "_comm_buffer_list", [])
    views = [v for b in buffers for v in getattr(b, "_sharding_param_grad_view", {}).values()]
    found = {DygraphShardingOptimizerV2: [optimizer], FusedCommBuffer: buffers}
    found[ShardingGradView] = views[:1]
    _raise(
        f"{owner.__name__} has no {name}"
        for owner, names in _ATTRIBUTES
        for name in names
        if not all(name in vars(each) for each in found[owner]) or not found[owner]
    )


def _parameters(function: Any) -> tuple[str, ...] | None:
    if not inspect.isfunction(function):
        return None
    return tuple(inspect.signature(function).parameters)[1:]


def _raise(problems: Iterator[str]) -> None:
    if found := list(problems):
        raise RuntimeError(
            f"paddlepaddle {paddle.__version__} has another sharding optimizer than this package "
            f"was written for: {'; '.join(found)}. Install paddlepaddle 3.3.1, or use "
            "parallel.sharding_stage 2 or 3, which do not use it"
        )


__all__ = [
    "DygraphShardingOptimizerV2",
    "FusedCommBuffer",
    "HybridParallelOptimizer",
    "MixPrecisionLayer",
    "check_attributes",
    "check_functions",
]
