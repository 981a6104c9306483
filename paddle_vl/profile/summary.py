"""Summary of all ranks' measurements, the content of profile.json, and its table.

Ranks wait for each other, so step time, throughput, phases and shares are those of the rank with
the slowest mean; the means of the other ranks are listed too. Keys are those of OpenTau's profiler
where it has them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paddle_vl.profile.memory import GB
from paddle_vl.train.phases import Phase

# Phases that OpenTau adds up as its backward step.
_BACKWARD_STEP = (
    Phase.BACKWARD, Phase.GRADIENT_SUM, Phase.CLIP, Phase.OPTIMIZER, Phase.CLEARING
)  # fmt: skip
_LABELS = {
    Phase.DATA_WAIT: "data wait",
    Phase.AGREEMENT: "counts of all ranks",
    Phase.HOST_TO_DEVICE: "host to device",
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.FORWARD_BACKWARD: "forward and backward, in turn",
    Phase.GRADIENT_SUM: "gradients over ranks",
    Phase.CLIP: "norm and clip",
    Phase.OPTIMIZER: "optimizer",
    Phase.CLEARING: "clearing gradients",
    Phase.METRICS: "metrics",
    Phase.BETWEEN: "between phases",
}
_SHOWN_FACTS = (
    ("model", "model_type"), ("parameters", "num_parameters"), ("sharding", "distributed_type"),
    ("topology", "topology"), ("recompute", "recompute"), ("dtype", "compute_dtype"),
    ("batch size", "batch_size"), ("accumulation", "gradient_accumulation_steps"),
    ("attention", "attention_implementation"), ("updates", "updates"),
    ("cameras", "cameras"), ("data", "data_source"), ("device", "device"),
)  # fmt: skip


@dataclass(frozen=True)
class RankMeasure:
    """Measurements of one rank. The counts of samples and tokens are the same on every rank.

    Attributes:
        steps: seconds by phase (`Phase` values) of each measured step.
        cpu_seconds: CPU time of all threads of the process in each measured step; on a CPU it does
            not depend on how busy the machine is.
        samples, tokens: of all ranks in each measured step; tokens are 0 if the family does not
            count them.
        allocated, reserved: peak bytes during the measured steps, see `paddle_vl.profile.memory`.
        memory_source: what those two numbers are.
    """

    rank: int
    steps: list[dict[str, float]]
    cpu_seconds: list[float]
    samples: list[int]
    tokens: list[int]
    allocated: int
    reserved: int
    memory_source: str


def summarize(measures: Sequence[RankMeasure], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The result of a profile.

    Args:
        measures: of all ranks, in order.
        facts: settings that are part of the result.

    Returns:
        `facts`, and seconds (`_s`), rates per second (`_per_sec`), shares in percent of a step
        (they add up to 100), and peak memory in GB of 10^9 bytes.

    Raises:
        ValueError: a rank has measured no step.
    """
    if not all(measure.steps for measure in measures):
        raise ValueError("a rank has measured no step: profile at least one")
    passed = {name for measure in measures for step in measure.steps for name in step}
    names = [name.value for name in Phase if name.value in passed]
    means = [
        {name: sum(step.get(name, 0.0) for step in m.steps) / len(m.steps) for name in names}
        for m in measures
    ]
    totals = [sum(of_rank.values()) for of_rank in means]
    step_time = max(totals)
    slowest = totals.index(step_time)
    seconds = {
        name: np.array([step.get(name, 0.0) for step in measures[slowest].steps]) for name in names
    }
    nothing = np.zeros(len(measures[slowest].steps))
    seconds["total"] = sum(seconds.values(), nothing)
    if Phase.BACKWARD.value in seconds:
        parts = [seconds[part.value] for part in _BACKWARD_STEP if part.value in seconds]
        seconds["backward_step"] = sum(parts, nothing)
    allocated = [measure.allocated / GB for measure in measures]
    reserved = [measure.reserved / GB for measure in measures]
    first = measures[0]
    return {
        **facts,
        "measured": len(first.steps),
        "num_processes": len(measures),
        "slowest_rank": measures[slowest].rank,
        "phase_means_s": {name: float(values.mean()) for name, values in seconds.items()},
        "phase_medians_s": {name: float(np.median(v)) for name, v in seconds.items()},
        "phase_p95_s": {name: float(np.percentile(v, 95)) for name, v in seconds.items()},
        "phase_shares_percent": {
            name: 100 * mean / step_time for name, mean in means[slowest].items()
        },
        "per_rank_phase_means_s": means,
        "global_step_time_s": step_time,
        "global_steps_per_sec": 1 / step_time,
        "global_samples_per_sec": float(np.mean(first.samples)) / step_time,
        "global_tokens_per_sec": float(np.mean(first.tokens)) / step_time,
        "samples_per_step": float(np.mean(first.samples)),
        "per_rank_step_time_s": totals,
        "per_rank_cpu_time_s": [float(np.mean(measure.cpu_seconds)) for measure in measures],
        "peak_alloc_gb_worst": max(allocated),
        "peak_reserved_gb_worst": max(reserved),
        "per_rank_peak_alloc_gb": allocated,
        "per_rank_peak_reserved_gb": reserved,
        "memory_source": first.memory_source,
    }


