"""Fleet's pipeline schedules, and the division of a model's layers over stages.

The layers are cut into model chunks, one or more per stage.

| `parallel.pp_schedule` | virtual stages | fleet's class |
| --- | --- | --- |
| 1f1b | 1 | PipelineParallel |
| 1f1b | more | PipelineParallelWithInterleave |
| fthenb | more | PipelineParallelWithInterleaveFthenB |
| balanced_memory | more | VPPFhenBInBalancedMemory |
| dualpipev | 1 (two chunks per stage) | DualPipeVParallel |
"""

from collections.abc import Callable, Sequence

from paddle_vl.parallel.degrees import ParallelDegrees


def num_chunks(degrees: ParallelDegrees) -> int:
    """The number of model chunks over all stages."""
    per_stage = 2 if degrees.pp_schedule == "dualpipev" else degrees.num_virtual_stages
    return degrees.pp_degree * per_stage


def chunks_of_stage(degrees: ParallelDegrees, stage: int) -> list[int]:
    """The numbers of a stage's chunks, ascending: round-robin, or in a V with both ends on stage 0.

    In both, neighbouring chunks are on neighbouring stages (or on the same one).
    """
    if degrees.pp_schedule == "dualpipev":
        return [stage, num_chunks(degrees) - 1 - stage]
    return list(range(stage, num_chunks(degrees), degrees.pp_degree))


def evaluated_batches(degrees: ParallelDegrees, num_batches: int) -> int:
    """The number of batches that a forward-only pass of at least `num_batches` must have."""
    stages = degrees.pp_degree
    if degrees.pp_schedule == "dualpipev":
        return max(num_batches, 2 * stages)
    if degrees.num_virtual_stages > 1:
        return -(-num_batches // stages) * stages
    return num_batches


def split_layers(
    costs: Sequence[float], chunks: int, before: float = 0, after: float = 0
) -> list[range]:
    """Consecutive layers for each chunk.

    The most expensive chunk is as cheap as possible; then the costs are as even as possible.

    Args:
        costs: of every layer; equal numbers split by count.
        before, after: extra cost of the first and of the last chunk.

    Raises:
        ValueError: fewer layers than chunks.
    """
    if len(costs) < chunks:
        raise ValueError(f"{len(costs)} layers cannot fill {chunks} model chunks: each needs one")
    ends = [0.0]
    for cost in costs:
        ends.append(ends[-1] + cost)

    def cost_of(chunk: int, start: int, stop: int) -> float:
        extra = (before if chunk == 1 else 0) + (after if chunk == chunks else 0)
        return ends[stop] - ends[start] + extra

    most, _ = _best(len(costs), chunks, lambda so_far, *place: max(so_far, cost_of(*place)))

    def squares(so_far: float, *place: int) -> float:
        cost = cost_of(*place)
        return so_far + cost**2 if cost <= most else float("inf")

    return _best(len(costs), chunks, squares)[1]


def _best(
    count: int, chunks: int, added: Callable[[float, int, int, int], float]
) -> tuple[float, list[range]]:
    """The split with the least value, and that value, by dynamic programming.

    Args:
        added: the value of the first chunks with another one, from their value and the number,
            start and stop of that one.
    """
    # best[k][n]: the least value of k chunks with the first n layers, and the start of the last
    # chunk. For equal values the earliest start: the first chunks keep the activations of the most
    # micro-batches and should be short.
    best = [[(float("inf"), 0)] * (count + 1) for _ in range(chunks + 1)]
    best[0][0] = (0.0, 0)
    for chunk in range(1, chunks + 1):
        for stop in range(chunk, count - (chunks - chunk) + 1):
            best[chunk][stop] = min(
                (added(best[chunk - 1][start][0], chunk, start, stop), start)
                for start in range(chunk - 1, stop)
            )
    bounds = [count]
    for chunk in range(chunks, 0, -1):
        bounds.append(best[chunk][bounds[-1]][1])
    ranges = [range(start, stop) for start, stop in zip(bounds[::-1], bounds[-2::-1], strict=False)]
    return best[chunks][count][0], ranges
