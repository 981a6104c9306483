"""A guard against forgetting: what a run may lose of the scores that it started with.

The evaluation before the first update gives each named source of data.eval its scores; every later
one is compared with these. The state is part of a checkpoint, and all ranks take the values of
rank 0, so that a resumed run, on any topology, compares with the same and decides the same.
"""

import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import Any, NamedTuple

from paddle_vl.config.guard_settings import GuardConfig
from paddle_vl.files.stored_settings import Count, Number, checked, read_section
from paddle_vl.parallel.ranks import SingleRank

logger = logging.getLogger(__name__)


@checked
class GuardState:
    """What a checkpoint stores.

    Attributes:
        before, last: of the first and of the last evaluation, by key of metrics.jsonl; null where
            the last was not finite.
        step: of the last evaluation without a fall; None before the first evaluation.
    """

    before: dict[str, Number] = field(default_factory=dict)
    last: dict[str, Number | None] = field(default_factory=dict)
    step: Count | None = None


class Fall(NamedTuple):
    """A score that is worse than at the start by more than a guard allows."""

    key: str
    guard: GuardConfig
    before: float
    now: float | None


class Guard:
    """Follows scores of the named sources of data.eval.

    Args:
        guards: train.guard.
    """

    def __init__(self, guards: Sequence[GuardConfig]):
        self._guards, self.state = guards, GuardState()
        self._keys: list[tuple[str, GuardConfig]] = []

    def check(self, keys: Collection[str], sources: Collection[str]) -> None:
        """Find the scores to follow.

        Args:
            keys: of the run's evaluations.
            sources: names of the sources of data.eval.

        Raises:
            ValueError: no evaluation gives a guard's metric of a source.
        """
        given = ", ".join(sorted(key for key in keys if "/" in key)) or "none of a source"
        for guard in self._guards:
            found = [key for key in sorted(keys) if key.startswith(f"{guard.key}/")]
            asked = {key.partition("/")[2] for key in keys}
            wanted = [f"{guard.key}/{name}" for name in guard.sources]
            missing = [key for key in wanted if key not in found]
            unasked = [name for name in sources if name not in asked]
            if missing or not found:
                raise ValueError(
                    f"train.guard.metric is {guard.metric} but no evaluation of this run gives "
                    f"{missing[0] if missing else f'{guard.key}/SOURCE'}: give the entry of "
                    "data.eval that holds a task out a name, and the metric to it or to train.eval "
                    f"(there are {given})"
                )
            if unasked and not wanted:
                raise ValueError(
                    f"train.guard follows every named source of data.eval, and none of the rows "
                    f"that are asked is of {unasked[0]}: raise train.eval.num_samples, or name the "
                    "others in train.guard.sources"
                )
            self._keys += [(key, guard) for key in wanted or found]

    def restore(self, state: Mapping[str, Any] | None, step: int) -> None:
        """Continue from the state of a step; None of a run without a guard.

        Raises:
            ValueError: it is no state of a guard, or the run has started without these scores.
        """
        stored = GuardState() if state is None else read_section(GuardState, state, "guard")
        missing = [key for key, _ in self._keys if key not in stored.before]
        if step and missing:
            raise ValueError(
                f"train.guard compares with the scores before the first update, and the run has "
                f"trained {step} steps without taking {missing[0]}: start it anew with the guard, "
                "or remove it"
            )
        self.state = stored

    @property
    def stops(self) -> bool:
        """Whether a fall may end the run."""
        return any(guard.action == "stop" for guard in self._guards)

    @property
    def is_over(self) -> bool:
        """Whether one has."""
        return any(fall.guard.action == "stop" for fall in self.falls())

    def falls(self) -> Iterator[Fall]:
        """Scores of the last evaluation that fell too far."""
        state = self.state
        for key, guard in self._keys:
            if key in state.last:
                now, before = state.last[key], state.before[key]
                if now is None or guard.drop(before, now) > guard.max_drop:
                    yield Fall(key, guard, before, now)

    def add(
        self, step: int, entries: Mapping[str, float], ranks: SingleRank
    ) -> tuple[bool | None, dict[str, float]]:
        """Take an evaluation's entries of a metrics line. Called by all ranks.

        Returns:
            Whether no score fell; None of an evaluation that lacks them, as one that generates no
            answers. And entries with how much worse each score is than before the first update.

        Raises:
            RuntimeError: a score before the first update is not finite.
        """
        if any(key not in entries for key, _ in self._keys):
            return None, {}
        own = {key: entries[key] for key, _ in self._keys}
        own = {key: value if math.isfinite(value) else None for key, value in own.items()}
        last: dict[str, float | None] = ranks.gathered(own)[0]
        if not self.state.before:
            if missing := [key for key, value in last.items() if value is None]:
                raise RuntimeError(
                    f"train.guard: {missing[0]} is not finite before the first update, so that "
                    "nothing can be compared with it: correct the model or the data"
                )
            self.state = replace(self.state, before=last)
        self.state = replace(self.state, last=last)
        fallen = [*self.falls()]
        for fall in fallen:
            ending = "the run ends" if fall.guard.action == "stop" else "the run goes on"
            logger.warning(
                "step %d: %s was %.4g before the first update and is %s, worse by more than "
                "train.guard.max_drop %g: %s",
                *(step, fall.key, fall.before),
                "not finite" if fall.now is None else f"{fall.now:.4g}",
                *(fall.guard.max_drop, ending),
            )
        if not fallen:
            self.state = replace(self.state, step=step)
        before = self.state.before
        drops = {
            f"{guard.key}_drop/{key.partition('/')[2]}": guard.drop(before[key], now)
            for key, guard in self._keys
            if (now := last[key]) is not None
        }
        return not fallen, drops
