"""Counters and histograms in Prometheus' text format. Used from the event loop only."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_PREFIX = "paddle_vl"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Histogram(NamedTuple):
    """Observations per bucket; `limits` are the upper ends, and one bucket follows the last."""

    limits: Sequence[float]
    counts: list[int]
    total: list[float]


class Metrics:
    """What a server counts.

    Args:
        counters: help text by name.
        histograms: help text and upper ends of the buckets, by name.
    """

    def __init__(
        self,
        counters: Mapping[str, str],
        histograms: Mapping[str, tuple[str, Sequence[float]]],
    ):
        self._help = {**counters, **{name: text for name, (text, _) in histograms.items()}}
        self._counters: dict[str, dict[str, int]] = {name: {} for name in counters}
        self._histograms = {
            name: _Histogram(limits, [0] * (len(limits) + 1), [0.0])
            for name, (_, limits) in histograms.items()
        }

    def count(self, name: str, label: str = "") -> None:
        """Add one to a counter, under a label such as `outcome="answered"`."""
        by_label = self._counters[name]
        by_label[label] = by_label.get(label, 0) + 1

    def observe(self, name: str, value: float) -> None:
        histogram = self._histograms[name]
        histogram.counts[bisect_left(histogram.limits, value)] += 1
        histogram.total[0] += value

    def text(self, gauges: Mapping[str, float]) -> str:
        """Everything counted so far, and gauges by name."""
        lines = []
        for name, by_label in self._counters.items():
            lines += self._head(name, "counter")
            for label, value in sorted(by_label.items()):
                lines.append(f"{_PREFIX}_{name}{f'{{{label}}}' if label else ''} {value}")
        for name, (limits, counts, total) in self._histograms.items():
            lines += self._head(name, "histogram")
            so_far = 0
            for limit, count in zip([*limits, "+Inf"], counts, strict=True):
                so_far += count
                lines.append(f'{_PREFIX}_{name}_bucket{{le="{limit}"}} {so_far}')
            lines.append(f"{_PREFIX}_{name}_sum {total[0]:.6f}")
            lines.append(f"{_PREFIX}_{name}_count {so_far}")
        for name, value in gauges.items():
            lines += [f"# TYPE {_PREFIX}_{name} gauge", f"{_PREFIX}_{name} {value}"]
        return "\n".join(lines) + "\n"

    def _head(self, name: str, kind: str) -> list[str]:
        return [f"# HELP {_PREFIX}_{name} {self._help[name]}", f"# TYPE {_PREFIX}_{name} {kind}"]
