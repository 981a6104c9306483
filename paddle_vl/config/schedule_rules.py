"""Rules about the length of a run and its learning rates, see `paddle_vl.config.validate`."""

import math
from collections.abc import Iterator

from paddle_vl.config.schema import RunConfig, TrainConfig

Problems = Iterator[str]


def one_length(config: RunConfig) -> Problems:
    names = ("max_steps", "num_train_epochs", "max_tokens")
    given = [f"train.{name}" for name in names if getattr(config.train, name) is not None]
    if not given:
        yield (
            "no length is set: set one of train.max_steps, train.num_train_epochs and "
            "train.max_tokens"
        )
    elif len(given) > 1:
        yield f"{' and '.join(given)} are set, and a run has one length: set one of them"


def tokens_are_counted(config: RunConfig) -> Problems:
    train = config.train
    if train.max_tokens is None:
        return
    if not config.counts_tokens:
        yield (
            f"train.max_tokens is {train.max_tokens} but {config.family} counts no tokens: set "
            "train.max_steps or train.num_train_epochs"
        )
    if train.warmup_steps:
        yield (
            f"train.warmup_steps is {train.warmup_steps} but the learning rate of a run of "
            "train.max_tokens follows tokens: set train.warmup_ratio, the share of the run"
        )
    if train.lr_scheduler_type == "cosine_decay_with_warmup":
        yield (
            "train.lr_scheduler_type cosine_decay_with_warmup counts steps, and train.max_tokens "
            "is set: choose cosine, constant or warmup_stable_decay, or set train.max_steps"
        )


def warmup_fits(config: RunConfig) -> Problems:
    train = config.train
    if train.warmup_steps and train.warmup_ratio:
        yield (
            f"train.warmup_steps {train.warmup_steps} and train.warmup_ratio {train.warmup_ratio} "
            "are both set: set one of them"
        )
    if train.warmup_ratio and train.lr_scheduler_type == "cosine_decay_with_warmup":
        yield (
            f"train.warmup_ratio {train.warmup_ratio} has no effect with train.lr_scheduler_type "
            "cosine_decay_with_warmup: set train.warmup_steps"
        )
    if train.max_steps is not None:
        yield from warmup_problems(train, train.max_steps, f"train.max_steps {train.max_steps}")


def warmup_problems(train: TrainConfig, num_steps: int, length: str) -> Problems:
    """What is wrong with train.warmup_steps in a run of `num_steps`; messages say `length`."""
    if train.warmup_steps > num_steps:
        yield (
            f"train.warmup_steps {train.warmup_steps} exceeds {length}: the learning rate would "
            "never reach train.learning_rate"
        )
    elif train.warmup_steps + math.ceil(num_steps * (train.decay_ratio or 0)) > num_steps:
        yield (
            f"train.warmup_steps {train.warmup_steps} and the {train.decay_ratio} of the run in "
            f"which the rate falls (train.decay_ratio) exceed {length}: lower one of them"
        )


def floor_needs_cosine(config: RunConfig) -> Problems:
    train = config.train
    if train.min_lr_ratio and train.lr_scheduler_type == "constant":
        yield (
            f"train.min_lr_ratio {train.min_lr_ratio} has no effect on a constant schedule: set "
            "train.lr_scheduler_type=cosine or remove it"
        )


def decay_steps_have_a_schedule(config: RunConfig) -> Problems:
    train = config.train
    if train.decay_steps and train.lr_scheduler_type != "cosine_decay_with_warmup":
        yield (
            f"train.decay_steps {train.decay_steps} has no effect with train.lr_scheduler_type "
            f"{train.lr_scheduler_type}: set that to cosine_decay_with_warmup, or remove it"
        )


def stable_phase_has_an_end(config: RunConfig) -> Problems:
    train = config.train
    if train.lr_scheduler_type == "warmup_stable_decay":
        if train.decay_ratio is None:
            yield (
                "train.lr_scheduler_type is warmup_stable_decay but train.decay_ratio is not set: "
                "set the share of the run in which the rate falls, for instance 0.1"
            )
        elif (share := train.decay_ratio + train.warmup_ratio) > 1:
            yield (
                f"train.warmup_ratio {train.warmup_ratio} and train.decay_ratio "
                f"{train.decay_ratio} are {share:g} of the run: lower them to at most 1 together"
            )
        return
    for name, default in (("decay_ratio", None), ("decay_type", "cosine")):
        if (value := getattr(train, name)) != default:
            yield (
                f"train.{name} {value} has no effect with train.lr_scheduler_type "
                f"{train.lr_scheduler_type}: set that to warmup_stable_decay, or remove it"
            )


SCHEDULE_RULES = (
    one_length,
    tokens_are_counted,
    warmup_fits,
    floor_needs_cosine,
    decay_steps_have_a_schedule,
    stable_phase_has_an_end,
)
