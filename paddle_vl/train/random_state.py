"""Random numbers that depend on a run's seed, the step and the process only.

Nothing of a generator has to be saved: a run that continues at a step draws what it would have.
"""

import random

import numpy as np
import paddle

from paddle_vl.train.processes import ONE_PROCESS, SingleProcess


def seed_everything(seed: int) -> None:
    """Start the generators of Python, NumPy and Paddle from one seed."""
    random.seed(seed)
    np.random.seed(seed)
    paddle.seed(seed)


def seed_step(seed: int, step: int, processes: SingleProcess = ONE_PROCESS) -> None:
    """Start all generators anew for a step.

    Processes that take different samples or have other layers draw different numbers, those of a
    model-parallel group the same ones, but for what they split: see
    `paddle_vl.parallel.random_state`.
    """
    entropy = [seed, step, *processes.random_place]
    seed_everything(int(np.random.SeedSequence(entropy).generate_state(1)[0]))
    processes.seed_split_random(entropy)
