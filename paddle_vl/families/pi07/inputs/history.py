"""The last observations of an environment, as one observation in time."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


class ObservationHistory:
    """Remembers observations and picks evenly spaced ones.

    Attributes:
        num_frames: observations in one, the current one the last.
        interval: environment steps between two of them.
    """

    def __init__(self, num_frames: int, interval: int):
        self.num_frames, self.interval = num_frames, interval
        self._steps: deque[dict[str, np.ndarray]] = deque(maxlen=(num_frames - 1) * interval + 1)

    def clear(self) -> None:
        """Forget everything: a new episode begins."""
        self._steps.clear()

    def extended(self, batch: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
        """Remember the current values and return the batch with those before them.

        Frames from before the episode's beginning are zero, and `obs_history_is_pad` `[B, T]` is
        True exactly there.

        Args:
            batch: the current observation.
            names: entries to remember, each `[B, ...]`; they come back as `[B, T, ...]`.

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
