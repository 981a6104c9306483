"""`paddle-vl evaluate --env`: a policy's episodes in a simulator."""

import argparse
from pathlib import Path

from paddle_vl.cli.table import grouped, natural, number, switch, value

OPTIONS = grouped(
    "episodes of a policy",
    value("--env", "NAME", "let the policy act in this simulator, in place of --data",
          choices=("metaworld",)),
    value("--task", "NAME", "the simulator's task, such as reach-v3"),
    number("--episodes", "number of episodes (default 50)", 50),
    value("--seed", "N", "the first episode's number, from 0; no demonstration has the seed of an "
          "evaluation (default 0)", type=natural, default=0),
    value("--blank", "WHAT", "as a control, give the policy an empty prompt, or black images",
          choices=("prompt", "images"), nargs="+", default=[]),
    switch("--hide-goal", "leave the goal's marks out of the images"),
    number("--environments", "episodes side by side (default 5)", 5),
    value("--shown", "N", "episodes in the contact sheet and the video (default 9)",
          type=natural, default=9),
    value("--output", "DIR", "where to write numbers, contact sheet, video and a page of both"),
)  # fmt: skip


def evaluate_in_simulator(options: argparse.Namespace, folder: Path) -> int:
    """Print the success rate, and write the report.

    Raises:
        ValueError: options or policy do not fit the simulator.
        RuntimeError: the simulator is not installed.
    """
    from paddle_vl.report.rollout_page import write_rollout
    from paddle_vl.serving.policy import open_policy
    from paddle_vl.simulation.environment import FIRST_UNSEEN_SEED
    from paddle_vl.simulation.metaworld import MetaWorld
    from paddle_vl.simulation.rollout import roll_out, summary

    if options.task is None:
        raise ValueError(f"--env {options.env} needs --task, such as reach-v3")
    policy = open_policy(folder)
    side = policy.config.resize_imgs_with_padding[0]
    count = min(options.environments, options.episodes)
    environments = [MetaWorld(options.task, side, options.hide_goal) for _ in range(count)]
    first = FIRST_UNSEEN_SEED + options.seed
    seeds = range(first, first + options.episodes)
    num_shown = options.shown if options.output else 0
    episodes = list(roll_out(policy, environments, seeds, options.blank, num_shown))
    found = summary(episodes)
    low, high = found["interval_95"]
    control = f" with blank {' and '.join(options.blank)}" if options.blank else ""
    within = [f"{rate:.0%} in {steps}" for steps, rate in found["success_rate_within"].items()]
    print(
        f"{options.task}{control}: {found['num_successes']} of {found['num_episodes']} episodes "
        f"succeed, {found['success_rate']:.1%} (95 % interval {low:.1%} to {high:.1%}), in "
        f"{environments[0].max_steps} steps of the simulator; {', '.join(within)} steps"
    )
    if options.output:
        about = {
            "model": str(folder), "env": options.env, "task": options.task,
            "prompt": environments[0].prompt, "blank": options.blank,
            "hides_goal": options.hide_goal, "image_size": side,
            "n_action_steps": policy.config.n_action_steps, "num_steps": policy.config.num_steps,
        }  # fmt: skip
        files = write_rollout(Path(options.output), about, episodes, environments[0].fps)
        print(f"the report is in {files[0]}")
    for environment in environments:
        environment.close()
    return 0
