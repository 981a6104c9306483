"""Fleet's pipeline schedules: what chooses each, and which parts of a model a stage has in it.

| `parallel.pp_schedule` | virtual stages | fleet's class |
| --- | --- | --- |
| 1f1b | 1 | PipelineParallel |
| 1f1b | more | PipelineParallelWithInterleave |
| fthenb | more | PipelineParallelWithInterleaveFthenB |
| balanced_memory | more | VPPFhenBInBalancedMemory |
| dualpipev | 1 (two parts for each stage) | DualPipeVParallel |
"""

from typing import Any

from paddle_vl.parallel.degrees import ParallelDegrees


def num_parts(degrees: ParallelDegrees) -> int:
    """Into how many parts the layers are cut."""
    chunks = 2 if degrees.pp_schedule == "dualpipev" else degrees.num_virtual_stages
    return degrees.pp_degree * chunks


def parts_of_stage(degrees: ParallelDegrees, stage: int) -> list[int]:
    """The numbers of a stage's parts, ascending: in turn, or in a V, whose two ends are on stage 0.

    Either way neighbouring parts are on neighbouring stages.
    """
    if degrees.pp_schedule == "dualpipev":
        return [stage, num_parts(degrees) - 1 - stage]
    return list(range(stage, num_parts(degrees), degrees.pp_degree))


def evaluated_batches(degrees: ParallelDegrees, num_batches: int) -> int:
    """How many batches a forward-only pass must have to take so many."""
    stages = degrees.pp_degree
    if degrees.pp_schedule == "dualpipev":
        return max(num_batches, 2 * stages)
    if degrees.num_virtual_stages > 1:
        return -(-num_batches // stages) * stages
    return num_batches


def fleet_settings(degrees: ParallelDegrees, on_cpu: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """`pp_configs` and `pipeline_configs` of fleet's strategy, by which it chooses the class."""
    stages, schedule = degrees.pp_degree, degrees.pp_schedule
    pp_configs = {
        # The losses of the micro-batches are parts of one mean already.
        "delay_scale_loss": True,
        # Batched messages are one operation of NCCL; gloo has none.
        "use_batch_p2p_comm": not on_cpu,
        "enable_dynamic_shape": degrees.pp_shapes == "dynamic",
        "best_unbalanced_scheduler": schedule == "balanced_memory",
        "use_dualpipev": schedule == "dualpipev",
    }
    # Below 2 x stages fleet takes a forward-then-backward class, at and above the interleaved one.
    # The classes themselves take other numbers too: the runner says how many there are.
    forward_first = schedule in ("fthenb", "balanced_memory")
    pipeline_configs = {
        "accumulate_steps": stages if forward_first else max(degrees.num_micro_batches, stages),
        "micro_batch_size": 1,
        # With it the mp processes of a stage send a part each of what they take to be the same
        # rows; under sequence parallelism each has its own.
        "enable_partial_send_recv": False,
    }
    return pp_configs, pipeline_configs
