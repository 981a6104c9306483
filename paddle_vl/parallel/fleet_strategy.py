"""Fleet's `DistributedStrategy` of a run: degrees, defaults of this package, options of the user.

`parallel.fleet` passes options to `mp_configs`, `pp_configs` and `sharding_configs`, under the
names of Paddle 3.3. Options that a setting of this package controls, that have no effect here or
that are wrong here (see docs/step.md) are not passed.
"""

import difflib
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import paddle
from paddle.distributed import fleet
from paddle.distributed.fleet.utils import log_util

from paddle_vl.config.parallel_settings import CONNECTIONS, FleetConfig, launch_variables
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


class Overlap(NamedTuple):
    """Whether a collective is hidden behind computation, what decided that, and why the run may not
    turn it on, if it does."""

    is_on: bool
    reason: str
    problem: str | None = None


def overlaps(
    degrees: ParallelDegrees,
    options: FleetConfig | None = None,
    gathers: bool | None = None,
    sums: bool | None = None,
    keys: bool | None = None,
    on_gpu: bool | None = None,
    connections: str | None = None,
) -> dict[str, Overlap]:
    """What becomes of each overlap: what the run sets, else on wherever its conditions hold.

    Args:
        options: of `parallel.fleet`.
        gathers: `parallel.sharding_gather_overlap`.
        sums: `parallel.dp_comm_overlap`.
        keys: `parallel.cp_gather_overlap`.
        on_gpu: None for this process's device.
        connections: `CUDA_DEVICE_MAX_CONNECTIONS`; None for this process's.

    Returns:
        By setting, without `parallel.` and `parallel.fleet.`.
    """
    on_gpu = not paddle.get_device().startswith("cpu") if on_gpu is None else on_gpu
    connections = os.environ.get(CONNECTIONS, "not set") if connections is None else connections
    given: dict[str, Any] = {"sharding_gather_overlap": gathers, "dp_comm_overlap": sums}
    given["cp_gather_overlap"] = keys
    for section, values in (options or FleetConfig()).model_dump().items():
        given |= {f"{section}.{name}": value for name, value in values.items()}
    found: dict[str, Overlap] = {}

    def decide(name: str, needs: Sequence[tuple[bool, str]], soft: Sequence[tuple[bool, str]]):
        """Without `needs` the run may not turn it on, without the soft ones it may."""
        lacking, broken = (
            [why for holds, why in some if not holds] for some in ((*needs, *soft), needs)
        )
        if isinstance(chosen := given.get(name), bool):
            problem = broken[0] if chosen and broken else None
            found[name] = Overlap(chosen, "set by the run", problem)
        else:
            found[name] = Overlap(not lacking, lacking[0] if lacking else "the default on GPUs")

    def part_of(base: str) -> list[tuple[bool, str]]:
        is_on = found[f"mp_configs.{base}"].is_on
        return [(is_on, f"it has no effect without {base}, which is off")]

    splits_rows, fused = degrees.sequence_parallel, "mp_configs.mp_fused_linear_param_grad_add"
    gpu, mp = (on_gpu, "not on a CPU"), (degrees.mp_degree > 1, "mp_degree is 1")
    queue = connections == "1", f"{CONNECTIONS} is {connections}, not 1"
    whole = not splits_rows, "sp_async_reduce_scatter is that of sequence_parallel"
    split = splits_rows, "it has no effect without parallel.sequence_parallel"
    copies = given.get("mp_configs.mp_skip_c_identity") is False
    kernel = on_gpu or not copies, "a CPU lacks its kernel for mp_skip_c_identity: false"
    decide("mp_configs.mp_async_allreduce", [kernel], [mp, whole, gpu, queue])
    decide("mp_configs.mp_skip_c_identity", part_of("mp_async_allreduce"), [whole])
    decide("mp_configs.sp_async_reduce_scatter", [split], [mp, gpu, queue])
    decide("mp_configs.recompute_allgather", part_of("sp_async_reduce_scatter"), [])
    decide(fused, part_of("mp_async_allreduce"), [(False, "reductions behind backward exclude it")])
    interleaves = degrees.pp_schedule == "1f1b" and degrees.num_virtual_stages > 1
    between = interleaves, "it is for 1f1b with num_virtual_stages"
    decide("pp_configs.overlap_p2p_comm", [], [between, gpu])
    sharded = degrees.sharding_degree > 1, "sharding_degree is 1"
    first = degrees.sharding_stage == 1, "stages 2 and 3 have their own overlap, always on"
    plain = degrees.schedule == "plain", "the colocated schedule sums an encoder's gradients later"
    at_once = degrees.pp_schedule != "dualpipev", "dualpipev computes gradients in two parts"
    seen = not found[fused].is_on, "mp_fused_linear_param_grad_add passes its gradients to no hook"
    decide("sharding_configs.comm_overlap", [plain, at_once, seen], [sharded, first, gpu])
    several, alone = degrees.dp_degree > 1, degrees.sharding_degree == 1
    dp = (several, "dp_degree is 1"), (alone, "sharding sums over dp beside its own reductions")
    decide("dp_comm_overlap", [], [*dp, plain, at_once, seen, gpu])
    decide("sharding_gather_overlap", [], [sharded, first, plain, gpu])
    sliced = degrees.cp_degree > 1, "cp_degree is 1"
    by_gather = degrees.cp_attention == "gather", "cp_attention ulysses gathers no keys"
    decide("cp_gather_overlap", [], [sliced, by_gather, gpu])
    return found


def missing_variables(degrees: ParallelDegrees) -> str | None:
    """What to tell of a run on GPUs whose starter has not set `launch_variables`, as fleetrun."""
    missing = launch_variables(degrees).keys() - os.environ.keys()
    if paddle.get_device().startswith("cpu") or not missing:
        return None
    return (
        f"{CONNECTIONS} is not set, so sums over mp ranks are not hidden behind products: "
        f"export {CONNECTIONS}=1 before fleetrun (--nproc sets it)"
    )


def fleet_problems(options: FleetConfig, degrees: ParallelDegrees) -> Problems:
    """Problems of `parallel.fleet`: options that are not passed, mistyped, or without effect."""
    for name, each in overlaps(degrees, options).items():
        if each.problem is not None:
            yield f"parallel.fleet.{name} is true, but {each.problem}: remove it, or change that"
    for section, values in options.model_dump().items():
        size = values.get("comm_buffer_size_MB")
        if isinstance(size, int) and size < 1:
            yield f"parallel.fleet.{section}.comm_buffer_size_MB is {size}: it must be at least 1"
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
    hidden = {name: each.is_on for name, each in overlaps(degrees, options).items()}
    strategy.hybrid_configs = {f"{axis}_degree": degrees.degree(axis) for axis in AXES}
    defaults = {
        "mp_configs": {"sync_param": False, "need_broadcast_data": False},
        "pp_configs": {
            # The loss of a micro-batch is divided by the counts of the full step already.
            "delay_scale_loss": True,
            # Gloo has no batched messages, and overlapped ones are not batched.
            "use_batch_p2p_comm": not (
                paddle.get_device().startswith("cpu") or hidden["pp_configs.overlap_p2p_comm"]
            ),
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
        own = {name.partition(".")[2]: is_on for name, is_on in hidden.items() if section in name}
        for name, value in {**values, **given[section], **own}.items():
            setattr(message, name, value)
    if stages > 1:
        # Fleet refuses it; `FleetSharding` does it with fleet's buffers.
        _message(strategy, "sharding_configs").comm_overlap = False
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
