"""Which layers of a model go to which part of a pipeline."""

from collections.abc import Callable, Sequence


def split_layers(
    costs: Sequence[float], parts: int, before: float = 0, after: float = 0
) -> list[range]:
    """Consecutive layers for each part: the costliest part costs as little as possible, and the
    others, as far as that leaves a choice, are as even as possible.

    Args:
        costs: of every layer; equal numbers split by count.
        before, after: what the first and the last part have to do beside their layers.

    Raises:
        ValueError: fewer layers than parts.
    """
    if len(costs) < parts:
        raise ValueError(f"{len(costs)} layers cannot fill {parts} parts: each needs one")
    ends = [0.0]
    for cost in costs:
        ends.append(ends[-1] + cost)

    def cost_of(part: int, start: int, stop: int) -> float:
        beside = (before if part == 1 else 0) + (after if part == parts else 0)
        return ends[stop] - ends[start] + beside

    most, _ = _best(len(costs), parts, lambda so_far, *place: max(so_far, cost_of(*place)))

    def squares(so_far: float, *place: int) -> float:
        cost = cost_of(*place)
        return so_far + cost**2 if cost <= most else float("inf")

    return _best(len(costs), parts, squares)[1]


def _best(
    count: int, parts: int, added: Callable[[float, int, int, int], float]
) -> tuple[float, list[range]]:
    """The split with the least value, and that value.

    Args:
        added: the value of the first parts with another one, from theirs and its number, start and
            stop.
    """
    # best[k][n]: the least value of k parts that hold the first n layers, and where the last of
    # them begins. Of equal ones the earliest beginning: the first parts keep the most micro-batches
    # in memory and should not be the long ones.
    best = [[(float("inf"), 0)] * (count + 1) for _ in range(parts + 1)]
    best[0][0] = (0.0, 0)
    for part in range(1, parts + 1):
        for stop in range(part, count - (parts - part) + 1):
            best[part][stop] = min(
                (added(best[part - 1][start][0], part, start, stop), start)
                for start in range(part - 1, stop)
            )
    bounds = [count]
    for part in range(parts, 0, -1):
        bounds.append(best[part][bounds[-1]][1])
    ranges = [range(start, stop) for start, stop in zip(bounds[::-1], bounds[-2::-1], strict=False)]
    return best[parts][count][0], ranges
