"""Learning rate as a function of the step.

Source: get_cosine_with_min_lr_schedule_with_warmup and get_constant_schedule_with_warmup of HF
transformers; CosineDecayWithWarmupSchedulerConfig of LeRobot and OpenTau.
"""

import math

from paddle_vl.config.schema import TrainConfig


def learning_rate(step: int, num_steps: int, train: TrainConfig) -> float:
    """The learning rate of the update that follows `step` completed ones.

    Args:
        step: completed updates, so 0 for the first one, which with warmup has a rate of 0.
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
    """A warmup that does not begin at 0, then a cosine over the whole run's steps, warmup's too:
    behind the warmup it has come down a little."""
    if step < train.warmup_steps:
        return train.learning_rate * warmup_factor(step + 1, train.warmup_steps + 1)
    factor = cosine_factor(step, decay_steps)
    return train.learning_rate * (factor * (1 - train.min_lr_ratio) + train.min_lr_ratio)


def warmup_factor(step: int, warmup_steps: int) -> float:
    """Straight from 0 at step 0 to 1 at `warmup_steps`."""
    return step / max(1, warmup_steps)


def cosine_factor(step: int, num_steps: int) -> float:
    """Half a cosine from 1 at step 0 to 0 at `num_steps`."""
    progress = min(1.0, step / max(1, num_steps))
    return 0.5 * (1.0 + math.cos(math.pi * progress))
