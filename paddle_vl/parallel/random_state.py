"""Random numbers that differ between the ranks of an mp group.

Paddle's default generator draws the same numbers on every rank of an mp group, as replicated
tensors need (dropout of a residual stream). Draws for sharded tensors go inside `split_random`,
whose generator has another seed on every rank. Recomputation restores both generators.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import paddle
from paddle.distributed.fleet.meta_parallel.parallel_layers.random import get_rng_state_tracker

_NAME = "paddle_vl_split"


def seed_split_random(entropy: Sequence[int], mp_rank: int) -> None:
    """Seed this rank's generator from the entropy of the group's generator and the mp rank."""
    tracker = get_rng_state_tracker()
    # One number more than the default generator's entropy, so the seeds never coincide.
    seed = int(np.random.SeedSequence([*entropy, 1 + mp_rank]).generate_state(1)[0])
    if _NAME not in tracker.states_:
        tracker.add(_NAME, seed)
    with tracker.rng_state(_NAME):
        paddle.seed(seed)


def split_random() -> AbstractContextManager[None]:
    """Draw from this rank's own generator inside the block."""
    return get_rng_state_tracker().rng_state(_NAME)
