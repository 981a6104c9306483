"""Random numbers that differ between the ranks of an mp group, and those of a colocated encoder.

Paddle's default generator draws the same numbers on every rank of an mp group, as replicated
tensors need (dropout of a residual stream). Draws for sharded tensors go inside `split_random`,
whose generator has another seed on every rank. A colocated encoder draws inside `encoder_random`,
and sharded tensors of it inside `encoder_split_random`. Recomputation restores all generators.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import paddle
from paddle.distributed.fleet.meta_parallel.parallel_layers.random import get_rng_state_tracker

_NAME = "paddle_vl_split"
# Generators of a colocated encoder: the same on its mp ranks, and different on them.
_ENCODER, _ENCODER_SPLIT = "paddle_vl_encoder", "paddle_vl_encoder_split"
# Distinguishes their entropy from that of data lanes.
_ENCODER_TAG = 0x656E63


def seed_split_random(entropy: Sequence[int], mp_rank: int) -> None:
    """Seed this rank's generator from the entropy of the group's generator and the mp rank."""
    # One number more than the default generator's entropy, so the seeds never coincide.
    _seed(_NAME, [*entropy, 1 + mp_rank])


def split_random() -> AbstractContextManager[None]:
    """Draw from this rank's own generator inside the block."""
    return get_rng_state_tracker().rng_state(_NAME)


def seed_encoder_random(seed: int, step: int, lane: int, place: int) -> None:
    """Seed the generators of a colocated encoder.

    Args:
        lane, place: encoder lane of this rank, and its index within the lane.
    """
    entropy = [seed, step, _ENCODER_TAG, lane]
    _seed(_ENCODER, entropy)
    _seed(_ENCODER_SPLIT, [*entropy, 1 + place])


def encoder_random() -> AbstractContextManager[None]:
    """Draw from the encoder lane's generator inside the block."""
    tracker = get_rng_state_tracker()
    return tracker.rng_state(_ENCODER) if _ENCODER in tracker.states_ else nullcontext()


def encoder_split_random() -> AbstractContextManager[None]:
    """Draw from the generator of this rank of the encoder lane inside the block."""
    return get_rng_state_tracker().rng_state(_ENCODER_SPLIT)


def _seed(name: str, entropy: Sequence[int]) -> None:
    tracker = get_rng_state_tracker()
    seed = int(np.random.SeedSequence(entropy).generate_state(1)[0])
    if name not in tracker.states_:
        tracker.add(name, seed)
    with tracker.rng_state(name):
        paddle.seed(seed)
