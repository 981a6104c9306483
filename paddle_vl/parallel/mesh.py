"""The ranks along every axis of a run: pure functions of its degrees, without processes.

Ranks are numbered with mp innermost, then sharding, pp and dp. Experts fold over the ranks of a
pipeline stage in this order: `ep_degree` ranks that follow each other share them. So an ep group
lies within sharding x mp, or, if it is larger, spans these and ranks of dp.
Ranks with the same experts take different token rows, and sum their gradients:

| axis | ranks |
| --- | --- |
| `ep` | have all experts between them, and exchange token rows |
| `expert_sharding` | have the same experts, and shard their optimizer state (and what else \
`sharding_stage` shards); a single rank without sharding, and if ep spans sharding x mp |
| `expert_dp` | have the same experts and the same shard of them |
| `model` | have all parameters of their stage between them, and each its rows of a table |
| `cp` | have the token rows of the same samples between them: neighbours along sharding |
| `cp_mp` | the cp groups of the ranks of an mp group |
"""

import numpy as np

from paddle_vl.nn.parameter_table import Seat
from paddle_vl.parallel.degrees import ParallelDegrees

# From the outermost axis to the innermost.
_ORDER = ("dp", "pp", "sharding", "mp")


def expert_shards(degrees: ParallelDegrees) -> int:
    """Number of ranks that shard the optimizer state of the same experts."""
    inner = degrees.sharding_degree * degrees.mp_degree
    return max(inner // degrees.ep_degree, 1) if degrees.sharding_degree > 1 else 1


def ranks_of_model(degrees: ParallelDegrees) -> int:
    """Number of ranks of a stage that have all of its parameters between them."""
    return max(degrees.sharding_degree * degrees.mp_degree, degrees.ep_degree)


def stage_seats(degrees: ParallelDegrees) -> list[Seat]:
    """What each rank of a stage has of its parameters, in the order of the ranks."""
    mp, sharding, ep = degrees.mp_degree, degrees.sharding_degree, degrees.ep_degree
    of_model, shards = ranks_of_model(degrees), expert_shards(degrees)
    return [
        Seat(
            *(rank // of_model, rank % ep, rank % mp, rank // mp % sharding, rank // ep % shards),
            table=rank % of_model,
        )
        for rank in range(degrees.dp_degree * sharding * mp)
    ]


def groups_of_axes(degrees: ParallelDegrees) -> dict[str, np.ndarray]:
    """The groups of every axis by its name, `[groups, ranks]`: each rank is in one of them."""
    shape = [degrees.degree(axis) for axis in _ORDER]
    ranks = np.arange(np.prod(shape)).reshape(shape)
    groups: dict[str, np.ndarray] = {
        axis: np.moveaxis(ranks, at, -1) for at, axis in enumerate(_ORDER)
    }
    # Replicas of a stage's experts, the ranks that shard them together, experts.
    folded = ranks.swapaxes(0, 1).reshape(
        [degrees.pp_degree, -1, expert_shards(degrees), degrees.ep_degree]
    )
    groups["ep"] = folded
    by_cp = [*shape[:2], -1, degrees.cp_degree, degrees.mp_degree]
    groups["cp"] = np.moveaxis(ranks.reshape(by_cp), 3, -1)
    groups["cp_mp"] = ranks.reshape([-1, degrees.cp_degree * degrees.mp_degree])
    groups["model"] = ranks.swapaxes(0, 1).reshape([-1, ranks_of_model(degrees)])
    groups["expert_sharding"] = np.moveaxis(folded, 2, -1)
    groups["expert_dp"] = np.moveaxis(folded, 1, -1)
    return {axis: lines.reshape([-1, lines.shape[-1]]) for axis, lines in groups.items()}


def mesh(degrees: ParallelDegrees, rank: int) -> dict[str, list[int]]:
    """The ranks of a rank's group on every axis, itself included."""
    return {
        axis: groups[np.argwhere(groups == rank)[0, 0]].tolist()
        for axis, groups in groups_of_axes(degrees).items()
    }
