"""From the measures of all processes to one result, the content of profile.json.

The processes of a run wait for each other, so a step lasts as long as on the process with the
slowest mean, and throughput follows from it. Phases and shares are that process's; the means of
every other stand beside them. Keys are those of OpenTau's profiler where it has them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paddle_vl.profile.measure import RankMeasure
from paddle_vl.profile.memory import GB
from paddle_vl.train.phases import Phase

# What OpenTau adds up as its backward step.
_BACKWARD_STEP = (Phase.BACKWARD, Phase.GRADIENT_SUM, Phase.CLIP, Phase.OPTIMIZER)


def summarize(measures: Sequence[RankMeasure], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The result of a profile.

    Args:
        measures: of all processes, by rank.
        facts: settings that are part of the result.

    Returns:
        `facts`, and seconds (`_s`), per second (`_per_sec`), shares in percent of a step (they add
        up to 100), and peak memory in GB of 10^9 bytes.

    Raises:
        ValueError: a process has measured no step.
    """
    if not all(measure.steps for measure in measures):
        raise ValueError("a process has measured no step: profile at least one")
    passed = {name for measure in measures for step in measure.steps for name in step}
    names = [name.value for name in Phase if name.value in passed]
    means = [_means(measure, names) for measure in measures]
    totals = [sum(of_rank.values()) for of_rank in means]
    step_time = max(totals)
    slowest = totals.index(step_time)
    seconds = {
        name: np.array([step.get(name, 0.0) for step in measures[slowest].steps]) for name in names
    }
    seconds["total"] = sum(seconds.values())
    if Phase.BACKWARD.value in seconds:
        parts = [seconds[part.value] for part in _BACKWARD_STEP if part.value in seconds]
        seconds["backward_step"] = sum(parts)
    allocated = [_gigabytes(measure.allocated) for measure in measures]
    reserved = [_gigabytes(measure.reserved) for measure in measures]
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


def _means(measure: RankMeasure, names: Sequence[str]) -> dict[str, float]:
    count = len(measure.steps)
    return {name: sum(step.get(name, 0.0) for step in measure.steps) / count for name in names}


def _gigabytes(num_bytes: int) -> float:
    return num_bytes / GB
