"""Rewards of sampled answers: metrics of evaluation, patterns, and functions of a user's own file.

A reward of a name or pattern judges each answer alone. A function has the signature of TRL's: lists
with an entry for each answer, and a list of numbers back, None where it does not judge.

Shapes: S answers, F rewards.
"""

import inspect
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from numbers import Real
from pathlib import Path
from runpy import run_path
from typing import Any, NamedTuple

import numpy as np

from paddle_vl.families.vlm.evaluation.metrics import Metric, Scored, conclusion, metric_named
from paddle_vl.families.vlm.grpo.settings import FORMAT, GRPOConfig
from paddle_vl.threads import JoinedThread

logger = logging.getLogger(__name__)
# Numbers of a metric that gives several.
_PART_OF: dict[str, str] = dict.fromkeys(
    ("box_iou", "box_precision_0.5", "box_precision_0.7", "box_precision_0.9"), "box"
)


def _is_of_sets(metric: Metric) -> bool:
    """Whether a metric scores whole sets of answers only."""
    # Any answer; some want another kind of reference.
    with suppress(ValueError):
        return not metric.own(Scored("0", ["0"]))
    return False


class SampledAnswer(NamedTuple):
    """An answer as rewards see it.

    Attributes:
        text: without special tokens.
        ids: as they were sampled.
        prompt: the messages before it.
        row: other values of the prompt's row, such as `solution`.
        references: right answers, of the row.
        number: of the row in the data, for messages.
    """

    text: str
    ids: Sequence[int]
    prompt: Sequence[Mapping[str, Any]] = ()
    row: Mapping[str, Any] = {}
    references: Sequence[str] = ()
    number: int = 0


Function = Callable[[Sequence[SampledAnswer]], Sequence[Any]]


