"""Rolls a policy out in an environment: episodes side by side, and how many succeed.

NumPy only; the policy decides what it computes with.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from paddle_vl.families.policy.acting import ActingPolicy
from paddle_vl.families.policy.images import cameras_of
from paddle_vl.simulation.environment import Environment, Observation

# What a control takes away from the policy.
Blank = Literal["prompt", "images"]
# Steps of the simulator within which successes are counted apart.
_LIMITS = (60, 100, 200)


@dataclass
class RolledEpisode:
    """One episode.

    Attributes:
        seed: of the environment and of the policy's noise.
        num_steps: of the simulator, until success or the end.
        images: `[H, W, 3]` uint8, the first, then one after each action; of shown episodes only.
    """

    seed: int
    is_success: bool = False
    num_steps: int = 0
    num_actions: int = 0
    images: list[np.ndarray] = field(default_factory=list)


def roll_out(
    policy: ActingPolicy,
    environments: Sequence[Environment],
    seeds: Sequence[int],
    blank: Sequence[Blank] = (),
    num_shown: int = 0,
) -> Iterator[RolledEpisode]:
    """The episodes of the seeds, in their order.

    Each depends on its own seed only, up to rounding: not on the number of environments.

    Args:
        policy: of one camera; see `check_policy`.
        environments: equal ones, each for one episode at a time.
        blank: give the policy an empty prompt, or black images.
        num_shown: how many of the first episodes keep their images.
    """
    check_policy(policy, environments[0])
    for first in range(0, len(seeds), len(environments)):
        group = [RolledEpisode(seed) for seed in seeds[first : first + len(environments)]]
        _act(policy, environments, group, blank, max(0, num_shown - first))
        yield from group


def check_policy(policy: ActingPolicy, environment: Environment) -> None:
    """Refuse a policy for another robot.

    Raises:
        ValueError: it has several cameras, or other dims of state or actions.
    """
    config = policy.config
    found = {
        "cameras": len(cameras_of(config.input_features)),
        "values of the state": config.input_features["state"].shape[0],
        "values of an action": config.output_features["actions"].shape[0],
    }
    needed = dict(zip(found, (1, environment.state_dim, environment.action_dim), strict=True))
    if wrong := [
        f"{found[name]} {name}, not {needed[name]}" for name in found if found[name] != needed[name]
    ]:
        raise ValueError(
            f"the policy has {', '.join(wrong)}: it needs demonstrations of this environment, see "
            "tools/make_metaworld_demos.py"
        )


def _act(
    policy: ActingPolicy,
    environments: Sequence[Environment],
    episodes: Sequence[RolledEpisode],
    blank: Sequence[Blank],
    num_shown: int,
) -> None:
    """Run one episode in each of the first environments until all are over."""
    pairs = list(zip(episodes, environments, strict=False))
    observations = [environment.reset(episode.seed) for episode, environment in pairs]
    draws = [np.random.default_rng(episode.seed) for episode in episodes]
    config = policy.config
    noise_shape = (config.chunk_size, config.max_action_dim)
    for episode, observation in zip(episodes[:num_shown], observations, strict=False):
        episode.images.append(observation.image)
    prompt = "" if "prompt" in blank else environments[0].prompt
    policy.reset()
    active = set(range(len(episodes)))
    while active:
        batch = _batch(config, observations, prompt, "images" in blank)
        noise_BCA = np.stack([rng.standard_normal(noise_shape, np.float32) for rng in draws])
        actions_BA = policy.select_action(batch, noise_BCA)
        # Episodes that are over keep their place in the batch, with their last observation.
        for place in sorted(active):
            episode, environment = pairs[place]
            outcome = environment.step(actions_BA[place])
            observations[place] = outcome.observation
            episode.num_actions += 1
            episode.num_steps += outcome.num_steps
            episode.is_success = outcome.is_success
            if place < num_shown:
                episode.images.append(outcome.observation.image)
            if outcome.is_over:
                active.remove(place)


def _batch(
    config: Any, observations: Sequence[Observation], prompt: str, is_black: bool
) -> dict[str, Any]:
    """The policy's raw observation of all episodes."""
    images_BHWC = np.stack([each.image for each in observations]).astype(np.float32) / 255
    camera = cameras_of(config.input_features)[0]
    return {
        "state": np.stack([each.state for each in observations]),
        camera: images_BHWC.transpose(0, 3, 1, 2) * (0 if is_black else 1),
        "prompt": [prompt] * len(observations),
    }


def wilson_interval(num_successes: int, num_episodes: int) -> tuple[float, float]:
    """The 95 % interval of a success rate, by Wilson's score."""
    from scipy.stats import binomtest

    low, high = binomtest(num_successes, num_episodes).proportion_ci(0.95, method="wilson")
    return float(low), float(high)


def summary(episodes: Sequence[RolledEpisode]) -> dict[str, Any]:
    """Success rate with its interval, and how soon episodes succeed, for a report.

    A policy that wanders reaches many goals in the end, one that sees them at once: so the rates
    within fewer steps of the simulator are there too.
    """
    steps = [episode.num_steps for episode in episodes if episode.is_success]
    within = {limit: sum(taken <= limit for taken in steps) / len(episodes) for limit in _LIMITS}
    return {
        "num_episodes": len(episodes),
        "num_successes": len(steps),
        "success_rate": len(steps) / len(episodes),
        "interval_95": list(wilson_interval(len(steps), len(episodes))),
        "success_rate_within": within,
        "median_steps_to_success": float(np.median(steps)) if steps else None,
    }
