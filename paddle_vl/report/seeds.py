"""Runs that differ only in their seed, as one run: means, between the least and the most."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from paddle_vl.report.panels import STATISTIC
from paddle_vl.report.runs import Run, Series
from paddle_vl.report.summary import NOT_COMPARED

_SEED = "train.seed"


def by_seed(runs: Sequence[Run]) -> list[Run]:
    """The runs, with those of equal settings but for train.seed and where they write joined."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        settings = {"folder": str(run.folder)} if run.settings is None else run.settings
        compared = {key: settings[key] for key in settings.keys() - {_SEED, *NOT_COMPARED}}
        groups.setdefault(json.dumps(compared, sort_keys=True, default=str), []).append(run)
    return [_joined(group) if len(group) > 1 else group[0] for group in groups.values()]


def _joined(runs: Sequence[Run]) -> Run:
    """A metric's mean under its key, and its band as `KEY_min` and `KEY_max`, at the steps that all
    runs have."""
    first, series = runs[0], {}
    for key in (key for key in first.series if all(key in run.series for run in runs)):
        found = [dict(run.series[key].points) for run in runs]
        steps = [step for step in found[0] if all(step in one for one in found)]
        values = [[one[step] for one in found] for step in steps]
        if not steps:
            continue
        series[key] = Series(steps, [fmean(each) for each in values])
        if not STATISTIC.fullmatch(key) and any(min(each) < max(each) for each in values):
            series[f"{key}_min"] = Series(steps, [min(each) for each in values])
            series[f"{key}_max"] = Series(steps, [max(each) for each in values])
    if not series:
        names = ", ".join(run.name for run in runs)
        raise ValueError(f"{names} have no metric at a common step: leave --seeds out")
    seeds = [(run.settings or {}).get(_SEED) for run in runs]
    return Run(
        f"{first.name} ({len(runs)} seeds)",
        Path(os.path.commonpath([run.folder for run in runs])),
        series,
        {**(first.settings or {}), _SEED: seeds},
        starts=[],
        is_torn=any(run.is_torn for run in runs),
    )
