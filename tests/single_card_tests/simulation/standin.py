"""A simulated robot without a simulator, with the contract of an `Environment`: a point of four
values, and a goal that the image shows; and an expert, who sees the goal."""

import numpy as np

from paddle_vl.simulation.environment import Observation, Outcome

STEPS_PER_ACTION = 4


class PointRobot:
    """Success is within 0.1 of the goal; an action moves by a hundredth of it in each step."""

    prompt, task, fps, max_steps = "Reach the goal", "point", 20, 200
    state_dim, action_dim = 4, 4

    def __init__(self, task="point", image_size=28, hides_goal=False):
        self.image_size = image_size
        self.closed = False

    def reset(self, seed):
        self.goal = np.random.default_rng(seed).uniform(-0.5, 0.5, 4)
        self.place, self.num_steps = np.zeros(4), 0
        return self._observation()

    def step(self, action):
        assert not self._is_over(), "no action after the episode's end"
        before = self.num_steps
        for _ in range(STEPS_PER_ACTION):
            self.place = self.place + 0.01 * np.clip(action, -1, 1)
            self.num_steps += 1
            if self._is_over():
                break
        taken = self.num_steps - before
        return Outcome(self._observation(), self._is_success(), self._is_over(), taken)

    def expert_action(self):
        return np.clip(10 * (self.goal - self.place), -1, 1).astype(np.float32)

    def close(self):
        self.closed = True

    def _is_over(self):
        return self._is_success() or self.num_steps == self.max_steps

    def _is_success(self):
        return bool(np.abs(self.goal - self.place).max() < 0.1)

    def _observation(self):
        image = np.zeros((self.image_size, self.image_size, 3), dtype=np.uint8)
        image[:4, 0, 0] = np.rint((self.goal + 0.5) * 255)
        return Observation(image, self.place.astype(np.float32))
