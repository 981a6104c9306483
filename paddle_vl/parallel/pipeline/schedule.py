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


def pp_configs(degrees: ParallelDegrees, on_cpu: bool) -> dict[str, Any]:
    """Options of fleet's strategy that this package sets."""
    return {
        # The losses of the micro-batches are parts of one mean already.
        "delay_scale_loss": True,
        # Gloo has no batches of messages.
        "use_batch_p2p_comm": not on_cpu,
        "enable_dynamic_shape": degrees.pp_shapes == "dynamic",
        "best_unbalanced_scheduler": degrees.pp_schedule == "balanced_memory",
        "use_dualpipev": degrees.pp_schedule == "dualpipev",
    }


def pipeline_configs(degrees: ParallelDegrees) -> dict[str, Any]:
    """More of them. By the number of micro-batches fleet chooses among the interleaved classes:
    below 2 x stages one that goes forward first. They take other numbers too, which the runner
    tells them."""
    forward_first = degrees.pp_schedule in ("fthenb", "balanced_memory")
    stages, num_batches = degrees.pp_degree, degrees.num_micro_batches
    return {
        "accumulate_steps": stages if forward_first else max(num_batches, stages),
        "micro_batch_size": 1,
        # The default sends parts of different rows under sequence parallelism, and nothing raises.
        "enable_partial_send_recv": False,
    }
