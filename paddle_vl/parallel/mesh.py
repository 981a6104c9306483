"""The ranks along every axis of a run: pure functions of its degrees, without processes.

Ranks are numbered with mp innermost, then sharding, pp and dp. Experts fold over the ranks of a
pipeline stage in that order, without dp first: `ep_degree` ranks that follow each other share the
experts. So an ep group lies within sharding x mp, or, if it is larger, spans these and ranks of dp.
Ranks with the same experts take different token rows, and sum their gradients:

| axis | ranks |
| --- | --- |
| `ep` | have all experts between them, and exchange token rows |
| `expert_sharding` | have the same experts, and shard their optimizer state (and what else \
`sharding_stage` shards); a single rank without sharding, and if ep spans sharding x mp |
| `expert_dp` | have the same experts and the same shard of them |
"""

from typing import Protocol

import numpy as np


class Degrees(Protocol):
    """Degrees of the axes; see `paddle_vl.parallel.degrees.ParallelDegrees`."""

    dp_degree: int
    pp_degree: int
    sharding_degree: int
    mp_degree: int
    ep_degree: int


# From the outermost axis to the innermost.
_ORDER = ("dp", "pp", "sharding", "mp")


def experts_fold(ep: int, dp: int, inner: int) -> bool:
    """Whether ep ranks that follow each other are a part of, or several, sharding x mp blocks.

    Args:
        dp: their number in the run.
        inner: sharding x mp, the ranks of such a block.
    """
    return inner % ep == 0 or (ep % inner == 0 and dp % (ep // inner) == 0)


def expert_shards(degrees: Degrees) -> int:
    """Number of ranks that shard the optimizer state of the same experts."""
    inner = degrees.sharding_degree * degrees.mp_degree
    return max(inner // degrees.ep_degree, 1) if degrees.sharding_degree > 1 else 1


def dp_ranks_of_model(degrees: Degrees) -> int:
    """Number of dp ranks that have all experts between them."""
    return max(degrees.ep_degree // (degrees.sharding_degree * degrees.mp_degree), 1)


def groups_of_axes(degrees: Degrees) -> dict[str, np.ndarray]:
    """The groups of every axis by its name, `[groups, ranks]`: each rank is in one of them."""
    shape = [getattr(degrees, f"{axis}_degree") for axis in _ORDER]
    ranks = np.arange(np.prod(shape)).reshape(shape)
    groups: dict[str, np.ndarray] = {
        axis: np.moveaxis(ranks, at, -1) for at, axis in enumerate(_ORDER)
    }
    # Replicas of a stage's experts, the ranks that shard them together, experts.
    folded = ranks.swapaxes(0, 1).reshape(
        [degrees.pp_degree, -1, expert_shards(degrees), degrees.ep_degree]
    )
    groups["ep"] = folded
    groups["expert_sharding"] = np.moveaxis(folded, 2, -1)
    groups["expert_dp"] = np.moveaxis(folded, 1, -1)
    return {axis: lines.reshape([-1, lines.shape[-1]]) for axis, lines in groups.items()}


def mesh(degrees: Degrees, rank: int) -> dict[str, list[int]]:
    """The ranks of a rank's group on every axis, itself included."""
    return {
        axis: groups[np.argwhere(groups == rank)[0, 0]].tolist()
        for axis, groups in groups_of_axes(degrees).items()
    }
