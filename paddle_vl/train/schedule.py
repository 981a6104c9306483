"""Length of a run; learning rate and random seed of a step, functions of what is done, which no
checkpoint has.

Source: get_cosine_with_min_lr_schedule_with_warmup, get_constant_schedule_with_warmup and
get_wsd_schedule of HF transformers; CosineDecayWithWarmupSchedulerConfig of LeRobot and OpenTau.
"""

import math
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import paddle

from paddle_vl.config.schema import EMAConfig, TrainConfig
from paddle_vl.parallel.ranks import ONE_RANK, SingleRank


@dataclass(frozen=True)
class RunLength:
    """How long a run trains: a number of steps, or (train.max_tokens) of tokens.

    A run of tokens ends with the first step after which the tokens of all ranks, visual ones
    included and padding not, are at least as many. Its learning rate follows the tokens.
    """

    steps: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        assert (self.steps is None) != (self.tokens is None), "a run has one length"

    def is_reached(self, step: int, tokens: int) -> bool:
        """Whether the run is over after `step` steps with `tokens` tokens."""
        done, total = self.place(step, tokens)
        return done >= total

    def place(self, step: int, tokens: int) -> tuple[int, int]:
        """What is done and the whole length, both in the unit of the length."""
        if self.steps is not None:
            return step, self.steps
        assert self.tokens is not None
        return tokens, self.tokens


def restored_tokens(tokens: int | None, length: RunLength, checkpoint: Path) -> int:
    """Tokens that the run of a checkpoint has trained on; 0 if the checkpoint does not say so.

    Raises:
        ValueError: it does not, and the run's length is in tokens.
    """
    if tokens is None and length.tokens is not None:
        raise ValueError(
            f"train.max_tokens is set, and {checkpoint}, of an earlier version, does not say how "
            "many tokens it has trained on: set train.max_steps in its place"
        )
    return tokens or 0


# Of the average with `schedule: warmup`, as in LeRobot.
_LARGEST_DECAY = 0.9999


def average_decay(ema: EMAConfig, step: int) -> float:
    """Share that the average of the weights keeps of itself after a step, counted from 1."""
    if ema.schedule == "constant":
        return ema.decay
    return min(1 - (1 + (step - 1) / ema.inv_gamma) ** -ema.power, _LARGEST_DECAY)


def learning_rate(done: int, total: int, train: TrainConfig) -> float:
    """Learning rate of the update after `done` of `total`: completed steps, or tokens.

    Args:
        done: with warmup the first update (0) has rate 0.
        total: of the whole run, where cosine and decay end.
    """
    kind = train.lr_scheduler_type
    is_opentau = kind == "cosine_decay_with_warmup"
    warmup = train.warmup_steps or math.ceil(total * train.warmup_ratio)
    if done < warmup and is_opentau:
        # It starts above 0.
        return train.learning_rate * ((done + 1) / (warmup + 1))
    if done < warmup:
        return train.learning_rate * (done / warmup)
    if kind == "constant":
        return train.learning_rate
    if is_opentau:
        # It counts the warmup steps too, so that it starts slightly below the peak.
        factor = cosine_factor(done, train.decay_steps or total)
    elif kind == "cosine":
        factor = cosine_factor(done - warmup, total - warmup)
    else:
        factor = _decay_factor(done, total, train)
    return train.learning_rate * (factor * (1 - train.min_lr_ratio) + train.min_lr_ratio)


def _decay_factor(done: int, total: int, train: TrainConfig) -> float:
    """1, and from 1 to 0 over the last train.decay_ratio of the run."""
    assert train.decay_ratio is not None, "refused when the settings were read"
    length = math.ceil(total * train.decay_ratio)
    place = done - (total - length)
    if place <= 0:
        return 1.0
    progress = min(1.0, place / length)
    if train.decay_type == "linear":
        return 1.0 - progress
    return cosine_factor(place, length) if train.decay_type == "cosine" else 1 - progress**0.5


def cosine_factor(done: int, total: int) -> float:
    """Half a cosine from 1 at 0 to 0 at `total`."""
    progress = min(1.0, done / max(1, total))
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
