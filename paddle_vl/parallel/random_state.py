"""Random numbers inside a model-parallel group.

Paddle's own generator draws the same on every rank of a group, as tensors that each rank has whole
need (dropout of a residual stream). For tensors that the ranks have parts of, draw inside
`split_random`: another generator, with another seed on every rank. Recomputation restores both.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import paddle
from paddle.distributed.fleet.meta_parallel.parallel_layers.random import get_rng_state_tracker

_NAME = "paddle_vl_split"


def seed_split_random(entropy: Sequence[int], mp_rank: int) -> None:
    """Start this rank's own generator from what the group's is started from, and the rank."""
    tracker = get_rng_state_tracker()
    # One more number than the group's generator is started from: never the same sequence.
    seed = int(np.random.SeedSequence([*entropy, 1 + mp_rank]).generate_state(1)[0])
    if _NAME not in tracker.states_:
        tracker.add(_NAME, seed)
    with tracker.rng_state(_NAME):
        paddle.seed(seed)


def split_random() -> AbstractContextManager[None]:
    """Draw from this rank's own generator while entered."""
    return get_rng_state_tracker().rng_state(_NAME)
