"""Entries of a metrics line for the samples and tokens of the data ranks."""

from collections.abc import Mapping

import numpy as np


def token_entries(values: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Lengths of samples, and tokens per step of the data ranks; none where none are counted.

    Of the ranks' tokens, sum, mean, minimum and maximum of each step are averaged over the steps;
    so the minimum and maximum show ranks that differ within a step, though their totals are equal.
    """
    has_data, counts = values["counts_data"] > 0, values["length_count"]
    has_samples = has_data & (counts > 0)
    if not has_samples.any():
        return {}
    totals = values["length_sum"]
    mean = float(totals[has_samples].sum() / counts[has_samples].sum())
    line: dict[str, float] = {
        "sequence_length_min": int(values["length_min"][has_samples].min()),
        "sequence_length_mean": round(mean, 1),
        "sequence_length_max": int(values["length_max"][has_samples].max()),
    }
    tokens_PW = values["step_tokens"][has_data]
    total, most = float(tokens_PW.sum(axis=0).mean()), float(tokens_PW.max(axis=0).mean())
    if total:
        line |= {
            "tokens_per_step_sum": round(total, 1),
            "tokens_per_step_mean": round(total / len(tokens_PW), 1),
            "tokens_per_step_min": round(float(tokens_PW.min(axis=0).mean()), 1),
            "tokens_per_step_max": round(most, 1),
        }
        if len(tokens_PW) > 1:
            line["token_imbalance"] = round(most * len(tokens_PW) / total, 4)
        lengths = totals[has_samples] / counts[has_samples]
        for name in ("sum", "mean", "min", "max"):
            line[f"rank_sequence_length_{name}"] = round(float(getattr(lengths, name)()), 1)
    return line
