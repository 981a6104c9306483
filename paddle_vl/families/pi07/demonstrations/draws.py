"""What is drawn for a sample: a function of seed, epoch and sample number.

So a sample has the same draws whatever batch, process or worker it comes to. Every purpose has its
own stream, so that settings of one do not change what is drawn for another.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np


class Stream(IntEnum):
    """What random numbers are for."""

    DROPS = 0
    FLOW = 1
    CONTENT = 2


def sample_rng(seed: int, stream: Stream, *place: int) -> np.random.Generator:
    """The random numbers of one sample for one purpose.

    Args:
        place: epoch and sample number, or what else tells samples apart.
    """
    # A spawn key, since entropy [seed, epoch] equals [seed, epoch, 0], which the order of samples
    # is drawn from.
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(stream, *place)))


@dataclass(frozen=True)
class FlowDraws:
    """What the flow loss draws for a sample.

    Attributes:
        chunk_size, max_action_dim: of the noise, those of the model's actions.
        max_delay: the most actions that may be settled already.
    """

    chunk_size: int
    max_action_dim: int
    max_delay: int = 0

    def draw(self, rng: np.random.Generator) -> dict[str, np.ndarray | np.generic]:
        """`noise` `[C, max_action_dim]` float32 normal; `time` float32, 0.001 + 0.999 Beta(1.5, 1)
        by the inverse of its distribution; `delay` int64, uniform from 0 to `max_delay`.
        """
        time = rng.random() ** (1 / 1.5) * 0.999 + 0.001
        delay = rng.integers(0, self.max_delay, endpoint=True)
        shape = (self.chunk_size, self.max_action_dim)
        return {
            "noise": rng.standard_normal(shape, dtype=np.float32),
            "time": np.float32(time),
            "delay": np.int64(delay),
        }
