"""Settings that no run can follow are refused before anything is trained, by name."""

import json
from pathlib import Path

import pytest

from paddle_vl.config.load import load_run_config
from tests.single_card_tests.train.run_kinds import (
    FEATURES,
    LANGUAGE,
    V21,
    policy_base,
    with_mixture,
    write_lora_run,
)
from tests.single_card_tests.train.tiny_policy_run import MODEL, write_tiny_policy_run
from tests.single_card_tests.train.tiny_run import write_tiny_run
from tests.single_card_tests.train.whole_runs import build

GEMMA = Path(__file__).parents[2] / "golden" / "pi07_start" / "hub_same"
EVALUATED, UNFREEZE = "data.eval=[{data}]", "model.policy.freeze_vision_encoder=false"
BEST = "train.best={metric: loss, mode: min}"
GUARD = "{metric: exact_match, max_drop: 0.1}"
GUARDED = [EVALUATED, f"train.guard={GUARD}", "train.eval_steps=1"]
ONE_EPISODE = with_mixture(datasets=[{"root": V21, "episodes": [0]}], weights=None)


def of_set(**changes: object) -> list[str]:
    """A mixture of one data set with changes."""
    return with_mixture(datasets=[{"root": "a"} | changes])


# By kind of run: settings, in which {NAME} is a file beside the run's, and what is said.
REFUSED: dict[str, list[tuple[list[str], str]]] = {
    "conversations": [
        ([BEST], "data.eval is not set"),
        (["train.eval={}"], "data.eval lists no file"),
        (["train.best={metric: loss}"], "train.best.mode is missing"),
        (["train.metric_for_best_model=loss"], "did you mean train.best.metric"),
        (["train.load_best_model_at_end=true"], "did you mean train.best.load_at_end"),
        (["train.early_stopping_patience=3"], "did you mean train.best.patience"),
        (["train.greater_is_better=true"], "did you mean train.best.mode"),
        ([EVALUATED, BEST, "train.best.patience=2"], "train.eval_steps is not set"),
        ([EVALUATED, BEST, "train.best.min_delta=0.1"], "train.best.patience is not set"),
        ([EVALUATED, "train.best={metric: anls, mode: max}"], "no evaluation of this run gives"),
        ([f"train.guard={GUARD}"], "compares exact_match of evaluations but data.eval is not set"),
        ([EVALUATED, f"train.guard={GUARD}"], r"train\.eval_steps is not set: set train\.eval_s"),
        ([*GUARDED, "train.eval={}"], r"gives eval_exact_match/SOURCE: .*\(there are none of a s"),
        ([*GUARDED, "train.guard.max_drop=-0.1"], r"max_drop is -0\.1; it must be at least 0"),
        ([*GUARDED, "train.guard.action=halt"], r"action is .halt.; it must be 'stop' or 'warn'"),
        ([EVALUATED, "train.eval={metrics: [anlz]}"], "there is no metric 'anlz'"),
        ([EVALUATED, "train.eval={metrics: [box]}"], "the reference 'red' is no box"),
        (["model.config.image_token_id=7"], "image_token_id is 7 in the model and 278 in the toke"),
        (["model.config.vision_config.patch_size=8"], "8 in the model and 4 in the image proc"),
        (["model.config.text_config.vocab_size=270"], "text_config.vocab_size is 270 but the"),
        (["data.max_pixels=1"], r"processor with data\.max_pixels 1: min_pixels 64 and"),
        (["model.config=qwen3-vl-7b"], "there is no file qwen3-vl-7b, and .*-235b"),
    ],
    "adapters": [
        (["model.pretrained=null", "model.config={}"], r"model\.pretrained is not set"),
        (["model.lora.target_modules=[q_porj]"], "'q_porj' fits none"),
        (["model.lora.rank=3"], r"model\.lora\.rank is not a setting"),
        (["model.lora.lora_alfa=3"], r"did you mean model\.lora\.lora_alpha\?"),
        (["model.lora.r=0"], r"model\.lora\.r is 0; it must be at least"),
        (["model.lora={r: 2}"], r"model\.lora\.target_modules is missing"),
        (["model.freeze=[vision, mergers, language]"], "nothing to train"),
        (["train.part_learning_rates={language: 0}"], "it must be above 0"),
        (["train.part_learning_rates={visoin: 0.1}"], r"called 'visoin'; did you mean vision\?"),
        (["train.part_learning_rates={'model.language_model.norm.*': 0.1}"], "among what is train"),
        (["train.part_learning_rates={vision: 0.1}", "train.learning_rate=0"], "which is 0"),
        (["train.unfreeze=[{at: 4, patterns: [mergers]}]"], "after 4 steps, but the run"),
        (["train.unfreeze=[{at: 1, patterns: [vision, mergers, language]}]"], "every trained"),
        (["train.unfreeze=[{at: 1, patterns: [visoin]}]"], r"called 'visoin'; did you mean vis"),
        (["train.layer_decay={mergers: 0.9}"], "'mergers' matches no parameter of a layer"),
        (["train.layer_decay={vision: 1.5}"], "it must be at most 1"),
    ],
    "policy": [
        (["train.loss_weighting={MES: 1.0}"], "MES; the losses of this policy are MSE, CE"),
        (["train.loss_weighting={MSE: 0.0, CE: 0.0}"], "a loss needs a weight above 0"),
        ([f"data.train=['{{arm-joint}}', '{LANGUAGE}']"], "either JSONL files or LeRobot dat"),
    ],
    "policy from a base": [
        ([UNFREEZE, "model.freeze=[vision]"], r"since model\.freeze \['vision'\] freezes all"),
        ([UNFREEZE, "train.loss_weighting={CE: 0.0}"], r"loss_weighting .* leaves out its loss"),
        (
            [UNFREEZE, "model.policy.train_state_action_representation_only=true"],
            "since train_state_action_representation_only is true",
        ),
        (["model.policy.max_action_dim=8"], r"max_action_dim is 8, but .*/base, .* has 6"),
        (
            ["model.lora=openpi", "model.policy.freeze_vision_encoder=true"],
            r"freezes, such as .*set model\.policy",
        ),
        (["model.lora=openpy"], "there are openpi and lerobot"),
        (["model.lora={target_modules: [expert], rank_pattern: {expertt: 2}}"], "'expertt' fits"),
        (
            ["model.lora=openpi", "model.pretrained=null", "model.config={type: pi07_low_level}"],
            "pretrained is not set",
        ),
        (["model.lora=openpi", UNFREEZE, "train.ema={decay: 0.9}"], r"set train\.ema=null"),
        (
            ["model.lora=openpi", f"model.pretrained={GEMMA}", f"model.config={json.dumps(MODEL)}"],
            "of an expert",
        ),
    ],
    "robots": [
        (with_mixture(datasets=[{}]), "has neither repo_id nor root"),
        (of_set(repo_id="b/a", revision="main"), "'main', which the folder in root has not"),
        (with_mixture(action_frequency=3.0), "did you mean data.dataset_mixture.action_freq"),
        (of_set(prompt_substitution={}), "mean data.dataset_mixture.datasets.prompt_substitutions"),
        (with_mixture(num_cams=2), "set model.policy.input_features, which lists"),
        (with_mixture(subgoal_drop_prob=0.5), "set data.drops.subgoal_drop_prob instead"),
        (of_set(video_backend="pyav"), "is .pyav.; videos are read by PyAV; remove it"),
        (with_mixture(datasets=[{"vqa": "clevr"}]), "learns from demonstrations only"),
        (with_mixture(weights=[1.0]), r"weights are \[1\.0\]: give each of the 2 datasets one"),
        (with_mixture(weights=[0.0, 0.0]), "give each of the 2 datasets one, and not 0 to all"),
        (of_set(use_delta_joint_actions=True), "delta_action_state_map {}: set both"),
        (of_set(delta_action_state_map={"x": 0}), "delta_action_state_map.*a whole number"),
        (with_mixture()[1:], "data.train and data.dataset_mixture are set"),
        ([*with_mixture(), "data.eval=[a]"], "keeps a part .* for evaluation"),
        ([*ONE_EPISODE, "train.eval_steps=1"], "eval_steps is 1, .* each of its datasets has one"),
    ],
}


