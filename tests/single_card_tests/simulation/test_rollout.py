"""Rolling a policy out.

Guarantees: an episode depends on its seed alone, not on those beside it; it ends at success, or at
the limit; controls reach the policy; another robot's policy is refused; the interval is Wilson's;
the command prints the rate and writes numbers, sheet, video and page.
"""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from paddle_vl import PI07LowLevelPolicy
from paddle_vl.cli.main import main
from paddle_vl.families.pi07.config import PI07Config
from paddle_vl.families.policy.features import PolicyFeature
from paddle_vl.simulation import metaworld
from paddle_vl.simulation.environment import FIRST_UNSEEN_SEED
from paddle_vl.simulation.rollout import RolledEpisode, roll_out, summary, wilson_interval
from tests.single_card_tests.simulation.standin import PointRobot
from tests.single_card_tests.train.tiny_policy_run import MODEL, write_tiny_policy_run

av = pytest.importorskip("av")


class Reader:
    """Reads the goal from the image, and moves there with a little of its noise."""

    def __init__(self, cameras=1):
        features = {"state": PolicyFeature("STATE", (4,))}
        features |= {f"camera{i}": PolicyFeature("VISUAL", (3, 28, 28)) for i in range(cameras)}
        self.config = SimpleNamespace(
            input_features=features,
            output_features={"actions": PolicyFeature("ACTION", (4,))},
            chunk_size=2,
            max_action_dim=5,
        )
        self.batches = []

    def reset(self):
        self.batches.clear()

    def select_action(self, batch, noise):
        self.batches.append(batch)
        assert noise.shape == (len(batch["prompt"]), 2, 5)
        goal_B4 = batch["camera0"][:, 0, :4, 0] - 0.5
        return 10 * (goal_B4 - batch["state"]) + 0.3 * noise[:, 0, :4]


def rolled(num_environments, seeds, policy=None, **options):
    robots = [PointRobot() for _ in range(num_environments)]
    return list(roll_out(policy or Reader(), robots, seeds, **options))


def test_an_episode_depends_on_its_seed_alone():
    alone = [rolled(1, [seed])[0] for seed in range(5)]
    assert rolled(3, range(5)) == alone
    assert len({episode.num_steps for episode in alone}) > 1
    for episode in alone:
        assert episode.is_success
        assert 0 < episode.num_steps <= 4 * episode.num_actions


def test_an_episode_without_success_ends_at_the_limit_and_the_others_go_on():
    """Where the policy gets black images, or an empty prompt."""
    with pytest.raises(ValueError, match="has 2 cameras, not 1: it needs demonstrations of this"):
        rolled(1, [0], Reader(cameras=2))
    policy = Reader()
    rolled(2, range(2), policy, blank=["prompt"])
    assert {text for batch in policy.batches for text in batch["prompt"]} == {""}
    assert policy.batches[0]["camera0"].max() > 0
    found = rolled(2, range(4), policy, blank=["images"], num_shown=3)
    assert {text for batch in policy.batches for text in batch["prompt"]} == {PointRobot.prompt}
    assert not policy.batches[-1]["camera0"].any()
    assert {episode.num_steps for episode in found if not episode.is_success} == {200}
    assert [len(one.images) for one in found] == [one.num_actions + 1 for one in found[:3]] + [0]
    assert all(image.any() for image in found[0].images)


@pytest.mark.parametrize(
    ("found", "low", "high"), [(40, 0.6696, 0.8876), (0, 0.0, 0.0714), (50, 0.9286, 1.0)]
)
def test_the_interval_is_wilsons(found, low, high):
    # Of 50; from the formula in Wilson (1927), with z = 1.96.
    assert wilson_interval(found, 50) == pytest.approx((low, high), abs=1e-4)


def test_the_summary_counts_successes_within_steps():
    steps = {1: (True, 40), 2: (True, 100), 3: (True, 180), 4: (False, 500)}
    found = summary([RolledEpisode(seed, *of_seed) for seed, of_seed in steps.items()])
    assert (found["num_episodes"], found["num_successes"], found["success_rate"]) == (4, 3, 0.75)
    assert found["success_rate_within"] == {60: 0.25, 100: 0.5, 200: 0.75}
    assert found["median_steps_to_success"] == 100


@pytest.fixture(scope="module")
def saved_policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy")
    write_tiny_policy_run(folder)
    features = {name: MODEL["input_features"][name] for name in ("camera0",)}
    features["state"] = {"type": "STATE", "shape": [4]}
    config = PI07Config.from_dict(MODEL | {"n_obs_steps": 1, "input_features": features})
    zeros, ones = np.zeros(4), np.ones(4)
    statistics = {"mean": zeros, "std": ones, "min": -ones, "max": ones}
    policy = PI07LowLevelPolicy(
        config,
        folder / "processor",
        folder / "processor/action_tokenizer",
        [{"state": statistics, "actions": statistics}],
    )
    policy.save_pretrained(folder / "saved")
    return folder / "saved"


def test_the_command_prints_the_rate_and_writes_the_report(
    saved_policy, tmp_path, monkeypatch, capsys
):
    made = []
    monkeypatch.setattr(
        metaworld, "MetaWorld", lambda *given: made.append(PointRobot(*given)) or made[-1]
    )
    arguments = ["evaluate", str(saved_policy), "--env", "metaworld", "--task", "point"]
    arguments += ["--episodes", "3", "--environments", "2", "--shown", "2", "--seed", "5"]
    assert main([*arguments, "--blank", "prompt", "--output", str(tmp_path)]) == 0
    assert len(made) == 2
    assert all(robot.closed and robot.image_size == 28 for robot in made)
    written = json.loads((tmp_path / "rollout.json").read_text())
    count = written["num_successes"]
    told = f"point with blank prompt: {count} of 3 episodes succeed, {count / 3:.1%}"
    assert told in capsys.readouterr().out
    first = FIRST_UNSEEN_SEED + 5
    assert [row["seed"] for row in written["episodes"]] == [first, first + 1, first + 2]
    assert written["blank"] == ["prompt"]
    assert written["task"] == "point"
    # Frames of 28 pixels seven times as large, with a frame of 4.
    assert Image.open(tmp_path / "episodes.png").size == (8 * 204, 2 * 204)
    with av.open(str(tmp_path / "episodes.mp4")) as container:
        frames = list(container.decode(video=0))
    longest = max(math.ceil(row["steps"] / 4) for row in written["episodes"][:2])
    assert len(frames) == longest + 1
    assert (frames[0].width, frames[0].height) == (408, 204)
    page = (tmp_path / "rollout.html").read_text()
    assert page.count("data:video/mp4;base64,") == page.count("data:image/png;base64,") == 1


@pytest.mark.parametrize(
    ("rest", "code", "message"),
    [
        ([], 2, "one of the arguments --data --suite --env is required"),
        (["--data", "d", "--env", "metaworld"], 2, "not allowed with argument --data"),
        (["--env", "metaworld"], 1, "error: --env metaworld needs --task"),
        (
            ["--data", "d", "--output", "o", "--hide-goal"],
            1,
            "error: without --env no policy acts: leave --hide-goal, --output out",
        ),
        (
            ["--env", "metaworld", "--limit", "3", "--predictions", "p"],
            1,
            "error: --env takes no data: leave --limit, --predictions out",
        ),
    ],
)
def test_wrong_options_are_refused(rest, code, message, saved_policy, capsys):
    try:
        found = main(["evaluate", str(saved_policy), *rest])
    except SystemExit as stop:
        found = stop.code
    assert found == code
    assert message in capsys.readouterr().err
