"""Advantages of answers from their rewards, over all ranks' answers of a generation.

Statistics are exact, in float64, of arrays in the order of prompts: of whole groups, gathered from
the ranks before.

Source: TRL's GRPOTrainer and RLOOTrainer; ms-swift (reinforce_plus_plus). Shapes: S answers, F
rewards, G answers to a prompt.
"""

import warnings

import numpy as np

from paddle_vl.families.vlm.grpo.settings import GRPOConfig

# Added to a deviation.
EPSILON = 1e-4
Array = np.ndarray


def advantages(rewards_SF: Array, settings: GRPOConfig, kl_S: Array | None = None) -> Array:
    """`[S]` float32; 0 of an answer without a reward, and of one that nothing is compared with.

    Args:
        rewards_SF: groups one after the other; NaN where a function does not judge an answer.
        kl_S: sums of log-ratios of the old policy and the reference, which rloo and
            reinforce_plus_plus take from rewards; None without them.

    Raises:
        ValueError: an infinite reward, or answers that are no whole groups.
    """
    rewards_SF = np.asarray(rewards_SF, np.float32).astype(np.float64)
    if np.isinf(rewards_SF).any():
        row, function = np.argwhere(np.isinf(rewards_SF))[0].tolist()
        raise ValueError(f"reward {function} of answer {row} is infinite: it must be a number")
    size = settings.num_generations
    if len(rewards_SF) % size:
        raise ValueError(f"{len(rewards_SF)} answers are no groups of {size}")
    total_S = total_rewards(rewards_SF, settings)
    if settings.estimator == "rloo":
        found_S = _rloo(total_S, settings, kl_S)
    elif settings.estimator == "reinforce_plus_plus":
        found_S = _reinforce_plus_plus(total_S, settings, kl_S)
    elif settings.multi_objective_aggregation == "normalize_then_sum":
        parts_SF = np.stack([_normalised(column, size) for column in rewards_SF.T], axis=1)
        sums_S = np.nansum(parts_SF * settings.weights, axis=1)
        sums_S[np.isnan(total_S)] = np.nan
        found_S = (sums_S - mean_of(sums_S)) / (std_of(sums_S) + EPSILON)
    elif settings.scale_rewards == "group":
        found_S = _normalised(total_S, size)
    else:
        scale = std_of(total_S) + EPSILON if settings.scale_rewards == "batch" else 1.0
        found_S = (total_S - of_groups(total_S, size, mean_of)) / scale
    return np.nan_to_num(found_S, nan=0.0).astype(np.float32)


def total_rewards(rewards_SF: Array, settings: GRPOConfig) -> Array:
    """`[S]`, the weighted sum of the rewards that there are; NaN of answers without any."""
    total_S = np.nansum(rewards_SF * settings.weights, axis=1)
    return np.where(np.isnan(rewards_SF).all(axis=1), np.nan, total_S)


def of_groups(x_S: Array, size: int, statistic) -> Array:
    """`[S]`, a statistic of each answer's group, over what is not NaN."""
    return np.repeat([statistic(group) for group in x_S.reshape(-1, size)], size)


def frac_zero_std(total_S: Array, settings: GRPOConfig) -> float:
    """The share of answers whose group, or batch where it scales, has equal rewards."""
    by_batch = settings.estimator == "grpo" and (
        settings.scale_rewards == "batch"
        or settings.multi_objective_aggregation == "normalize_then_sum"
    )
    size = len(total_S) if by_batch else settings.num_generations
    return float(np.isclose(of_groups(total_S, size, std_of), 0.0).mean())


def _rloo(total_S: Array, settings: GRPOConfig, kl_S: Array | None) -> Array:
    if settings.reward_clip_range is not None:
        least, most = settings.reward_clip_range
        total_S = np.clip(total_S, least, most)
    total_S = _without_kl(total_S, settings, kl_S)
    size = settings.num_generations
    count_S = of_groups(total_S, size, lambda x: float((~np.isnan(x)).sum()))
    # An answer alone has no others.
    factor_S = np.where(count_S > 1, count_S / np.maximum(count_S - 1, 1), np.nan)
    found_S = factor_S * (total_S - of_groups(total_S, size, mean_of))
    if settings.normalize_advantages:
        found_S = (found_S - mean_of(found_S)) / (std_of(found_S) + EPSILON)
    return found_S


def _reinforce_plus_plus(total_S: Array, settings: GRPOConfig, kl_S: Array | None) -> Array:
    total_S = _without_kl(total_S, settings, kl_S)
    size = settings.num_generations
    found_S = total_S - of_groups(total_S, size, mean_of)
    if settings.scale_rewards == "none":
        return found_S
    over = size if settings.scale_rewards == "group" else len(found_S)
    return found_S / (of_groups(found_S, over, std_of) + EPSILON)


def _without_kl(total_S: Array, settings: GRPOConfig, kl_S: Array | None) -> Array:
    """Rewards that the KL term is taken from."""
    return total_S if kl_S is None else total_S - settings.beta * kl_S


def _normalised(x_S: Array, size: int) -> Array:
    scale_S = of_groups(x_S, size, std_of) + EPSILON
    return (x_S - of_groups(x_S, size, mean_of)) / scale_S


def mean_of(x: Array) -> float:
    """The mean of what is not NaN."""
    with warnings.catch_warnings():
        # Of nothing it is NaN.
        warnings.simplefilter("ignore", RuntimeWarning)
        return float(np.nanmean(x))


def std_of(x: Array) -> float:
    """The deviation of what is not NaN, with one less than the count; NaN of a single value."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return float(np.nanstd(x, ddof=1))
