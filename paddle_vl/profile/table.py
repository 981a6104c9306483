"""A profile as text: settings, phases, throughput, memory."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from paddle_vl.train.phases import Phase

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
    Phase.METRICS: "metrics",
    Phase.BETWEEN: "between phases",
}
_SHOWN_FACTS = (
    ("model", "model_type"), ("parameters", "num_parameters"), ("sharding", "distributed_type"),
    ("topology", "topology"), ("recompute", "recompute"), ("dtype", "compute_dtype"),
    ("batch size", "batch_size"), ("accumulation", "gradient_accumulation_steps"),
    ("cameras", "cameras"), ("data", "data_source"), ("device", "device"),
)  # fmt: skip


def profile_table(result: Mapping[str, Any]) -> str:
    """The result of `paddle_vl.profile.summary.summarize` for a terminal."""
    facts = [f"{label} {result[key]}" for label, key in _SHOWN_FACTS if result.get(key) is not None]
    lines = [", ".join(facts)]
    lines.append(
        f"{result['num_processes']} process(es), {result['warmup']} warm-up and "
        f"{result['measured']} measured steps; phases of rank {result['slowest_rank']}, the slowest"
    )
    lines += ["", f"{'phase':30}{'mean ms':>10}{'median ms':>11}{'p95 ms':>10}{'share':>9}"]
    shares = rounded_shares(result["phase_shares_percent"])
    for name, share in shares.items():
        lines.append(_phase_line(result, name, _LABELS[Phase(name)], share))
    lines.append(_phase_line(result, "total", "step", sum(shares.values(), 0.0)))
    lines += ["", *_throughput(result), "", *_per_rank(result)]
    return "\n".join(lines)


def rounded_shares(shares: Mapping[str, float]) -> dict[str, float]:
    """Percentages of one decimal that still add up to 100.0: the largest remainders go up."""
    tenths = {name: 10 * share for name, share in shares.items()}
    down = {name: math.floor(share) for name, share in tenths.items()}
    missing = round(sum(tenths.values())) - sum(down.values())
    by_remainder = sorted(tenths, key=lambda name: down[name] - tenths[name])
    for name in by_remainder[:missing]:
        down[name] += 1
    return {name: value / 10 for name, value in down.items()}


def _phase_line(result: Mapping[str, Any], name: str, label: str, share: float) -> str:
    mean, median, p95 = (
        1000 * result[key][name] for key in ("phase_means_s", "phase_medians_s", "phase_p95_s")
    )
    return f"{label:30}{mean:10.2f}{median:11.2f}{p95:10.2f}{share:8.1f}%"


def _throughput(result: Mapping[str, Any]) -> list[str]:
    speeds = [f"{result['global_samples_per_sec']:.2f} samples/s"]
    if result["global_tokens_per_sec"]:
        speeds.append(f"{result['global_tokens_per_sec']:.0f} tokens/s")
    return [f"throughput: {', '.join(speeds)} ({1000 * result['global_step_time_s']:.1f} ms/step)"]


def _per_rank(result: Mapping[str, Any]) -> list[str]:
    """Means of every phase and the peak of memory, a column for each process."""
    means: Sequence[Mapping[str, float]] = result["per_rank_phase_means_s"]
    rows = [
        (f"{_LABELS[Phase(name)]}, ms", [f"{1000 * of_rank[name]:.2f}" for of_rank in means])
        for name in means[0]
    ]
    rows.append(("step, ms", [f"{1000 * s:.2f}" for s in result["per_rank_step_time_s"]]))
    rows.append(
        ("CPU time of a step, ms", [f"{1000 * s:.2f}" for s in result["per_rank_cpu_time_s"]])
    )
    rows += [
        (label, [f"{value:.3f}" for value in result[key]])
        for label, key in (
            ("peak of tensors, GB", "per_rank_peak_alloc_gb"),
            ("peak of memory, GB", "per_rank_peak_reserved_gb"),
        )
    ]
    heads = "".join(f"{f'rank {rank}':>11}" for rank in range(len(means)))
    limit = result["memory_limit_gb"]
    of_limit = "" if limit is None else f" of {limit:g} GB allowed"
    return [
        f"{'means by rank':34}{heads}",
        *(f"{label:34}" + "".join(f"{value:>11}" for value in values) for label, values in rows),
        f"worst rank: {result['peak_alloc_gb_worst']:.3f} GB of tensors, "
        f"{result['peak_reserved_gb_worst']:.3f} GB{of_limit} ({result['memory_source']})",
    ]
