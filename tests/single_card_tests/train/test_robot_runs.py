"""Runs of a pi07 policy on LeRobot datasets."""

import json
from pathlib import Path

import numpy as np
import pytest

from paddle_vl.config.families import family_of_folder
from paddle_vl.config.load import load_run_config, save_run_config
from paddle_vl.data.lerobot.metadata import read_metadata
from paddle_vl.data.lerobot.statistics import statistics
from paddle_vl.data.loader import PrefetchLoader
from paddle_vl.families.base import EvaluationOptions
from paddle_vl.families.pi07.policy import PI07LowLevelPolicy
from paddle_vl.families.pi07.recipe import PI07Recipe
from paddle_vl.train.evaluate import mean_losses
from paddle_vl.train.step import ModelRunner
from tests.single_card_tests.families.pi07.demonstration_builders import same
from tests.single_card_tests.train.run_kinds import (
    FEATURES,
    LANGUAGE,
    with_mixture,
    write_robot_run,
)
from tests.single_card_tests.train.tiny_policy_run import (
    PLANNER,
)
from tests.single_card_tests.train.whole_runs import build
from tests.support.finished_runs import metrics_of


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    return write_robot_run(tmp_path_factory.mktemp("run"))


def trained(run_file, folder, *overrides) -> Path:
    assert build(run_file, folder, *overrides).run() is None
    return folder


def test_a_dataset_is_trained_on_and_evaluated(run_file, tmp_path):
    mapping = "{camera0: observation.images.wrist, camera1: observation.images.front}"
    overrides = [f"data.train=[{LANGUAGE}]", f"data.data_features_name_mapping={mapping}"]
    overrides += ["train.max_steps=24", "train.learning_rate=0.02", "train.save_steps=null"]
    found = metrics_of(trained(run_file, tmp_path / "out", *overrides))
    for name in ("MSE", "CE"):
        values = [line[name] for line in found]
        assert np.mean(values[-8:]) < 0.9 * np.mean(values[:4]), name
    policy = PI07LowLevelPolicy.from_pretrained(tmp_path / "out" / "final")
    wanted = statistics(read_metadata(LANGUAGE))["action"]["mean"]
    stored = policy.normalizers["normalize_targets"].tensors["buffer_actions.mean"]
    np.testing.assert_array_equal(stored, wanted.astype(np.float32)[None])
    folder = tmp_path / "out" / "final"
    evaluation = family_of_folder(folder).ask("evaluate", folder, EvaluationOptions([LANGUAGE], 8))
    runner = ModelRunner(evaluation.model, evaluation.loss, evaluation.adapter)
    assert np.isfinite(mean_losses(runner, evaluation.loader).loss)


def test_the_planner_learns_from_language_columns(run_file, tmp_path):
    planner = json.dumps(PLANNER | {"input_features": FEATURES})
    overrides = [f"data.train=[{LANGUAGE}]", f"model.config={planner}", "train.max_steps=1"]
    (found,) = metrics_of(trained(run_file, tmp_path / "out", *overrides))
    assert min(found["CE_memory"], found["CE_response"]) > 0.1


def test_ranks_draw_the_samples_of_one_device(run_file, tmp_path):
    config = load_run_config(run_file, [f"train.output_dir={tmp_path}", *with_mixture()])
    recipe = PI07Recipe(config, None)
    settings = {"shuffle": True, "drop_last": True, "seed": 5}
    one = PrefetchLoader(recipe.train_data, list, 4, **settings)
    ranks = [
        PrefetchLoader(recipe.train_data, list, 2, rank=rank, size=2, **settings) for rank in (0, 1)
    ]
    next(one)
    ranks[0].load_state_dict(one.state_dict())
    ranks[1].load_state_dict(one.state_dict())
    batch, parts = next(one), [next(rank) for rank in ranks]
    assert all(same(batch[2 * i + r], parts[r][i]) for i in (0, 1) for r in (0, 1))


@pytest.mark.parametrize("key", ["0", '"0"', "'0'", "!!int 0"])
def test_dims_are_mapped_by_whole_numbers_with_or_without_quotes(key, run_file, tmp_path):
    one = f"[{{root: a, use_delta_joint_actions: true, delta_action_state_map: {{{key}: 3}}}}]"
    config = load_run_config(
        run_file, ["data.train=[]", f"data.dataset_mixture={{datasets: {one}}}"]
    )
    assert config.data.dataset_mixture.datasets[0].delta_action_state_map == {0: 3}
    save_run_config(config, file := tmp_path / "run.yaml")
    assert load_run_config(file) == config
