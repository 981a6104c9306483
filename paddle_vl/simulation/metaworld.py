"""Meta-World's tasks as environments of a policy, with lerobot's names, prompts and camera.

The policy sees the hand (x, y, z in metres, opening of the gripper from 0 to 1) and one picture;
the rest of Meta-World's observation, such as the goal, is for the scripted experts only. An action
is a movement in x, y and z and the gripper's effort, each in [-1, 1].

As in lerobot: the camera `corner2` at another place, its pictures turned upright, and one sentence
for each task. Otherwise than in lerobot: an action is held for four steps of the simulator (20 Hz
instead of 80 Hz), pictures are small and without shadows, reflections and multisampling, and the
goal's marks are in place in the first picture of an episode. Figures are not comparable with
lerobot's.
"""

import json
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from paddle_vl.files.names import nearest
from paddle_vl.simulation.environment import Observation, Outcome

STEPS_PER_ACTION = 4
FPS = 20
CAMERA, CAMERA_PLACE = "corner2", (0.75, 0.075, 0.7)
STATE_NAMES = ("x", "y", "z", "gripper")
ACTION_NAMES = ("dx", "dy", "dz", "grip")
_NEEDED = (
    "pip install 'paddle-vl[sim]' and, to render without a display, the Debian package libosmesa6 "
    "(or MUJOCO_GL=egl with libegl1 and libgl1)"
)


@cache
def prompts() -> dict[str, str]:
    """The sentence of every task, by its name.

    Source: lerobot's `metaworld_config.json`.
    """
    return json.loads((Path(__file__).parent / "prompts.json").read_text(encoding="utf-8"))


class MetaWorld:
    """A task, as an `Environment` of `paddle_vl.simulation.environment`.

    An episode ends at its first success, or after 500 steps of the simulator.

    Attributes:
        prompt: the task's sentence.
        hides_goal: whether the goal's marks are out of sight.
    """

    fps = FPS
    state_dim, action_dim = len(STATE_NAMES), len(ACTION_NAMES)

    def __init__(self, task: str, image_size: int, hides_goal: bool = False):
        """
        Args:
            task: such as `reach-v3`.
            image_size: side of the pictures in pixels.

        Raises:
            ValueError: the task is not known.
            RuntimeError: the simulator or its renderer is not installed.
        """
        if task not in prompts():
            raise ValueError(f"Meta-World has no task {task!r}; {nearest(task, sorted(prompts()))}")
        self.task, self.prompt, self.hides_goal = task, prompts()[task], hides_goal
        self._mujoco, environments, experts = _imported()
        self._env = environments[f"{task}-goal-observable"](seed=0)
        # Every reset draws the scene, from the seed of `reset`.
        self._env._freeze_rand_vec, self._env.seeded_rand_vec = False, True
        self._expert = experts[task]()
        model = self._env.model
        model.camera(CAMERA).pos = CAMERA_PLACE
        # Read when the renderer is made.
        model.vis.quality.offsamples = 0
        try:
            self._renderer = self._mujoco.Renderer(model, image_size, image_size)
        except self._mujoco.FatalError as error:
            backend = os.environ.get("MUJOCO_GL")
            raise RuntimeError(
                f"nothing can be rendered with MUJOCO_GL {backend} ({error}): set it before "
                f"anything imports mujoco; needed are {_NEEDED}"
            ) from error
        self.max_steps = self._env.max_path_length
        self._seen = np.zeros(0)

    def reset(self, seed: int) -> Observation:
        env = self._env
        env.seed(seed)
        self._seen, _ = env.reset()
        # A reset leaves the marks of some tasks where the last episode had them.
        self._mujoco.mj_forward(env.model, env.data)
        for name, place in env._target_site_config:
            env._set_pos_site(name, place)
        self._mujoco.mj_forward(env.model, env.data)
        return self._observation()

    def step(self, action: np.ndarray) -> Outcome:
        action = np.clip(np.asarray(action, dtype=np.float64), -1.0, 1.0)
        is_success, is_over, num_steps = False, False, 0
        while num_steps < STEPS_PER_ACTION and not (is_success or is_over):
            self._seen, _, _, is_over, info = self._env.step(action)
            is_success, num_steps = bool(info["success"]), num_steps + 1
        return Outcome(self._observation(), is_success, is_success or is_over, num_steps)

    def expert_action(self) -> np.ndarray:
        """What the task's scripted expert does now, `[4]` float32 in [-1, 1]."""
        return np.clip(self._expert.get_action(self._seen), -1.0, 1.0).astype(np.float32)

    def close(self) -> None:
        """Free the renderer."""
        self._renderer.close()

    def _observation(self) -> Observation:
        renderer, flags = self._renderer, self._mujoco.mjtRndFlag
        if self.hides_goal:
            for name, _ in self._env._target_site_config:
                self._env.model.site(name).rgba[3] = 0.0
        renderer.update_scene(self._env.data, camera=CAMERA)
        # Every update sets them again.
        renderer.scene.flags[flags.mjRND_SHADOW] = renderer.scene.flags[flags.mjRND_REFLECTION] = 0
        upright_HWC = renderer.render()[::-1, ::-1]
        state = self._seen[: len(STATE_NAMES)].astype(np.float32)
        return Observation(np.ascontiguousarray(upright_HWC), state)


def _imported() -> tuple[Any, Any, Any]:
    """MuJoCo, Meta-World's classes of environments, and its experts."""
    if sys.platform == "linux":
        # Read when MuJoCo is imported. The other backends need a display or a GPU's driver.
        os.environ.setdefault("MUJOCO_GL", "osmesa")
    try:
        import mujoco
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE
        from metaworld.policies import ENV_POLICY_MAP
    except (ImportError, AttributeError) as error:
        # PyOpenGL raises AttributeError if it finds no library of the backend.
        backend = os.environ.get("MUJOCO_GL", "its default")
        raise RuntimeError(
            f"Meta-World cannot be imported with MUJOCO_GL {backend} ({error}): {_NEEDED}"
        ) from error
    return mujoco, ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE, ENV_POLICY_MAP
