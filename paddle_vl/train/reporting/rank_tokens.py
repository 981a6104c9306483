"""Tokens and sequence lengths of each data rank, for a metrics line: how equal the ranks' work is.

A data rank is one of dp x sharding: the ranks that share its samples (mp, pipeline stages, experts'
shards of one batch) count once, through the one of them that counts data. Its *tokens per step* are
the real tokens of its micro-batches in a step, its *sequence length* the mean over its samples.
Everything is part of the report's one gather.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import paddle

from paddle_vl.train.reporting.gauges import Gauge


def rank_gauges(
    step_tokens: Sequence[int], lengths: Sequence[int], counts_data: bool
) -> list[Gauge]:
    """Gauges of this rank.

    Args:
        step_tokens: its real tokens in each step since the last report, W >= 0 numbers; every rank
            has the same W.
        lengths: real tokens of each of its samples in these steps.
        counts_data: False on ranks that load the same samples as another rank.
    """
    if not step_tokens:
        return []
    own_W = paddle.stack([paddle.full([], n, dtype="float64") for n in step_tokens])

    def neutral(value: float) -> Any:
        return own_W if counts_data else paddle.full_like(own_W, value)

    length = sum(lengths) / len(lengths) if counts_data and lengths else None
    return [
        Gauge("data_ranks", "sum", int(counts_data)),
        Gauge("step_tokens_sum", "sum", neutral(0)),
        Gauge("step_tokens_min", "min", neutral(math.inf)),
        Gauge("step_tokens_max", "max", neutral(-math.inf)),
        Gauge("ranks_with_samples", "sum", int(length is not None)),
        Gauge("rank_length_sum", "sum", length or 0.0),
        Gauge("rank_length_min", "min", math.inf if length is None else length),
        Gauge("rank_length_max", "max", -math.inf if length is None else length),
    ]


def rank_entries(values: Mapping[str, Any]) -> dict[str, float]:
    """Entries of a metrics line; none where tokens are not counted.

    A step's sum, mean, minimum and maximum over data ranks, each averaged over the steps; so the
    minimum and maximum show ranks that differ within a step, though their totals are equal.

    Args:
        values: the gauges, reduced over ranks.
    """
    if "step_tokens_sum" not in values or not values["step_tokens_sum"].sum():
        return {}
    total, ranks = float(values["step_tokens_sum"].mean()), values["data_ranks"]
    most = float(values["step_tokens_max"].mean())
    entries = {
        "tokens_per_step_sum": round(total, 1),
        "tokens_per_step_mean": round(total / ranks, 1),
        "tokens_per_step_min": round(float(values["step_tokens_min"].mean()), 1),
        "tokens_per_step_max": round(most, 1),
    }
    if ranks > 1:
        entries["token_imbalance"] = round(most * ranks / total, 4)
    lengths = values["rank_length_sum"]
    return entries | {
        "rank_sequence_length_sum": round(lengths, 1),
        "rank_sequence_length_mean": round(lengths / values["ranks_with_samples"], 1),
        "rank_sequence_length_min": round(values["rank_length_min"], 1),
        "rank_sequence_length_max": round(values["rank_length_max"], 1),
    }
