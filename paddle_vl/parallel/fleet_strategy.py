"""Fleet's `DistributedStrategy` of a run: degrees, defaults of this package, options of the user.

`parallel.fleet` passes options to `mp_configs`, `pp_configs` and `sharding_configs`, under the
names of Paddle 3.3. Options that a setting of this package controls, that have no effect here or
that are wrong here (see docs/fleet.md) are not passed.
"""

import difflib
from typing import Any

import paddle
from paddle.distributed import fleet
from paddle.distributed.fleet.utils import log_util

from paddle_vl.config.parallel_settings import FleetConfig
from paddle_vl.parallel.degrees import AXES, ParallelDegrees, Problems

_SECTIONS = {"mp_configs": "mp", "pp_configs": "pp", "sharding_configs": "sharding"}
_OPTIONS = {
    "mp_configs": (
        "mp_async_allreduce", "mp_skip_c_identity", "mp_fused_linear_param_grad_add",
        "recompute_allgather", "sp_async_reduce_scatter",
    ),
    "pp_configs": (
        "enable_timer", "profiling", "overlap_p2p_comm", "clear_every_step_cache",
        "use_batch_p2p_comm", "best_unbalanced_scheduler", "enable_offload_queue",
    ),
    "sharding_configs": (
        "comm_overlap", "use_reduce_avg", "comm_buffer_size_MB", "enable_fuse_optimizer_states",
    ),
}  # fmt: skip
# Overlap options of mp_configs that require another option.
_NEED = {
    "mp_skip_c_identity": "mp_async_allreduce",
    "mp_fused_linear_param_grad_add": "mp_async_allreduce",
    "recompute_allgather": "sp_async_reduce_scatter",
}


def fleet_problems(options: FleetConfig, degrees: ParallelDegrees) -> Problems:
    """Problems of `parallel.fleet`: options that are not passed, mistyped, or without effect."""
    for section, values in options.model_dump().items():
        axis = _SECTIONS[section]
        if axis == "sharding":
            yield from _sharding_problems(values, degrees)
        if axis == "mp" and degrees.mp_degree > 1:
            yield from _overlap_problems(values, degrees)
        forward_first = degrees.pp_schedule in ("fthenb", "balanced_memory")
        if "best_unbalanced_scheduler" in values and forward_first:
            yield (
                f"parallel.fleet.{section}.best_unbalanced_scheduler decides between fthenb and "
                "balanced_memory, as parallel.pp_schedule does: remove it, it is for interleaved "
                "1f1b"
            )
        for name, value in values.items():
            if (problem := _option_problem(section, name, value)) is not None:
                yield f"parallel.fleet.{section}.{name} {problem}"


def _overlap_problems(values: dict[str, Any], degrees: ParallelDegrees) -> Problems:
    for name, base in _NEED.items():
        if values.get(name) is True and values.get(base) is not True:
            yield f"parallel.fleet.mp_configs.{name} has no effect without {base}: true; set both"
    if values.get("sp_async_reduce_scatter") is True and not degrees.sequence_parallel:
        yield (
            "parallel.fleet.mp_configs.sp_async_reduce_scatter has no effect without "
            "parallel.sequence_parallel; without it there is mp_async_allreduce"
        )
    lacks_kernel = values.get("mp_async_allreduce") is True and not degrees.sequence_parallel
    on_cpu = paddle.get_device().startswith("cpu")
    if on_cpu and lacks_kernel and values.get("mp_skip_c_identity") is not True:
        yield (
            "parallel.fleet.mp_configs.mp_async_allreduce copies its input by a kernel that "
            "Paddle's CPU build lacks: set mp_skip_c_identity: true beside it, or run on GPUs"
        )


def _sharding_problems(values: dict[str, Any], degrees: ParallelDegrees) -> Problems:
    if values.get("comm_overlap") is True and degrees.pp_degree > 1:
        yield (
            f"parallel.fleet.sharding_configs.comm_overlap with parallel.pp_degree "
            f"{degrees.pp_degree}: fleet refuses both together; remove one of them"
        )
    size = values.get("comm_buffer_size_MB")
    if isinstance(size, int) and size < 1:
        yield (
            f"parallel.fleet.sharding_configs.comm_buffer_size_MB is {size}: it must be at least 1"
        )


def _option_problem(section: str, name: str, value: Any) -> str | None:
    known = _OPTIONS[section]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        return f"is unknown, or decided or ruled out by this package; the nearest option is {near}"
    kind = int if name == "comm_buffer_size_MB" else bool
    if type(value) is not kind:
        return f"is {value!r}; its type is {kind.__name__}"
    return None


def fleet_strategy(degrees: ParallelDegrees, options: FleetConfig | None = None) -> Any:
    """The `DistributedStrategy` of a run on this device.

    Args:
        options: of `parallel.fleet`; they override this package's defaults.
    """
    strategy, stages, chosen = _new_strategy(), degrees.pp_degree, degrees.pp_schedule
    strategy.hybrid_configs = {f"{axis}_degree": degrees.degree(axis) for axis in AXES}
    defaults = {
        "mp_configs": {"sync_param": False, "need_broadcast_data": False},
        "pp_configs": {
            # The loss of a micro-batch is divided by the counts of the full step already.
            "delay_scale_loss": True,
            # Gloo has no batched messages.
            "use_batch_p2p_comm": not paddle.get_device().startswith("cpu"),
            "enable_dynamic_shape": degrees.pp_shapes == "dynamic",
            "best_unbalanced_scheduler": chosen == "balanced_memory",
            "use_dualpipev": chosen == "dualpipev",
        },
        "sharding_configs": {
            "split_param": True,
            "accumulate_steps": degrees.num_micro_batches,
        },
    }
    given = (options or FleetConfig()).model_dump()
    for section, values in defaults.items():
        message = _message(strategy, section)
        for name, value in {**values, **given[section]}.items():
            setattr(message, name, value)
    # Fleet chooses among the interleaved classes by `accumulate_steps`: below 2 x stages it takes
    # one that runs all forward passes first. The runner sets the real number of micro-batches.
    forward_first = chosen in ("fthenb", "balanced_memory")
    strategy.pipeline_configs = {
        "accumulate_steps": stages if forward_first else max(degrees.num_micro_batches, stages),
        "micro_batch_size": 1,
        # On (the default), messages mix token rows of different mp ranks, and nothing raises.
        "enable_partial_send_recv": False,
    }
    # Otherwise fleet seeds Paddle from NumPy's generator, differently on every rank and run.
    strategy.tensor_parallel_configs = {"tensor_init_seed": 1}
    return strategy


def effective_options(strategy: Any) -> dict[str, dict[str, Any]]:
    """All options of the three sections, for run.json."""
    found = {}
    for section in _SECTIONS:
        message = _message(strategy, section)
        values = {each.name: getattr(message, each.name) for each in message.DESCRIPTOR.fields}
        # Without groups of NCCL settings.
        found[section] = {n: v for n, v in values.items() if isinstance(v, (int, float, str))}
    return found


def _new_strategy() -> Any:
    # The constructor logs.
    log_util.set_log_level("WARNING")
    return fleet.DistributedStrategy()


def _message(strategy: Any, section: str) -> Any:
    return getattr(strategy.strategy.hybrid_configs, section)
