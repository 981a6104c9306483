"""Errors of a policy's actions on held-out demonstrations.

Guarantees: they are those of raw actions, of real steps and dims, by dim, data set and named dims;
a run's evaluation, the evaluate command and the policy itself with the same noise agree; the report
draws the chunks; where no actions can be sampled, asking for them is refused.
"""

import json
import re

import numpy as np
import pytest

from paddle_vl.cli.main import main
from paddle_vl.config.load import load_run_config
from paddle_vl.families.pi07.policy import PI07LowLevelPolicy
from paddle_vl.families.pi07.recipe import EVALUATION_SEED, flow_draws, sample_shapes
from paddle_vl.families.policy.action_errors import ActionErrors
from paddle_vl.families.policy.demonstrations.dataset import DemonstrationsDataset
from paddle_vl.families.policy.demonstrations.sample import (
    NO_DROPS,
    DrawnDemonstrations,
    collate_demonstrations,
)
from paddle_vl.families.policy.features import PolicyFeature
from paddle_vl.families.policy.normalize import Normalizer
from paddle_vl.train.build import build_trainer
from tests.single_card_tests.train.tiny_policy_run import write_tiny_policy_run
from tests.support.finished_runs import metrics_of


def test_errors_are_of_raw_actions_of_real_steps_and_dims():
    feature = {"actions": PolicyFeature("ACTION", (3,))}
    normalizer = Normalizer(feature, {"ACTION": "MEAN_STD"}, 1, 2)
    scales = [[2.0, 4.0, 1.0], [1.0, 10.0, 1.0]]
    normalizer.set_statistics(
        [{"actions": {"mean": np.ones(3), "std": np.array(std)}} for std in scales]
    )
    # Normalized errors by sample and step; the third value pads the model's actions.
    wrong = {0: [1.0, -3.0], 1: [2.0, 100.0], 2: [0.5, 0.5]}
    batch = {
        "actions": np.zeros((3, 2, 4), np.float32),
        "actions_is_pad": np.array([[False, False], [False, True], [False, False]]),
        "real_action_dim": np.array([3, 3, 2]),
        "group_index": np.array([0, 0, 1]),
    }
    predicted = np.stack([np.tile(np.array(wrong[b])[:, None], 4) for b in range(3)])
    errors = ActionErrors(
        lambda _: predicted.astype(np.float32), normalizer, 3, ["a", "b"], {"arm": [0, 1]}
    )
    for _ in range(2):
        errors.begin()
        errors.add(batch)
    found = errors.entries(errors.sums)
    std = np.array(scales)
    of_a = np.array([1.0, 3.0, 2.0])
    for dim in range(3):
        assert found[f"action_mae/a/{dim}"] == pytest.approx(of_a.mean() * std[0, dim], rel=1e-5)
        rmse = np.sqrt((of_a**2).mean()) * std[0, dim]
        assert found[f"action_rmse/a/{dim}"] == pytest.approx(rmse, rel=1e-5)
    assert found["action_mae/a/arm"] == pytest.approx(of_a.mean() * 3.0, rel=1e-5)
    assert found["action_mae/b/1"] == pytest.approx(5.0, rel=1e-5)
    assert "action_mae/b/2" not in found
    assert [len(chunk["true"]) for chunk in errors.shown] == [2, 1, 2]
    assert [len(chunk["true"][0]) for chunk in errors.shown] == [3, 3, 2]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run, beside the settings and the held-out demonstrations."""
    run_file = write_tiny_policy_run(tmp_path_factory.mktemp("run"))
    lines = run_file.with_name("arm-joint.jsonl").read_text().splitlines(keepends=True)
    run_file.with_name("few.jsonl").write_text("".join(lines[:5]))
    settings = [f"data.eval=[{run_file.with_name('few.jsonl')}]", "train.eval_steps=2"]
    settings += ["data.action_groups={gripper: [2, 3]}", "train.per_device_eval_batch_size=1"]
    assert build_trainer(load_run_config(run_file, settings)).run() is None
    return run_file.with_name("out")


def test_a_run_the_command_and_the_policy_agree(run, capsys):
    line = metrics_of(run)[-1]
    found = {key.removeprefix("eval_"): line[key] for key in line if "action_" in key}
    assert {key.partition("/")[2] for key in found} == {"0", "1", "2", "3", "gripper"}
    policy = PI07LowLevelPolicy.from_pretrained(run / "final")
    data, shapes = run.with_name("few.jsonl"), sample_shapes(policy.config)
    source = DemonstrationsDataset([data], shapes, None)
    samples = DrawnDemonstrations(source, NO_DROPS, flow_draws(policy.config), EVALUATION_SEED)
    errors = []
    for number in range(5):
        raw = collate_demonstrations([samples[number]])
        chunk = policy.sample_actions(raw, raw["noise"])
        errors.append((chunk - raw["actions"])[~raw["action_is_pad"]])
    errors = np.concatenate(errors)
    for dim in range(4):
        wanted = np.abs(errors[:, dim]).mean(), np.sqrt((errors[:, dim] ** 2).mean())
        assert found[f"action_mae/{dim}"] == pytest.approx(wanted[0], rel=1e-3)
        assert found[f"action_rmse/{dim}"] == pytest.approx(wanted[1], rel=1e-3)
    assert found["action_mae/gripper"] == pytest.approx(np.abs(errors[:, 2:]).mean(), rel=1e-3)
    arguments = ["evaluate", str(run), "--data", str(data), "--batch-size", "1"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert f"action_mae/1: {found['action_mae/1']:.4g}" in out


def test_the_report_draws_the_chunks_of_the_last_evaluation(run, tmp_path, capsys):
    stored = json.loads((run / "actions.json").read_text())
    assert (stored["step"], len(stored["chunks"])) == (4, 4)
    assert main(["report", str(run), "--output", str(tmp_path / "report"), "--no-png"]) == 0
    page = (tmp_path / "report" / "report.html").read_text()
    assert "at step 4" in page
    # A drawing for each dim of each sample, with two curves.
    drawings = re.findall(r"<svg [^>]*>(?:<polyline [^>]*/>){2}</svg>", page)
    assert len(drawings) == 4 * 4
    assert "Mean absolute error of actions" in page
    (run / "actions.json").write_text('{"step": 4, "chunks": [{"true": 1}]}')
    assert main(["report", str(run), "--output", str(tmp_path / "again"), "--no-png"]) == 1
    assert "actions.json is not what a run writes" in capsys.readouterr().err
    (run / "actions.json").write_text(json.dumps(stored))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["data.action_errors=true", "parallel.pp_degree=2"], "samples no actions"),
        (["data.action_groups={gripper: [4]}"], "have dims 0 to 3"),
        (["data.action_groups={'3': [0]}"], "give others, no numbers"),
    ],
)
def test_what_cannot_be_measured_is_refused(run, tmp_path, settings, message):
    settings = [f"train.output_dir={tmp_path}", *settings]
    with pytest.raises(ValueError, match=message):
        build_trainer(load_run_config(run.with_name("run.yaml"), settings))