class Rewards:
    """The rewards of a run.

    Args:
        settings: whose `rewards` name them.
        base: folder that paths of files are relative to.

    Attributes:
        names: under which metrics lines have them.
        logged: numbers that functions gave to `log_metric` in the last call.
        columns: lists that they gave to `log_extra`.

    Raises:
        ValueError: there is no such reward, or it cannot be called.
    """

    def __init__(self, settings: GRPOConfig, base: Path | None = None):
        self.settings, self.logged, self.columns = settings, {}, {}
        if not settings.rewards:
            raise ValueError("grpo.rewards names nothing that scores answers: name one, see --help")
        self.names = [
            "format" if each.startswith(FORMAT) else each.rpartition(":")[2]
            for each in settings.rewards
        ]
        if len({*self.names}) < len(self.names):
            raise ValueError(
                f"grpo.rewards {settings.rewards}: two are called the same: rename one"
            )
        functions = [self._named(each, base or Path()) for each in settings.rewards]
        self._functions = dict(zip(self.names, functions, strict=True))

    def __call__(self, answers: Sequence[SampledAnswer], state: Any = None) -> np.ndarray:
        """`[S, F]` float32, NaN where a reward does not judge an answer, or failed on it.

        Args:
            answers: groups of `num_generations` one after the other.
            state: of the trainer, for functions.

        Raises:
            ValueError: a reward failed, returned something else than a number for each answer, or
                judged only some answers of a group.
        """
        self.logged, self.columns, self._state = {}, {}, state
        rewards_SF = np.zeros([len(answers), len(self.names)], np.float32)
        failed: set[int] = set()
        for column, (name, function) in enumerate(self._functions.items()):
            values_S, left_out = self._scored(name, function, answers)
            rewards_SF[:, column] = values_S
            failed |= left_out
        self._check_groups(rewards_SF, answers, failed)
        # An answer that a reward failed on has none.
        rewards_SF[sorted(failed)] = np.nan
        return rewards_SF

    def _scored(
        self, name: str, function: Function, answers: Sequence[SampledAnswer]
    ) -> tuple[list[float], set[int]]:
        """The values of a reward, and the answers that are left out since it failed on them."""
        try:
            values = self._timed(name, function, answers)
        except Exception as error:
            return self._each_alone(name, function, answers, error)
        if not isinstance(values, Sequence | np.ndarray) or isinstance(values, str):
            raise ValueError(
                f"reward {name} returned {values!r:.80}: it must return a list of numbers"
            )
        if len(values) != len(answers):
            raise ValueError(
                f"reward {name} returned {len(values)} values for {len(answers)} answers: it must "
                "return one for each, None where it does not judge"
            )
        pairs = zip(values, answers, strict=True)
        return [self._number(name, [value], answer) for value, answer in pairs], set()

    def _each_alone(
        self, name: str, function: Function, answers: Sequence[SampledAnswer], error: Exception
    ) -> tuple[list[float], set[int]]:
        """As `_scored`, after an error: which answer it is of is known from calls with one each."""
        values = [math.nan] * len(answers)
        failed: dict[int, Exception] = {}
        is_skipped = self.settings.on_reward_error == "skip"
        for number, answer in enumerate(answers):
            try:
                if isinstance(error, TimeoutError):
                    raise error
                values[number] = self._number(name, self._timed(name, function, [answer]), answer)
            except Exception as own:
                failed[number] = own
                if not is_skipped:
                    break
        if not failed:
            raise ValueError(
                f"reward {name} failed on {len(answers)} answers, but not on each alone: "
                f"{type(error).__name__}: {error}"
            ) from error
        first, own = next(iter(failed.items()))
        message = (
            f"reward {name} failed on row {answers[first].number} of the data (answer {first} of "
            f"the generation, {answers[first].text!r:.80}): {type(own).__name__}: {own}"
        )
        if not is_skipped:
            raise ValueError(f"{message}; mend it, or set grpo.on_reward_error=skip") from own
        logger.warning("%s; %d answers are left out", message, len(failed))
        return values, {*failed}

    def _number(self, name: str, values: Sequence[Any], answer: SampledAnswer) -> float:
        value = values[0]
        if value is None:
            return math.nan
        if not isinstance(value, Real | np.number | np.bool_) or not math.isfinite(value):
            raise ValueError(
                f"reward {name} returned {value!r:.80} for row {answer.number} of the data "
                f"({answer.text!r:.80}): it must return a finite number, or None where it does not "
                "judge"
            )
        return float(value)

    def _timed(self, name: str, function: Function, answers: Sequence[SampledAnswer]) -> Any:
        found: list[Any] = []
        # A thread that hangs does not keep the process from ending.
        thread = JoinedThread(target=lambda: found.append(function(answers)), daemon=True)
        thread.start()
        limit = self.settings.reward_timeout_s
        thread.join(limit)
        if thread.is_alive():
            raise TimeoutError(
                f"reward {name} takes longer than grpo.reward_timeout_s {limit:g} for "
                f"{len(answers)} answers"
            )
        return found[0]

    def _check_groups(
        self, rewards_SF: np.ndarray, answers: Sequence[SampledAnswer], failed: set[int]
    ) -> None:
        size = self.settings.num_generations
        for begin in range(0, len(answers), size):
            kept = [row for row in range(begin, begin + size) if row not in failed]
            is_none_SF = np.isnan(rewards_SF[kept])
            partial_F = is_none_SF.any(axis=0) & ~is_none_SF.all(axis=0)
            if partial_F.any():
                name = self.names[int(partial_F.argmax())]
                raise ValueError(
                    f"reward {name} returned None for some answers to row {answers[begin].number} "
                    "of the data and numbers for others, which would shift their mean: it must "
                    "judge all answers to a prompt, or none"
                )

    def _named(self, name: str, base: Path) -> Function:
        if name.startswith(FORMAT):
            try:
                pattern = re.compile(name.removeprefix(FORMAT), re.DOTALL)
            except re.error as error:
                raise ValueError(f"grpo.rewards: {name} is no pattern: {error}") from error
            return lambda answers: [float(bool(pattern.fullmatch(each.text))) for each in answers]
        if ".py:" in name:
            return self._of_file(name, base)
        part = _PART_OF.get(name)
        metric = metric_named(part or name)
        if not part and (name in _PART_OF.values() or _is_of_sets(metric)):
            raise ValueError(
                f"grpo.rewards: {name} gives no single number of an answer: use another, such as "
                "exact_match or box_iou"
            )

        def of_answer(answer: SampledAnswer) -> float:
            if not answer.references:
                raise ValueError("the row has no right answer to compare with")
            scored = Scored(conclusion(answer.text), answer.references, answer.row)
            return metric.own(scored)[name]

        return lambda answers: [of_answer(each) for each in answers]

    def _of_file(self, name: str, base: Path) -> Function:
        file, _, own = name.rpartition(":")
        path = base / file
        if not path.is_file():
            raise ValueError(f"grpo.rewards: {name}: there is no file {path}: check the path")
        found = run_path(str(path)).get(own)
        if not callable(found):
            raise ValueError(f"grpo.rewards: {path} has no function {own!r}: check the name")
        if inspect.iscoroutinefunction(found):
            raise ValueError(f"grpo.rewards: {name} is async: write it as a plain function")
        return partial(self._called, found)

    def _called(self, function: Callable[..., Any], answers: Sequence[SampledAnswer]) -> Any:
        columns = {key: None for answer in answers for key in answer.row}
        given: dict[str, Any] = {
            **{key: [answer.row.get(key) for answer in answers] for key in columns},
            "prompts": [[*answer.prompt] for answer in answers],
            "completions": [[{"role": "assistant", "content": a.text}] for a in answers],
            "completion_ids": [[*answer.ids] for answer in answers],
            "trainer_state": self._state,
            "log_metric": self.logged.__setitem__,
            "log_extra": self.columns.__setitem__,
        }
        parameters = inspect.signature(function).parameters.values()
        if not any(each.kind is each.VAR_KEYWORD for each in parameters):
            names = {each.name for each in parameters}
            given = {key: value for key, value in given.items() if key in names}
        return function(**given)
