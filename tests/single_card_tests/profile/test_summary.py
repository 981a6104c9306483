"""Measures of ranks to a result and its table.

Guarantees: throughput follows from the slowest rank's mean step, not from the first rank or a
median; phases and shares are those of that rank, next to the means of every other rank; shares
add up to 100; a phase counts as zero on ranks and steps without it; memory is
given per rank and for the worst one.
"""

from typing import Any

import numpy as np
import pytest

from paddle_vl.profile.memory import GB
from paddle_vl.profile.summary import RankMeasure, profile_table, summarize
from paddle_vl.train.phases import Phase

FACTS = {"warmup": 2, "memory_limit_gb": 2.0, "distributed_type": "dp"}
FAST = [{Phase.FORWARD: 0.1, Phase.BETWEEN: 0.1}] * 3
SLOW = [*FAST[:2], {Phase.FORWARD: 0.8, Phase.BACKWARD: 0.5, Phase.BETWEEN: 0.1}]


def rank_measure(rank: int, steps: list[dict[Phase, float]], **given: Any) -> RankMeasure:
    """By default eight samples and no tokens in each step."""
    usual = {
        "samples": [8] * len(steps), "tokens": [0] * len(steps), "cpu_seconds": [2.0] * len(steps),
        "allocated": int(GB), "reserved": int(1.5 * GB), "memory_source": "the test",
    }  # fmt: skip
    seconds = [{name.value: value for name, value in step.items()} for step in steps]
    return RankMeasure(rank=rank, steps=seconds, **usual | given)


def test_a_result_is_that_of_the_slowest_rank_with_the_means_of_all():
    result = summarize([rank_measure(0, FAST), rank_measure(1, SLOW)], FACTS)
    assert result["slowest_rank"] == 1
    assert result["global_step_time_s"] == pytest.approx(1.8 / 3)
    assert result["global_samples_per_sec"] == pytest.approx(8 / 0.6)
    assert result["phase_medians_s"]["total"] == pytest.approx(0.2)
    assert result["per_rank_step_time_s"] == pytest.approx([0.2, 0.6])
    means = {"forward": 1 / 3, "bwd": 0.5 / 3, "between_phases": 0.1}
    assert result["phase_means_s"] == pytest.approx(
        means | {"total": 0.6, "backward_step": 0.5 / 3}
    )
    assert result["phase_medians_s"]["bwd"] == 0
    assert result["phase_p95_s"]["forward"] == pytest.approx(np.percentile([0.1, 0.1, 0.8], 95))
    assert result["per_rank_phase_means_s"] == [
        pytest.approx({"forward": 0.1, "bwd": 0, "between_phases": 0.1}),
        pytest.approx(means),
    ]
    assert sum(result["phase_shares_percent"].values()) == pytest.approx(100)
    assert result["phase_shares_percent"]["bwd"] == pytest.approx(100 * 0.5 / 1.8)
    text = profile_table(result)
    lines = text.splitlines()
    assert next(line for line in lines if line.startswith("backward ")).split()[-1] == "27.8%"
    assert next(line for line in lines if line.startswith("step  ")).split()[-1] == "100.0%"
    assert "phases of rank 1, the slowest" in text
    assert "13.33 samples/s" in text
    assert next(x for x in lines if x.startswith("backward, ms")).split()[2:] == ["0.00", "166.67"]
    assert "1.500 GB of 2 GB allowed (the test)" in text


def test_backward_step_is_all_from_backward_to_optimizer():
    result = summarize([rank_measure(0, [dict.fromkeys(Phase, 1.0)])], FACTS)
    assert result["phase_means_s"]["backward_step"] == 5.0
    assert result["phase_means_s"]["total"] == len(Phase)


def test_memory_and_cpu_time_are_each_ranks_and_memory_the_worst():
    uses = {"allocated": int(2 * GB), "reserved": int(5 * GB), "cpu_seconds": [1.0, 2.0, 6.0]}
    first = rank_measure(0, FAST, allocated=int(3 * GB), reserved=int(4 * GB))
    result = summarize([first, rank_measure(1, FAST, **uses)], FACTS)
    assert result["per_rank_peak_alloc_gb"] == [3.0, 2.0]
    assert result["per_rank_peak_reserved_gb"] == [4.0, 5.0]
    assert (result["peak_alloc_gb_worst"], result["peak_reserved_gb_worst"]) == (3.0, 5.0)
    assert result["per_rank_cpu_time_s"] == [2.0, 3.0]


def test_tokens_are_counted_where_the_family_counts_them():
    result = summarize([rank_measure(0, FAST, tokens=[100, 200, 300])], FACTS)
    assert result["global_tokens_per_sec"] == pytest.approx(1000)
    assert "tokens/s" in profile_table(result)
    assert "tokens/s" not in profile_table(summarize([rank_measure(0, FAST)], FACTS))
    with pytest.raises(ValueError, match="no step"):
        summarize([rank_measure(0, FAST), rank_measure(1, [])], FACTS)
