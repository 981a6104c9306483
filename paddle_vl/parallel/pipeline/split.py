"""Which layers of a model go to which part of a pipeline."""

from collections.abc import Sequence


def split_layers(
    costs: Sequence[float], parts: int, before: float = 0, after: float = 0
) -> list[range]:
    """Consecutive layers for each part, so that the costliest part costs as little as possible.

    Args:
        costs: of every layer; equal numbers split by count.
        before, after: what the first and the last part have to do beside their layers.

    Raises:
        ValueError: fewer layers than parts.
    """
    if len(costs) < parts:
        raise ValueError(f"{len(costs)} layers cannot fill {parts} parts: each needs one")
    # best[k][n]: the least possible cost of the costliest of k parts that hold the first n layers,
    # and where the last of them begins. Of equal ones the earliest beginning: the first parts keep
    # the most micro-batches in memory and should not be the long ones.
    ends = [0.0]
    for cost in costs:
        ends.append(ends[-1] + cost)
    count = len(costs)
    best = [[(float("inf"), 0)] * (count + 1) for _ in range(parts + 1)]
    best[0][0] = (0.0, 0)
    for part in range(1, parts + 1):
        for stop in range(part, count - (parts - part) + 1):
            beside = (before if part == 1 else 0) + (after if part == parts else 0)
            best[part][stop] = min(
                (max(best[part - 1][start][0], ends[stop] - ends[start] + beside), start)
                for start in range(part - 1, stop)
            )
    bounds = [count]
    for part in range(parts, 0, -1):
        bounds.append(best[part][bounds[-1]][1])
    return [range(start, stop) for start, stop in zip(bounds[::-1], bounds[-2::-1], strict=False)]
