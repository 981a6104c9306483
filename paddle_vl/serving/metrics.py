"""Counters and histograms in Prometheus' text format. Used from the event loop only."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """What a server counts.

    Args:
        help_texts: by name.
        buckets: upper ends of the buckets of each histogram; other names are counters.
    """

    def __init__(self, help_texts: Mapping[str, str], buckets: Mapping[str, Sequence[float]]):
        self._help_texts, self._buckets = help_texts, buckets
        # Counters by name and label; of histograms the place of the bucket is the label.
        self._counts: dict[str, Counter] = {name: Counter() for name in help_texts}
        self._sums: dict[str, float] = dict.fromkeys(buckets, 0.0)

    def count(self, name: str, label: str) -> None:
        """Add one to a counter under a label, such as `outcome="answered"`."""
        self._counts[name][label] += 1

    def observe(self, name: str, value: float) -> None:
        """Add a value to a histogram."""
        self._counts[name][bisect_left(self._buckets[name], value)] += 1
        self._sums[name] += value

    def text(self, gauges: Mapping[str, float]) -> str:
        """Everything counted so far, and gauges by name."""
        lines = [f"{name} {value:g}" for name, value in gauges.items()]
        for name, counts in self._counts.items():
            kind = "histogram" if name in self._buckets else "counter"
            lines += [f"# HELP {name} {self._help_texts[name]}", f"# TYPE {name} {kind}"]
            if kind == "counter":
                lines += [f"{name}{{{label}}} {value}" for label, value in sorted(counts.items())]
                continue
            total = 0
            for place, limit in enumerate([*self._buckets[name], "+Inf"]):
                total += counts[place]
                lines.append(f'{name}_bucket{{le="{limit}"}} {total}')
            lines += [f"{name}_sum {self._sums[name]:.6f}", f"{name}_count {total}"]
        return "\n".join(lines) + "\n"
