"""Learning rate and random seed of a step: functions of the step number, not saved in checkpoints.

Source: get_cosine_with_min_lr_schedule_with_warmup and get_constant_schedule_with_warmup of HF
transformers; CosineDecayWithWarmupSchedulerConfig of LeRobot and OpenTau.
"""

import math
import random

import numpy as np
import paddle

from paddle_vl.config.schema import TrainConfig
from paddle_vl.parallel.ranks import ONE_RANK, SingleRank


def learning_rate(step: int, num_steps: int, train: TrainConfig) -> float:
    """Learning rate of the update after `step` completed ones.

    Args:
        step: completed updates; with warmup the first update (step 0) has rate 0.
        num_steps: updates of the whole run, where the cosine ends.
    """
    if train.lr_scheduler_type == "cosine_decay_with_warmup":
        return _opentau_rate(step, train.decay_steps or num_steps, train)
    if step < train.warmup_steps:
        return train.learning_rate * warmup_factor(step, train.warmup_steps)
    if train.lr_scheduler_type == "constant":
        return train.learning_rate
    factor = cosine_factor(step - train.warmup_steps, num_steps - train.warmup_steps)
    return train.learning_rate * (factor * (1 - train.min_lr_ratio) + train.min_lr_ratio)


def _opentau_rate(step: int, decay_steps: int, train: TrainConfig) -> float:
    """Warmup that starts above 0, then a cosine that counts the warmup steps too, so that it
    starts slightly below the peak."""
    if step < train.warmup_steps:
        return train.learning_rate * warmup_factor(step + 1, train.warmup_steps + 1)
    factor = cosine_factor(step, decay_steps)
    return train.learning_rate * (factor * (1 - train.min_lr_ratio) + train.min_lr_ratio)


def warmup_factor(step: int, warmup_steps: int) -> float:
    """Linear from 0 at step 0 to 1 at `warmup_steps`."""
    return step / max(1, warmup_steps)


def cosine_factor(step: int, num_steps: int) -> float:
    """Half a cosine from 1 at step 0 to 0 at `num_steps`."""
    progress = min(1.0, step / max(1, num_steps))
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, NumPy and Paddle."""
    random.seed(seed)
    np.random.seed(seed)
    paddle.seed(seed)


def seed_step(seed: int, step: int, ranks: SingleRank = ONE_RANK) -> None:
    """Seed all generators for a step.

    Ranks with different samples or layers get different seeds. Ranks of a tensor-parallel group get
    the same seed, except for tensors that they shard: see `paddle_vl.parallel.random_state`.
    """
    entropy = [seed, step, *ranks.random_place]
    seed_everything(int(np.random.SeedSequence(entropy).generate_state(1)[0]))
    ranks.seed_split_random(entropy)