@pytest.fixture(scope="module")
def run_files(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    frozen = write_tiny_policy_run(folder / "base", freeze_vision_encoder=True)
    return {
        "conversations": write_tiny_run(folder / "conversations"),
        "adapters": write_lora_run(folder / "adapters"),
        "policy": write_tiny_policy_run(folder / "policy"),
        "policy from a base": policy_base(frozen),
        "robots": write_tiny_policy_run(folder / "robots", input_features=FEATURES),
    }


@pytest.mark.parametrize(
    ("kind", "settings", "told"),
    [(kind, *row) for kind, rows in REFUSED.items() for row in rows],
)
def test_settings_that_cannot_be_are_refused(run_files, tmp_path, kind, settings, told):
    run_file = run_files[kind]
    data, arm = run_file.with_name("test.jsonl"), run_file.with_name("arm-joint.jsonl")
    given = [s.replace("{data}", str(data)).replace("{arm-joint}", str(arm)) for s in settings]
    with pytest.raises(ValueError, match=told):
        build(run_file, tmp_path, *given)


def test_a_folder_that_is_no_dataset_is_named(run_files, tmp_path):
    with pytest.raises(RuntimeError, match=r"meta/info\.json cannot be read"):
        build(run_files["policy"], tmp_path, f"data.train=[{tmp_path}]")
    # Read alone, without an episode to spare, it has no evaluation.
    assert load_run_config(run_files["robots"], ONE_EPISODE).data.dataset_mixture
