"""Meta-World itself.

Guarantees: an episode is replayed bit for bit whatever came before it; an action lasts four steps;
experts succeed on what the policy may see; goals can be hidden; what is missing is named.
"""

import sys
from importlib.util import find_spec

import numpy as np
import pytest

from paddle_vl.simulation import metaworld
from paddle_vl.simulation.metaworld import MetaWorld, prompts


def test_an_unknown_task_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="has no task 'reach-v2'.*reach-v3"):
        MetaWorld("reach-v2", 64)


def test_a_missing_simulator_is_named_with_what_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "mujoco", None)
    with pytest.raises(RuntimeError, match=r"paddle-vl\[sim\].*libosmesa6"):
        MetaWorld("reach-v3", 64)


@pytest.mark.simulator
class TestWithASimulator:
    @pytest.fixture(autouse=True)
    def _installed(self):
        # Importing it here would choose a renderer.
        if find_spec("metaworld") is None:
            pytest.skip("metaworld is not installed")

    def played(self, environment, seed, num_actions=3):
        seen = [environment.reset(seed)]
        for _ in range(num_actions):
            seen.append(environment.step(environment.expert_action()).observation)
        return seen

    def test_an_episode_is_the_same_whatever_came_before(self):
        # Its mark stays where the last episode had it, unless it is placed again.
        environment = MetaWorld("push-v3", 64)
        first = self.played(environment, 3)
        self.played(environment, 4, num_actions=8)
        for before, after in zip(first, self.played(environment, 3), strict=True):
            assert np.array_equal(before.image, after.image)
            assert np.array_equal(before.state, after.state)
        fresh = MetaWorld("push-v3", 64)
        assert np.array_equal(fresh.reset(3).image, first[0].image)
        for one in (environment, fresh):
            one.close()

    def test_an_expert_succeeds_and_an_action_lasts_four_steps(self):
        environment = MetaWorld("reach-v3", 64)
        observation = environment.reset(0)
        assert observation.image.shape == (64, 64, 3)
        assert observation.image.dtype == np.uint8
        assert observation.state.shape == (4,)
        assert observation.state[3] == 1.0
        outcome, steps = None, []
        while outcome is None or not outcome.is_over:
            outcome = environment.step(environment.expert_action())
            steps.append(outcome.num_steps)
        assert outcome.is_success
        assert set(steps[:-1]) == {metaworld.STEPS_PER_ACTION}
        assert environment.prompt == prompts()["reach-v3"] == "Reach a goal position"
        # The goal is what the image shows, and not in what the policy sees of the state.
        hidden = MetaWorld("reach-v3", 64, hides_goal=True).reset(0)
        assert 0 < (hidden.image != observation.image).any(axis=2).sum() < 20
        assert np.array_equal(hidden.state, observation.state)

    def test_an_episode_without_success_ends_after_500_steps(self):
        environment = MetaWorld("reach-v3", 64)
        environment.reset(0)
        outcomes = [environment.step(np.zeros(4)) for _ in range(125)]
        assert [one.is_over for one in outcomes] == [False] * 124 + [True]
        assert not any(one.is_success for one in outcomes)
