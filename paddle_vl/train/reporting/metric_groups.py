"""Which of a run's metrics belong together, by the words in their keys.

No key is unknown: one that fits nothing is in the last group.
"""

import re
from typing import NamedTuple

EVAL_PREFIX = "eval_"


class MetricGroup(NamedTuple):
    """Metrics that stand side by side.

    Attributes:
        tag: what their names begin with in VisualDL and TensorBoard.
        title: of their section in a report.
        words: what a key has that belongs here, and to no group before.
    """

    tag: str
    title: str
    words: re.Pattern[str]


LOSS = MetricGroup("train", "Loss", re.compile(r"(^|_)loss$|^[A-Z]+$"))
GROUPS = (
    LOSS,
    MetricGroup(
        "train",
        "Learning rate and gradient",
        re.compile(r"^learning_rate|^lr\b|grad|^skipped_updates$"),
    ),
    MetricGroup(
        "speed",
        "Speed and memory",
        re.compile(r"_per_second|mfu|flops|throughput|seconds|_ms$|_wait|_time|duration"),
    ),
    MetricGroup("memory", "Speed and memory", re.compile(r"memory|bytes")),
    MetricGroup("experts", "Data", re.compile(r"expert")),
    MetricGroup(
        "data", "Data", re.compile(r"epoch|token|sample|sequence|length|packing|patches|images")
    ),
    MetricGroup("other", "Further", re.compile(r"")),
)


def group_of(key: str) -> MetricGroup:
    """The first group that has a word of the key."""
    return next(group for group in GROUPS if group.words.search(key))


def tag_of(key: str) -> str:
    """A key's name where names have folders: `train/loss`, `eval/loss`, `data/epoch`."""
    if key.startswith(EVAL_PREFIX):
        return f"eval/{key.removeprefix(EVAL_PREFIX)}"
    return f"{group_of(key).tag}/{key}"
