"""Actions that were predicted and wait to be executed."""

from collections import deque

import numpy as np


class ActionQueue:
    """Holds the rest of an action chunk, and says when the next has to be predicted.

    Attributes:
        horizon: actions that are executed before the next prediction.
        max_delay: actions that may run on while the next chunk is computed; a prediction is then
            due when so many are left, and begins with them.
    """

    def __init__(self, horizon: int, max_delay: int = 0):
        self.horizon, self.max_delay = horizon, max_delay
        self._actions: deque[np.ndarray] = deque(maxlen=horizon)

    def __len__(self) -> int:
        return len(self._actions)

    @property
    def is_due(self) -> bool:
        """Whether a chunk has to be predicted before the next action."""
        return len(self._actions) <= self.max_delay

    def committed(self) -> np.ndarray | None:
        """The actions that run on, `[B, delay, A]`; None when there are none."""
        if not self._actions or not self.max_delay:
            return None
        return np.stack(list(self._actions)[-self.max_delay :], axis=1)

    def refill(self, chunk_BCA: np.ndarray, delay: int) -> None:
        """Take a chunk whose first `delay` actions are those that are already waiting."""
        self._actions.extend(chunk_BCA[:, delay : delay + self.horizon].swapaxes(0, 1))

    def pop(self) -> np.ndarray:
        """The next action, `[B, A]`."""
        return self._actions.popleft()

    def clear(self) -> None:
        """Forget what waits: a new episode begins."""
        self._actions.clear()
