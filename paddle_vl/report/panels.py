"""Panels of a report: their series, titles and units, derived from the keys of metrics.

A metric `X` shares a panel with its evaluation `eval_X`, its components `X/NAME` and its statistics
over ranks, experts or samples, `X_min`, `X_mean`, `X_max`; a sum `X_sum`, of another scale, has its
own. An unknown metric has its own panel in the last section. A series (training, evaluation, a part
of the model, a source of data) has one look in all panels.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, count

from paddle_vl.report.runs import SKIPPED_UPDATES, Run, Series
from paddle_vl.train.reporting.run_files import EVAL_PREFIX, GROUPS, LOSS, group_of

STATISTIC = re.compile(r"(.+?)[_/](min|mean|max|median|std|p\d+)")
_SCHEDULE = "learning_rate"
# Units in a key, which the axis shows; `_per_second` is part of the metric.
_UNIT_SUFFIX = re.compile(r"(?<!_per)_(gb|gib|mb|mib|bytes|ms)$")
_LONGEST_NAME = 100
# Titles that the words of a key do not give.
_TITLES = {
    "CE": "Cross entropy (CE)",
    "action_mae": "Mean absolute error of actions",
    "action_rmse": "Root mean squared error of actions",
    "MSE": "Mean squared error (MSE)",
    "mfu": "Model FLOP utilization (MFU)",
    "hfu": "Hardware FLOP utilization (HFU)",
    "rank_sequence_length": "Mean sequence length",
    "rank_sequence_length_sum": "Mean sequence length",
    "tokens_per_step_sum": "Tokens per step",
}
# What a number of several ranks is, see `paddle_vl.train.reporting.metrics`.
_OF_RANKS = {
    "samples_per_second": "all ranks",
    "tokens_per_second": "all ranks",
    "tokens_per_step": "per rank",
    "tokens_per_step_sum": "all ranks",
    "rank_sequence_length": "per rank",
    "rank_sequence_length_sum": "sum of the ranks",
    "token_imbalance": "fullest rank",
    "data_wait_seconds": "slowest rank",
    "memory_gb": "fullest rank",
    "step_seconds": "over the ranks",
}
# Those that say nothing new of one rank.
_REPEATED = ("per rank", "sum of the ranks")
_STATISTICS = {"min": "lowest", "max": "highest", "std": "standard deviation"}
_SECONDS = re.compile(r"(?<!_per)_seconds$")
# Unit by the words in a key; the first match is taken.
_UNITS = (
    (r"^[A-Z]+$", "mean, before its weight"), (r"^learning_rate", "learning rate"),
    (r"^action_", "units of the data"),
    (r"perplexity", "exp of the loss"), (r"grad_norm", "global norm before clipping"),
    (r"^epochs?$", "passes over the data"), (r"mfu", "share of the device's peak FLOP/s"),
    (r"imbalance", "most over mean"), (r"efficiency|share|fraction|ratio", "share"),
    (r"_gb$|_gb_", "GB"), (r"_gib$|_gib_", "GiB"), (r"_mb$|_mb_", "MB"), (r"_mib$|_mib_", "MiB"),
    (r"bytes", "bytes"), (r"_ms$", "ms"), (r"seconds", "s"), (r"updates$", "updates"),
    (r"samples$", "samples"), (r"documents$", "documents"),
    (r"token|sequence_length|length", "tokens"),
)  # fmt: skip


@dataclass(frozen=True)
class Curve:
    """One series in a panel.

    Attributes:
        run: index of the run.
        label: name within the panel; empty if the panel's title suffices.
        statistic: `min`, `mean`, ... if the key ends with it.
        look: number of its colour or line style; statistics of one metric share it.
    """

    run: int
    key: str
    label: str
    is_eval: bool
    statistic: str | None
    look: int
    series: Series

    @property
    def is_noisy(self) -> bool:
        """Whether smoothing helps: not for evaluations, schedules and counters."""
        is_counter = self.series.numbers == sorted(self.series.numbers)
        return not (self.is_eval or is_counter or self.key.startswith(_SCHEDULE))

    @property
    def is_sparse(self) -> bool:
        """Whether its points are marked."""
        return self.is_eval or len(self.series.steps) < 30


@dataclass(frozen=True)
class Panel:
    """Curves over one pair of axes.

    Attributes:
        name: unique name of letters, digits, `_` and `-`; name of its PNG file.
        unit: label of the vertical axis.
        is_loss: whether it is a loss, which falls by orders of magnitude.
        is_repeated: whether another panel has the same numbers, as means over one rank.
    """

    name: str
    section: str
    title: str
    unit: str
    is_loss: bool
    is_repeated: bool
    curves: list[Curve]

    @property
    def is_log(self) -> bool:
        """Whether the vertical axis is logarithmic at first."""
        return self.is_loss and min(min(curve.series.numbers) for curve in self.curves) > 0

    @property
    def is_folded(self) -> bool:
        """Whether there is nothing to see: every curve is flat at zero, or told elsewhere."""
        is_zero = not any(value for curve in self.curves for value in curve.series.values)
        return is_zero or self.is_repeated

    @property
    def tells_skipped(self) -> bool:
        """Whether skipped updates are marked, as in losses and gradient norms."""
        return self.is_loss or "grad_norm" in self.keys or SKIPPED_UPDATES in self.keys

    @property
    def keys(self) -> list[str]:
        return list(dict.fromkeys(curve.key for curve in self.curves))


@dataclass(frozen=True)
class _Parsed:
    base: str
    component: str | None
    statistic: str | None
    is_eval: bool

    @property
    def series(self) -> str | bool:
        """Has one look in all panels: a component, training or evaluation."""
        return self.component or self.is_eval


def panels_of(runs: Sequence[Run]) -> list[Panel]:
    """Panels with all series of all runs, ordered by section."""
    parsed = {key: _parsed(key) for key in dict.fromkeys(key for run in runs for key in run.series)}
    # The first two are of training and evaluation.
    looks = [*dict.fromkeys([False, True, *(one.series for one in parsed.values())])]
    has_terms = any(one.base.isupper() for one in parsed.values())
    ranks = [start.get("num_processes") or 1 for run in runs for start in run.starts]
    has_one_rank = max(ranks, default=2) == 1
    panels: list[Panel] = []
    for base in dict.fromkeys(one.base for one in parsed.values()):
        members = {key: one for key, one in parsed.items() if one.base == base}
        is_evaluated = any(one.is_eval for one in members.values())
        is_divided = any(one.component for one in members.values())
        group, title, of_ranks = group_of(base), _title(base), _OF_RANKS.get(base)
        is_repeated = has_one_rank and of_ranks in _REPEATED
        if of_ranks and (is_repeated or not has_one_rank):
            title = f"{title} ({of_ranks})"
        curves = [
            Curve(
                place,
                key,
                _label(one, is_evaluated, is_divided),
                one.is_eval,
                one.statistic,
                looks.index(one.series),
                run.series[key],
            )
            for key, one in members.items()
            for place, run in enumerate(runs)
            if key in run.series
        ]
        # Evaluated metrics are shown beside the evaluation loss.
        section = (LOSS if is_evaluated else group).title
        name, unit = _name(base, [panel.name.lower() for panel in panels]), _unit(base, has_terms)
        panels.append(Panel(name, section, title, unit, group == LOSS, is_repeated, curves))
    order = list(dict.fromkeys(group.title for group in GROUPS))
    # The loss before its terms, the learning rate before the gradient norm.
    first = ("loss", _SCHEDULE)
    return sorted(panels, key=lambda p: (order.index(p.section), p.name not in first))


def _parsed(key: str) -> _Parsed:
    is_eval = key.startswith(EVAL_PREFIX) and key != EVAL_PREFIX
    base = key.removeprefix(EVAL_PREFIX) if is_eval else key
    statistic = None
    if match := STATISTIC.fullmatch(base):
        base, statistic = match.groups()
    base, _, component = base.partition("/")
    return _Parsed(base or key, component or None, statistic, is_eval)


def _name(base: str, taken: Sequence[str]) -> str:
    """A file name unlike those taken, on case-insensitive file systems too."""
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", base).strip("-")[:_LONGEST_NAME] or "metric"
    names = chain([plain], (f"{plain}-{number}" for number in count(2)))
    return next(name for name in names if name.lower() not in taken)


def _title(base: str) -> str:
    if base in _TITLES or base.isupper():
        return _TITLES.get(base, base)
    words = (
        _SECONDS.sub("_time", _UNIT_SUFFIX.sub("", base))
        .replace("_", " ")
        .replace("grad ", "gradient ")
    )
    return words[:1].upper() + words[1:]


def _unit(base: str, has_terms: bool) -> str:
    if base == "loss":
        return "weighted sum of its terms" if has_terms else "nats per target token"
    if "_per_second" in base:
        return f"{base.partition('_per_second')[0].replace('_', ' ')} per second"
    return next((unit for words, unit in _UNITS if re.search(words, base)), base.replace("_", " "))


def _label(parts: _Parsed, is_evaluated: bool, is_divided: bool) -> str:
    if parts.base == "step_seconds":
        return "slowest" if parts.statistic == "max" else "mean"
    component = parts.component
    if is_divided and component is None and not is_evaluated:
        component = "all other parts" if parts.base == _SCHEDULE else "all"
    statistic = _STATISTICS.get(parts.statistic or "", parts.statistic)
    words = [component, re.sub(r"^p(\d+)$", r"\1th percentile", statistic or "")]
    if is_evaluated:
        words = ["evaluation" if parts.is_eval else "training", *words]
    return " ".join(word for word in words if word)