def profile_table(result: Mapping[str, Any]) -> str:
    """The result of `summarize` as text: settings, phases, throughput, memory."""
    facts = [f"{label} {result[key]}" for label, key in _SHOWN_FACTS if result.get(key) is not None]
    lines = [", ".join(facts)]
    lines.append(
        f"{result['num_processes']} process(es), {result['warmup']} warm-up and "
        f"{result['measured']} measured steps; phases of rank {result['slowest_rank']}, the slowest"
    )
    lines += ["", f"{'phase':30}{'mean ms':>10}{'median ms':>11}{'p95 ms':>10}{'share':>9}"]
    shares = result["phase_shares_percent"]
    for name, share in shares.items():
        lines.append(_phase_line(result, name, _LABELS[Phase(name)], share))
    lines.append(_phase_line(result, "total", "step", sum(shares.values(), 0.0)))
    speeds = f"{result['global_samples_per_sec']:.2f} samples/s"
    if result["global_tokens_per_sec"]:
        speeds += f", {result['global_tokens_per_sec']:.0f} tokens/s"
    lines += ["", f"throughput: {speeds} ({1000 * result['global_step_time_s']:.1f} ms/step)", ""]
    return "\n".join([*lines, *_per_rank(result)])


def _phase_line(result: Mapping[str, Any], name: str, label: str, share: float) -> str:
    mean, median, p95 = (
        1000 * result[key][name] for key in ("phase_means_s", "phase_medians_s", "phase_p95_s")
    )
    return f"{label:30}{mean:10.2f}{median:11.2f}{p95:10.2f}{share:8.1f}%"


def _per_rank(result: Mapping[str, Any]) -> list[str]:
    """The mean of every phase and the peak of memory, a column for each rank."""
    means: Sequence[Mapping[str, float]] = result["per_rank_phase_means_s"]
    rows = [
        (f"{_LABELS[Phase(name)]}, ms", [f"{1000 * of_rank[name]:.2f}" for of_rank in means])
        for name in means[0]
    ]
    for label, key, scale, digits in (
        ("step, ms", "per_rank_step_time_s", 1000, 2),
        ("CPU time of a step, ms", "per_rank_cpu_time_s", 1000, 2),
        ("peak of tensors, GB", "per_rank_peak_alloc_gb", 1, 3),
        ("peak of memory, GB", "per_rank_peak_reserved_gb", 1, 3),
    ):
        rows.append((label, [f"{scale * value:.{digits}f}" for value in result[key]]))
    heads = "".join(f"{f'rank {rank}':>11}" for rank in range(len(means)))
    limit = result["memory_limit_gb"]
    of_limit = "" if limit is None else f" of {limit:g} GB allowed"
    return [
        f"{'means by rank':34}{heads}",
        *(f"{label:34}" + "".join(f"{value:>11}" for value in values) for label, values in rows),
        f"worst rank: {result['peak_alloc_gb_worst']:.3f} GB of tensors, "
        f"{result['peak_reserved_gb_worst']:.3f} GB{of_limit} ({result['memory_source']})",
    ]
