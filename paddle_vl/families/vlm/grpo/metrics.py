"""Metrics of a generation, of the answers of all ranks, under TRL's names.

Source: TRL's GRPOTrainer. Shapes: S answers, F rewards, N learned tokens.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from paddle_vl.families.vlm.grpo.advantages import frac_zero_std, mean_of, std_of, total_rewards
from paddle_vl.families.vlm.grpo.settings import GRPOConfig

Array = np.ndarray
_GAP, _RATIO = "sampling/sampling_logp_difference", "sampling/importance_sampling_ratio"


def reward_metrics(
    rewards_SF: Array, names: Sequence[str], settings: GRPOConfig
) -> dict[str, float]:
    """Means and deviations of rewards; NaN of a function that judged no answer.

    Args:
        rewards_SF: as of `advantages`.
        names: of the functions.
    """
    rewards_SF = np.asarray(rewards_SF, np.float64)
    found: dict[str, float] = {}
    for name, column_S in zip(names, rewards_SF.T, strict=True):
        found[f"rewards/{name}/mean"] = mean_of(column_S)
        found[f"rewards/{name}/std"] = std_of(column_S)
    total_S = total_rewards(rewards_SF, settings)
    return found | {
        "reward": mean_of(total_S),
        "reward_std": std_of(total_S),
        "frac_reward_zero_std": frac_zero_std(total_S, settings),
    }


def completion_metrics(
    lengths_S: Array, is_truncated_S: Array, prompt_lengths_S: Array
) -> dict[str, float]:
    """Lengths of answers before masks.

    Args:
        lengths_S: sampled tokens.
        is_truncated_S: whether an answer was cut at the longest length.
    """
    ended = lengths_S[~np.asarray(is_truncated_S, bool)]
    found: dict[str, float] = {"num_tokens": float(lengths_S.sum() + prompt_lengths_S.sum())}
    for name, each in (("", lengths_S), ("terminated_", ended if len(ended) else np.zeros(1))):
        found |= {
            f"completions/mean_{name}length": float(each.mean()),
            f"completions/min_{name}length": float(each.min()),
            f"completions/max_{name}length": float(each.max()),
        }
    found["completions/clipped_ratio"] = float(np.mean(is_truncated_S))
    return found


def sampler_metrics(
    old_N: Array, sampler_N: Array, weights: Array | None = None
) -> dict[str, float]:
    """How far the sampler's log-probabilities are from the trainer's of the same policy; without
    tokens that the sampler gave none (NaN).

    Args:
        weights: of `sampler_weights`, of tokens, or of answers; None for ratios without bounds.
    """
    gap_N = (old_N - sampler_N)[~np.isnan(sampler_N)].astype(np.float64)
    gap_N = gap_N if len(gap_N) else np.zeros(1)
    weights = np.exp(gap_N) if weights is None else weights
    return {
        f"{_GAP}/mean": float(np.abs(gap_N).mean()),
        f"{_GAP}/max": float(np.abs(gap_N).max()),
        f"{_RATIO}/min": float(weights.min()),
        f"{_RATIO}/mean": float(weights.mean()),
        f"{_RATIO}/max": float(weights.max()),
    }


def check_sampler(metrics: Mapping[str, float], settings: GRPOConfig) -> None:
    """
    Args:
        metrics: of `sampler_metrics`, of the weights that sampled.

    Raises:
        ValueError: sampler and trainer disagree by more than is allowed.
    """
    bound, found = settings.max_sampling_logp_difference, metrics[f"{_GAP}/mean"]
    if bound is not None and not found <= bound:
        raise ValueError(
            f"the sampler's log-probabilities differ from the trainer's by {found:.4g} nats a "
            f"token in the mean, more than grpo.max_sampling_logp_difference {bound:g}: positions, "
            "images, temperature or weights are not the same in both"
        )
