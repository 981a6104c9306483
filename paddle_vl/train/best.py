"""The best evaluation of a run: its checkpoint is kept, and a run may stop when none gets better.

The state is part of a checkpoint, and all ranks take the value of rank 0, so that a resumed run,
on any topology, decides the same.
"""

import logging
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from paddle_vl.checkpoint.manifest import Manifest
from paddle_vl.config.schema import BestConfig
from paddle_vl.files.checked_values import Count, Number, checked, read_section
from paddle_vl.parallel.ranks import SingleRank
from paddle_vl.train.checkpoint import checkpoint_name

logger = logging.getLogger(__name__)
# The best model until it becomes final/, with train.best.load_at_end.
BEST = "best"


@checked
class _State:
    """See `BestEvaluation.state_dict`."""

    metric: str
    mode: str
    step: Count | None = None
    value: Number | None = None
    misses: Count = 0


class BestEvaluation:
    """Follows a number of the evaluations.

    Args:
        config: train.best.

    Attributes:
        step: of the best evaluation; None before the first finite value.
    """

    def __init__(self, config: BestConfig):
        self.config, self.step = config, None
        self._value: float | None = None
        # Evaluations in a row that were not better by min_delta.
        self._misses = 0

    def check_metric(self, keys: Collection[str]) -> None:
        """Refuse a metric that is not among the keys of the run's evaluations.

        Raises:
            ValueError: it is not.
        """
        if self.config.key not in keys:
            raise ValueError(
                f"train.best.metric is {self.config.metric} but no evaluation of this run gives "
                f"{self.config.key}: choose one of {', '.join(sorted(keys))}"
            )

    def add(self, step: int, entries: Mapping[str, float], ranks: SingleRank) -> bool:
        """Take an evaluation's entries of a metrics line; returns whether it is the best so far.

        One without the metric, as of evaluations that generate no answers, changes nothing. Called
        by all ranks.
        """
        if (own := entries.get(self.config.key)) is None:
            return False
        value = float(ranks.gathered(str(float(own)))[0])
        gain = -math.inf
        if math.isfinite(value):
            sign = 1 if self.config.mode == "max" else -1
            gain = math.inf if self._value is None else sign * (value - self._value)
        self._misses = 0 if gain > self.config.min_delta else self._misses + 1
        if gain <= 0:
            return False
        self.step, self._value = step, value
        logger.info("step %d: the best %s so far", step, self.config.key)
        return True

    @property
    def is_over(self) -> bool:
        """Whether train.best.patience is used up."""
        return self.config.patience is not None and self._misses >= self.config.patience

    @property
    def folder(self) -> str | None:
        """Name of the best evaluation's checkpoint."""
        return None if self.step is None else checkpoint_name(self.step)

    def state_dict(self) -> dict[str, Any]:
        """State that a checkpoint stores; JSON values."""
        named = {"metric": self.config.key, "mode": self.config.mode}
        return {**named, "step": self.step, "value": self._value, "misses": self._misses}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a state; begin anew from one of another metric, or from none.

        Raises:
            ValueError: it is no state of a best evaluation.
        """
        if state is None:
            return
        stored = read_section(_State, state, "best")
        if (stored.metric, stored.mode) == (self.config.key, self.config.mode):
            self.step, self._value, self._misses = stored.step, stored.value, stored.misses

    def check_model(self, output_dir: Path, final: str) -> None:
        """Check that the best model of a resumed run is there to become final/.

        Raises:
            RuntimeError: it is not.
        """
        if not self.config.load_at_end or self.step is None:
            return
        for folder in (output_dir / BEST, output_dir / final):
            manifest = Manifest.read(folder) if folder.is_dir() else None
            if manifest is not None and manifest.step == self.step:
                return
        raise RuntimeError(
            f"the best evaluation so far was that of step {self.step}, whose model is not in "
            f"{output_dir / BEST}: set train.best.load_at_end=false, or begin anew in another "
            "train.output_dir"
        )
