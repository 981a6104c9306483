"""Runs of a pi07 policy on LeRobot datasets.

Guarantees: a folder in data.train and a mixture train, evaluate and continue bit for bit, with
workers too; a new policy takes the statistics and groups of its datasets; OpenTau's names that have
no meaning here, and unknown ones, are refused with what to do.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from paddle_vl.config.families import family_of_folder
from paddle_vl.config.load import load_run_config, save_run_config
from paddle_vl.data.lerobot.metadata import read_metadata
from paddle_vl.data.lerobot.statistics import statistics
from paddle_vl.data.loader import PrefetchLoader
from paddle_vl.families.base import EvaluationOptions
from paddle_vl.families.pi07.policy import PI07LowLevelPolicy
from paddle_vl.families.pi07.recipe import PI07Recipe
from paddle_vl.train.build import build_trainer
from paddle_vl.train.evaluate import mean_losses
from paddle_vl.train.step import ModelRunner
from tests.single_card_tests.families.pi07.demonstration_builders import same
from tests.single_card_tests.train.tiny_policy_run import (
    MODEL,
    PLANNER,
    write_tiny_policy_run,
)
from tests.support.finished_runs import metrics_of

DATA = Path(__file__).parents[2] / "data" / "lerobot"
LANGUAGE, V21 = str(DATA / "v30_l06_language"), str(DATA / "v21_video")
FEATURES = MODEL["input_features"] | {"state": {"type": "STATE", "shape": [4]}}
MIXTURE = {
    "datasets": [{"root": LANGUAGE, "control_mode": "ee"}, {"root": V21, "excluded_episodes": [5]}],
    "weights": [2.0, 1.0],
    "action_freq": 10.0,
    "val_split_ratio": 0.3,
}


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    return write_tiny_policy_run(tmp_path_factory.mktemp("run"), input_features=FEATURES)


def with_mixture(**changes) -> list[str]:
    return ["data.train=[]", f"data.dataset_mixture={json.dumps(MIXTURE | changes)}"]


def trained(run_file, folder, *overrides) -> Path:
    config = load_run_config(run_file, [f"train.output_dir={folder}", *overrides])
    assert build_trainer(config).run() is None
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


def test_a_mixture_continues_bit_for_bit(run_file, tmp_path):
    settings = [*with_mixture(), "train.eval_steps=2", "train.save_steps=2"]
    whole = trained(run_file, tmp_path / "whole", *settings)
    found = metrics_of(whole)
    assert sum("eval_MSE" in line for line in found) == 2
    policy = PI07LowLevelPolicy.from_pretrained(whole / "final")
    assert policy.config.dataset_names == ["sawyer::ee", V21]
    again = tmp_path / "again"
    again.mkdir()
    shutil.copytree(whole / "checkpoint-2", again / "checkpoint-2")
    resumed = [*settings, "train.resume_from_checkpoint=auto", "data.num_workers=1"]
    trained(run_file, again, *resumed)
    weights = [load_file(folder / "final" / "model.safetensors") for folder in (whole, again)]
    for name, value in weights[0].items():
        np.testing.assert_array_equal(value, weights[1][name], err_msg=name)
    changed = with_mixture(weights=[1.0, 1.0])
    with pytest.raises(ValueError, match=r"data\.dataset_mixture"):
        trained(run_file, again, *changed, *settings[2:], "train.resume_from_checkpoint=auto")


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


WRONG = {
    "datasets: neither": (with_mixture(datasets=[{}]), "has neither repo_id nor root"),
    "a revision of a folder": (
        with_mixture(datasets=[{"root": "a", "repo_id": "b/a", "revision": "main"}]),
        r"datasets\[0\] has revision 'main', which the folder in root has not",
    ),
    "unknown": (
        with_mixture(action_frequency=3.0),
        "did you mean data.dataset_mixture.action_freq",
    ),
    "unknown of a dataset": (
        with_mixture(datasets=[{"root": "a", "prompt_substitution": {}}]),
        "did you mean data.dataset_mixture.datasets.prompt_substitutions",
    ),
    "of the policy": (with_mixture(num_cams=2), "set model.policy.input_features, which lists"),
    "of the drops": (
        with_mixture(subgoal_drop_prob=0.5),
        "set data.drops.subgoal_drop_prob instead",
    ),
    "without meaning": (
        with_mixture(datasets=[{"root": "a", "video_backend": "pyav"}]),
        "datasets.0.*video_backend is .pyav.; videos are read by PyAV; remove it",
    ),
    "questions": (with_mixture(datasets=[{"vqa": "clevr"}]), "learns from demonstrations only"),
    "weights": (
        with_mixture(weights=[1.0]),
        r"weights are \[1\.0\]: give each of the 2 datasets one",
    ),
    "no weight": (
        with_mixture(weights=[0.0, 0.0]),
        "give each of the 2 datasets one, and not 0 to all",
    ),
    "deltas": (
        with_mixture(datasets=[{"root": "a", "use_delta_joint_actions": True}]),
        "use_delta_joint_actions True and delta_action_state_map {}: set both",
    ),
    "deltas by name": (
        with_mixture(datasets=[{"root": "a", "delta_action_state_map": {"x": 0}}]),
        "delta_action_state_map.*it must be a whole number",
    ),
    "twice": (with_mixture()[1:], "data.train and data.dataset_mixture are set"),
    "two evaluations": ([*with_mixture(), "data.eval=[a]"], "keeps a part .* for evaluation"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_settings_that_cannot_be_meant_are_refused(run_file, fault):
    overrides, message = WRONG[fault]
    with pytest.raises(ValueError, match=message):
        load_run_config(run_file, overrides)


@pytest.mark.parametrize("key", ["0", '"0"', "'0'", "!!int 0"])
def test_dims_are_mapped_by_whole_numbers_with_or_without_quotes(key, run_file, tmp_path):
    one = f"[{{root: a, use_delta_joint_actions: true, delta_action_state_map: {{{key}: 3}}}}]"
    config = load_run_config(
        run_file, ["data.train=[]", f"data.dataset_mixture={{datasets: {one}}}"]
    )
    assert config.data.dataset_mixture.datasets[0].delta_action_state_map == {0: 3}
    save_run_config(config, file := tmp_path / "run.yaml")
    assert load_run_config(file) == config


def test_a_dataset_without_an_episode_to_spare_has_no_evaluation(run_file, tmp_path):
    one = with_mixture(datasets=[{"root": V21, "episodes": [0]}], weights=None)
    assert PI07Recipe(load_run_config(run_file, one), None).eval_data is None
    with pytest.raises(ValueError, match="eval_steps is 1, .* each of its datasets has one"):
        trained(run_file, tmp_path, *one, "train.eval_steps=1")


def test_files_and_folders_do_not_mix(run_file, tmp_path):
    file = run_file.parent / "arm-joint.jsonl"
    with pytest.raises(ValueError, match="a run reads either JSONL files or LeRobot datasets"):
        trained(run_file, tmp_path, f"data.train=[{file}, {LANGUAGE}]")
    with pytest.raises(RuntimeError, match=r"meta/info\.json cannot be read"):
        trained(run_file, tmp_path, f"data.train=[{tmp_path}]")
