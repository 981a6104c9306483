"""The state of an episode when a policy acts: past observations and predicted actions.

Shapes: B batch, F frames of an observation, C steps of a chunk, A action dims.

Source: the observation buffers and the action queue of OpenTau's `select_action`.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


class ObservationHistory:
    """Keeps past observations and adds evenly spaced ones to the current one.

    Attributes:
        num_frames: frames of an observation, `n_obs_steps`, the current one last.
        interval: environment steps between two frames.
    """

    def __init__(self, num_frames: int, interval: int):
        self.num_frames, self.interval = num_frames, interval
        self._steps: deque[dict[str, np.ndarray]] = deque(maxlen=(num_frames - 1) * interval + 1)

    def clear(self) -> None:
        """Begin a new episode."""
        self._steps.clear()

    def extended(self, batch: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
        """Keep the current values and return the batch with the past frames added.

        Frames from before the episode are zero, and `obs_history_is_pad` `[B, F]` is True there.

        Args:
            batch: the current observation.
            names: entries to keep, each `[B, ...]`; they come back as `[B, F, ...]`.

        Raises:
            ValueError: an entry has another shape than before.
        """
        current = {name: np.asarray(batch[name]) for name in names}
        if self._steps:
            for name, value in current.items():
                before = self._steps[-1].get(name)
                if before is None or before.shape != value.shape:
                    was = "absent" if before is None else f"of shape {list(before.shape)}"
                    raise ValueError(
                        f"{name!r} has shape {list(value.shape)}, but was {was} a step ago: call "
                        "reset() before another environment or batch size"
                    )
        self._steps.append(current)
        assert self._steps.maxlen is not None, "__init__ limits the length"
        missing = self._steps.maxlen - len(self._steps)
        places = [i * self.interval - missing for i in range(self.num_frames)]
        result = dict(batch)
        for name, value in current.items():
            nothing = np.zeros_like(value)
            frames = [nothing if i < 0 else self._steps[i][name] for i in places]
            result[name] = np.stack(frames, axis=1)
        is_pad = np.array([i < 0 for i in places])
        batch_size = len(next(iter(current.values())))
        result["obs_history_is_pad"] = np.tile(is_pad, (batch_size, 1))
        return result


class ActionQueue:
    """The predicted actions that are not yet executed.

    Attributes:
        horizon: actions that are executed before the next prediction, `n_action_steps`.
        max_delay: actions that may run while the next chunk is computed. A prediction is due when
            no more are left, and its chunk begins with them.
    """

    def __init__(self, horizon: int, max_delay: int = 0):
        self.horizon, self.max_delay = horizon, max_delay
        self._actions: deque[np.ndarray] = deque(maxlen=horizon)

    def __len__(self) -> int:
        return len(self._actions)

    @property
    def is_due(self) -> bool:
        """Whether to predict a chunk before the next action."""
        return len(self._actions) <= self.max_delay

    def committed(self) -> np.ndarray | None:
        """The actions that run meanwhile, `[B, delay, A]`; None if there are none."""
        if not self._actions or not self.max_delay:
            return None
        return np.stack(list(self._actions)[-self.max_delay :], axis=1)

    def refill(self, chunk_BCA: np.ndarray, delay: int) -> None:
        """Add a chunk `[B, C, A]` without its first `delay` actions, which are already queued."""
        self._actions.extend(chunk_BCA[:, delay : delay + self.horizon].swapaxes(0, 1))

    def pop(self) -> np.ndarray:
        """The next action, `[B, A]`."""
        return self._actions.popleft()

    def clear(self) -> None:
        """Begin a new episode."""
        self._actions.clear()
