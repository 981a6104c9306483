"""The best evaluation of a run: its checkpoint is kept, and a run may stop when none gets better.

The state is part of a checkpoint, and all ranks take the value of rank 0, so that a resumed run, on
any topology, decides the same.
"""

import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from paddle_vl.config.schema import BestConfig
from paddle_vl.files.stored_settings import Count, Number, checked, read_section
from paddle_vl.parallel.ranks import SingleRank
from paddle_vl.train.checkpoint import checkpoint_name

logger = logging.getLogger(__name__)


@checked
class BestState:
    """What a checkpoint stores.

    Attributes:
        step, value: of the best evaluation; None before the first finite value.
        misses: evaluations in a row that were not better by min_delta.
    """

    metric: str
    mode: str
    step: Count | None = None
    value: Number | None = None
    misses: Count = 0


class BestEvaluation:
    """Follows a number of the evaluations.

    Args:
        config: train.best.
    """

    def __init__(self, config: BestConfig):
        self.config, self.state = config, BestState(config.key, config.mode)

    def check_metric(self, keys: Collection[str]) -> None:
        """
        Raises:
            ValueError: the metric is not among the keys of the run's evaluations.
        """
        if self.config.key not in keys:
            raise ValueError(
                f"train.best.metric is {self.config.metric} but no evaluation of this run gives "
                f"{self.config.key}: choose one of {', '.join(sorted(keys))}"
            )

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a stored state; one of another metric or mode is left.

        Raises:
            ValueError: it is no state of a best evaluation.
        """
        stored, own = read_section(BestState, state, "best"), self.state
        if (stored.metric, stored.mode) == (own.metric, own.mode):
            self.state = stored

    def add(
        self, step: int, entries: Mapping[str, float], ranks: SingleRank, holds: bool = True
    ) -> bool:
        """Take an evaluation's entries of a metrics line; returns whether it is the best so far,
        which one that does not hold what train.guard asks for never is.

        One without the metric, as of evaluations that generate no answers, changes nothing. Called
        by all ranks.
        """
        own, before = entries.get(self.config.key), self.state.value
        if own is None:
            return False
        value = float(ranks.gathered(str(own))[0])
        if not holds:
            gain = -math.inf
        elif before is None or not math.isfinite(value):
            gain = math.inf if math.isfinite(value) else -math.inf
        else:
            gain = value - before if self.config.mode == "max" else before - value
        misses = 0 if gain > self.config.min_delta else self.state.misses + 1
        self.state = replace(self.state, misses=misses)
        if gain > 0:
            self.state = replace(self.state, step=step, value=value)
            logger.info("step %d: the best %s so far", step, self.config.key)
        return gain > 0

    @property
    def is_over(self) -> bool:
        """Whether train.best.patience is used up."""
        return self.config.patience is not None and self.state.misses >= self.config.patience

    @property
    def folder(self) -> str | None:
        """Name of the best evaluation's checkpoint."""
        return None if self.state.step is None else checkpoint_name(self.state.step)
