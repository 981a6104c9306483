"""What a policy needs of an environment."""

from typing import NamedTuple, Protocol

import numpy as np

# Episodes of evaluations have seeds from here on, demonstrations have smaller ones.
FIRST_UNSEEN_SEED = 1_000_000


class Observation(NamedTuple):
    """One moment.

    Attributes:
        image: `[H, W, 3]` uint8.
        state: `[S]` float32.
    """

    image: np.ndarray
    state: np.ndarray


class Outcome(NamedTuple):
    """What an action led to.

    Attributes:
        is_over: after success, or at the limit of steps.
        num_steps: steps that the simulator took.
    """

    observation: Observation
    is_success: bool
    is_over: bool
    num_steps: int


class Environment(Protocol):
    """One simulated robot with one task.

    Attributes:
        prompt: the task in words.
        fps: actions per second.
        max_steps: of the simulator in an episode.
        state_dim, action_dim: S and A.
    """

    prompt: str
    fps: int
    max_steps: int
    state_dim: int
    action_dim: int

    def reset(self, seed: int) -> Observation:
        """Begin an episode. The seed alone decides it."""
        ...

    def step(self, action: np.ndarray) -> Outcome:
        """Execute an action `[A]`, clipped to its range. Not after the episode is over."""
        ...

    def close(self) -> None:
        """Free what the environment holds."""
