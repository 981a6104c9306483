"""Weights that correct for the difference between the sampler's log-probabilities and the
trainer's, of one policy.

Source: TRL's GRPOTrainer (vllm_importance_sampling_mode); ms-swift
(rollout_importance_sampling_mode). Shapes: N learned tokens.
"""

import paddle
from paddle import Tensor

from paddle_vl.families.vlm.grpo.rows import Rows
from paddle_vl.families.vlm.grpo.settings import GRPOConfig


def log_gap(old_N: Tensor, sampler_N: Tensor) -> Tensor:
    """`[N]`, what the trainer finds more likely than the sampler, in nats; 0 of tokens that the
    sampler gave no log-probability (NaN)."""
    gap_N = old_N - sampler_N
    return paddle.where(paddle.isnan(gap_N), paddle.zeros_like(gap_N), gap_N)


@paddle.no_grad()
def sampler_weights(old_N: Tensor, sampler_N: Tensor, rows: Rows, settings: GRPOConfig) -> Tensor:
    """`[N]` float32, the weight of each token's policy term."""
    mode = settings.importance_sampling_mode
    assert mode is not None, "asked where it is set"
    gap_N = log_gap(old_N, sampler_N)
    if mode.startswith("token"):
        measured_N = gap_N
    else:
        reduced = rows.sum if mode.startswith("sequence") else rows.mean
        measured_N = rows.spread(reduced(gap_N))
    low, high = settings.importance_sampling_clip_min, settings.importance_sampling_clip_max
    measured_N = measured_N.exp()
    if mode.endswith("truncate"):
        return measured_N.clip(0.0 if low is None else low, high)
    # A geometric mean decides on the tokens' own weights.
    weights_N = gap_N.exp() if mode.startswith("geometric") else measured_N
    is_kept_N = (measured_N <= high) & (measured_N >= (low or 0.0))
    return paddle.where(is_kept_N, weights_N, paddle.zeros_like(weights_N))
