"""Panels of a report: their series, titles and units, derived from the keys of metrics.

A metric `X` shares a panel with its evaluation `eval_X`, its components `X/NAME` and its statistics
over ranks, experts or samples, `X_min`, `X_mean`, `X_max`; a sum `X_sum`, of another scale, has its
own. An unknown metric has its own panel in the last section.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from paddle_vl.report.runs import SKIPPED_UPDATES, Run, Series
from paddle_vl.train.reporting.run_files import EVAL_PREFIX, GROUPS, LOSS, group_of

_STATISTIC = re.compile(r"(.+?)[_/](min|mean|max|median|std|p\d+)")
_SCHEDULE = "learning_rate"
# Units in a key, which the axis shows; `_per_second` is part of the metric.
_UNIT_SUFFIX = re.compile(r"(?<!_per)_(gb|gib|mb|mib|bytes|ms)$")
_LONGEST_NAME = 100
_SECONDS = re.compile(r"(?<!_per)_seconds$")
# Unit by the words in a key; the first match is taken.
_UNITS = (
    (re.compile(r"^[A-Z]+$"), "mean, before its weight"),
    (re.compile(r"^learning_rate"), "learning rate"),
    (re.compile(r"grad_norm"), "global norm before clipping"),
    (re.compile(r"^epoch$"), "passes over the data"),
    (re.compile(r"mfu"), "share of the device's peak FLOP/s"),
    (re.compile(r"imbalance"), "most over mean"),
    (re.compile(r"efficiency|share|fraction|ratio"), "share"),
    (re.compile(r"_gb$|_gb_"), "GB"),
    (re.compile(r"_gib$|_gib_"), "GiB"),
    (re.compile(r"_mb$|_mb_"), "MB"),
    (re.compile(r"_mib$|_mib_"), "MiB"),
    (re.compile(r"bytes"), "bytes"),
    (re.compile(r"_ms$"), "ms"),
    (re.compile(r"seconds"), "s"),
    (re.compile(r"updates$"), "updates"),
    (re.compile(r"samples$"), "samples"),
    (re.compile(r"token|sequence_length|length"), "tokens"),
)


@dataclass(frozen=True)
class Curve:
    """One series in a panel.

    Attributes:
        run: index of the run.
        label: name within the panel; empty if the panel's title suffices.
        statistic: `min`, `mean`, ... if the key ends with it.
        look: number of its line style; statistics of one metric share it.
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
        values = [value for _, value in self.series.points]
        is_counter = values == sorted(values)
        return not (self.is_eval or is_counter or self.key.startswith(_SCHEDULE))


@dataclass(frozen=True)
class Panel:
    """Curves over one pair of axes.

    Attributes:
        name: unique name of letters, digits, `_` and `-`; name of its PNG file.
        unit: label of the vertical axis.
        is_loss: whether it is a loss, which falls by orders of magnitude.
    """

    name: str
    section: str
    title: str
    unit: str
    is_loss: bool
    curves: list[Curve] = field(default_factory=list)

    @property
    def is_log(self) -> bool:
        """Whether the vertical axis is logarithmic at first."""
        points = [value for curve in self.curves for _, value in curve.series.points]
        return self.is_loss and min(points) > 0

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


def panels_of(runs: Sequence[Run]) -> list[Panel]:
    """Panels with all series of all runs, ordered by section."""
    keys = list(dict.fromkeys(key for run in runs for key in run.series))
    parsed = {key: _parsed(key) for key in keys}
    evaluated = {parts.base for parts in parsed.values() if parts.is_eval}
    panels: dict[str, Panel] = {}
    looks: dict[str, list[_Parsed]] = {}
    for key, parts in parsed.items():
        if parts.base not in panels:
            has_terms = any(one.base.isupper() for one in parsed.values())
            names = [panel.name for panel in panels.values()]
            panels[parts.base] = _panel(parts.base, parts.base in evaluated, has_terms, names)
        label = _label(parts, parts.base in evaluated)
        known = looks.setdefault(parts.base, [])
        if (look := replace(parts, statistic=None)) not in known:
            known.append(look)
        panels[parts.base].curves.extend(
            Curve(
                place,
                key,
                label,
                parts.is_eval,
                parts.statistic,
                known.index(look),
                run.series[key],
            )
            for place, run in enumerate(runs)
            if key in run.series
        )
    order = list(dict.fromkeys(group.title for group in GROUPS))
    # The loss before its terms, the learning rate before the gradient norm.
    first = ("loss", _SCHEDULE)
    return sorted(panels.values(), key=lambda p: (order.index(p.section), p.name not in first))


def _parsed(key: str) -> _Parsed:
    is_eval = key.startswith(EVAL_PREFIX) and key != EVAL_PREFIX
    base = key.removeprefix(EVAL_PREFIX) if is_eval else key
    statistic = None
    if match := _STATISTIC.fullmatch(base):
        base, statistic = match.groups()
    base, _, component = base.partition("/")
    return _Parsed(base or key, component or None, statistic, is_eval)


def _panel(base: str, is_evaluated: bool, has_terms: bool, taken: Sequence[str]) -> Panel:
    group = group_of(base)
    name = plain = re.sub(r"[^A-Za-z0-9_-]+", "-", base).strip("-") or "metric"
    name = plain = plain[:_LONGEST_NAME]
    # File names must differ on case-insensitive file systems too.
    number, lower = 2, [other.lower() for other in taken]
    while name.lower() in lower:
        name, number = f"{plain}-{number}", number + 1
    # Evaluated metrics are shown beside the evaluation loss.
    section = (LOSS if is_evaluated else group).title
    return Panel(name, section, _title(base), _unit(base, has_terms), group == LOSS)


def _title(base: str) -> str:
    if base.isupper() or base in ("mfu", "hfu"):
        return base.upper()
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
    return next((unit for words, unit in _UNITS if words.search(base)), base.replace("_", " "))


def _label(parts: _Parsed, is_evaluated: bool) -> str:
    words = [parts.component, parts.statistic]
    if is_evaluated:
        words = ["evaluation" if parts.is_eval else "training", *words]
    return " ".join(word for word in words if word)
