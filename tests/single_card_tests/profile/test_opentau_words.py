"""OpenTau's options and variables for the profiler.

Guarantees: a command line of OpenTau's profile_step.py profiles what it says, with results under
its keys and in its file; options take precedence over variables; what has no counterpart is refused
before any work, or named as without effect; in a matrix variables choose the lines.
"""

import json
import logging

import pytest

from paddle_vl.cli import profile as command
from paddle_vl.cli.main import _parse, build_parser, main
from paddle_vl.cli.opentau_words import translated
from paddle_vl.config.load import load_run_config
from paddle_vl.train.optimizer import AdamW
from tests.single_card_tests.train.tiny_policy_run import write_tiny_policy_run
from tests.single_card_tests.train.tiny_run import write_tiny_run

# Of OpenTau's profile_step.py.
KEYS = {
    "warmup", "measured", "num_processes", "distributed_type", "batch_size", "num_workers",
    "prefetch_factor", "phase_means_s", "phase_medians_s", "global_step_time_s",
    "global_samples_per_sec", "per_rank_step_time_s", "peak_alloc_gb_worst",
    "peak_reserved_gb_worst", "per_rank_peak_alloc_gb", "per_rank_peak_reserved_gb",
}  # fmt: skip
PHASES = {
    "dataload_wait", "forward", "bwd", "unscale_clip", "optim_step", "zero_grad_sched",
    "backward_step", "sync_gather", "total",
}  # fmt: skip


@pytest.fixture(scope="module")
def policy_file(tmp_path_factory):
    return write_tiny_policy_run(tmp_path_factory.mktemp("policy"))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (["--config_path=a.yaml", "--nproc", "2"], ["a.yaml", "--nproc", "2"]),
        (["x.y=1", "--config_path", "a.yaml"], ["a.yaml", "x.y=1"]),
        (["--policy.dropout=0.1"], ["model.policy.dropout=0.1"]),
        (["--policy.freeze_vision_encoder", "false"], ["model.policy.freeze_vision_encoder=false"]),
        (["--policy.vlm_config.dropout=None"], ["model.policy.vlm_config.dropout=null"]),
        (["--policy.path=dir"], ["model.pretrained=dir"]),
        (["--wandb.enable=false", "--wandb.project", "pi07"], []),
        (
            ["--dataset_mixture.response_drop_prob=0.0", "--dataset_mixture.n_obs_history=6"],
            ["data.drops.response_drop_prob=0.0", "model.policy.n_obs_steps=6"],
        ),
        (["--dataset_mixture.n_obs_history=None"], ["model.policy.n_obs_steps=1"]),
        (
            [
                '--dataset_mixture.datasets=[{"repo_id": "a/b"}]',
                "--dataset_mixture.datasets.0.repo_id=a/b",
                "--dataset_mixture.weights=[1.0]",
                "--dataset_mixture.action_freq=10",
            ],
            [],
        ),
        (["--num_workers=3", "--seed", "7"], ["data.num_workers=3", "train.seed=7"]),
        (
            ["--batch_size=8", "--gradient_accumulation_steps=2"],
            ["train.gradient_accumulation_steps=2", "train.per_device_train_batch_size=4"],
        ),
        (
            ["--batch_size=8", "--dataloader_batch_size=4"],
            ["train.gradient_accumulation_steps=2", "train.per_device_train_batch_size=4"],
        ),
        (["--gradient_accumulation_steps=2"], ["train.gradient_accumulation_steps=2"]),
        (["a.yaml", "--steps", "3", "b.c=--x"], ["a.yaml", "--steps", "3", "b.c=--x"]),
    ],
)
def test_options_become_settings(given, wanted):
    assert translated(given) == wanted


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--config_path"], "--config_path has no value"),
        (["--policy.dropout", "--nproc"], "--policy.dropout has no value"),
        (["--config_path=a", "--config_path=b"], "given twice, a and b"),
        (["--batch_size=x"], "--batch_size is 'x'"),
        (["--dataset_mixture.weight=[1]"], "did you mean --dataset_mixture.weights"),
        (["--batch_size=7", "--dataloader_batch_size=2"], "batch_size must be dataloader"),
        (["--batch_size=7", "--gradient_accumulation_steps=2"], "batch_size must be dataloader"),
        ({"PROFILE_STEPS": "0"}, "PROFILE_STEPS is '0'"),
        ({"GRAD_CHECKPOINT": "maybe"}, "GRAD_CHECKPOINT is 'maybe'"),
        ({"TORCH_COMPILE": "true"}, "there is no torch here"),
        ({"FUSED_ADAMW": "false"}, "Paddle's AdamW is fused"),
    ],
)
def test_wrong_options_and_variables_are_refused(given, message, capsys, monkeypatch):
    options = given if isinstance(given, list) else []
    for name, value in {} if options else given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        main(["profile", *options])
    assert message in capsys.readouterr().err


def test_opentaus_command_on_the_runs_own_data_profiles_what_it_says(policy_file, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = [f"--config_path={policy_file}", "--num_cams=3", "--wandb.enable=false"]
    arguments += ["--dataset_mixture.n_obs_history=1", "--dataset_mixture.subgoal_drop_prob=1.0"]
    arguments += ["--batch_size=2", "--warmup", "0", "--steps", "1", "--out", str(out)]
    assert main(["profile", *arguments]) == 0
    assert "--wandb.enable has no effect here" in capsys.readouterr().err
    result = json.loads((out / "profile.json").read_text())
    assert (result["cameras"], result["data_source"]) == (3, "the run's own")
    policy = result["config"]["model"]["policy"]
    # The lines have two cameras.
    assert list(policy["input_features"]) == ["camera0", "camera1", "camera2", "state"]
    assert (policy["empty_cameras"], policy["n_obs_steps"]) == (1, 1)
    assert result["config"]["data"]["drops"]["subgoal_drop_prob"] == 1.0


def test_opentaus_command_profiles_what_it_says(policy_file, tmp_path, monkeypatch):
    file, out = tmp_path / "opentau.json", tmp_path / "out"
    monkeypatch.setenv("PROFILE_STEPS", "2")
    monkeypatch.setenv("PROFILE_STEP_JSON", str(file))
    monkeypatch.setenv("ATTENTION_IMPL", "sdpa")
    monkeypatch.setenv("GRAD_CHECKPOINT", "true")
    arguments = [f"--config_path={policy_file}", "--policy.dropout=0.0", "--num_cams=2"]
    arguments += ["--batch_size=3", "--synthetic", "--warmup", "0", "--out", str(out)]
    assert main(["profile", *arguments]) == 0
    result = json.loads(file.read_text())
    assert result == json.loads((out / "profile.json").read_text())
    assert result.keys() >= KEYS
    assert result["phase_means_s"].keys() >= PHASES
    backward = sum(result["phase_means_s"][name] for name in (
        "bwd", "gradient_sum", "unscale_clip", "optim_step", "zero_grad_sched",
    ))  # fmt: skip
    assert result["phase_means_s"]["backward_step"] == pytest.approx(backward)
    assert (result["measured"], result["batch_size"], result["cameras"]) == (2, 3, 2)
    assert (result["recompute"], result["attention_implementation"]) == ("full", "sdpa")
    assert result["config"]["model"]["policy"]["dropout"] == 0.0


def taken(policy_file, monkeypatch, variables: dict, *given: str):
    """What the command takes of variables and options."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    options = _parse(build_parser(), ["profile", str(policy_file), *given])
    if not options.matrix:
        command._with_choices(options, load_run_config(options.config, options.overrides))
    return options


def test_options_take_precedence_over_variables(policy_file, monkeypatch, caplog):
    variables = {"PROFILE_STEPS": "2", "ATTENTION_IMPL": "sdpa", "GRAD_CHECKPOINT": "true"}
    variables |= {"FUSED_ADAMW": "true"}
    given = ["--steps", "5", "--policy.attention_implementation=eager", "train.recompute=none"]
    with caplog.at_level(logging.INFO, "paddle_vl"):
        options = taken(policy_file, monkeypatch, variables, *given)
    config = load_run_config(options.config, options.overrides)
    assert (options.steps, config.train.recompute) == (5, "none")
    assert config.model.policy.attention_implementation == "eager"
    assert "FUSED_ADAMW=true has no effect here" in caplog.text


def test_variables_choose_the_lines_of_a_matrix(policy_file, monkeypatch, capsys, tmp_path):
    variables = {"ATTENTION_IMPL": "eager", "GRAD_CHECKPOINT": "0"}
    options = taken(policy_file, monkeypatch, variables, "--matrix")
    assert (options.attention, options.recompute, options.overrides) == (["eager"], ["none"], [])
    options = taken(policy_file, monkeypatch, {}, "--matrix", "--attention", "sdpa", "eager")
    assert (options.attention, options.recompute) == (["sdpa", "eager"], ["none"])
    monkeypatch.setenv("PROFILE_STEP_JSON", "a.json")
    assert main(["profile", str(policy_file), "--matrix", "--memory-limit-gb", "1"]) == 1
    assert "a matrix writes matrix.json" in capsys.readouterr().err
    monkeypatch.delenv("PROFILE_STEP_JSON")
    assert main(["profile", str(write_tiny_run(tmp_path / "run"))]) == 1
    assert "a Qwen3-VL run has no such choice" in capsys.readouterr().err


def test_without_an_optimizer_there_is_no_state_and_no_update(tmp_path, monkeypatch):
    run_file, out = write_tiny_run(tmp_path / "run"), tmp_path / "out"

    def refuse(*arguments, **named):
        raise AssertionError("optimizer state or an update")

    for name in ("step", "_create_accumulators"):
        monkeypatch.setattr(AdamW, name, refuse)
    monkeypatch.setenv("PROFILE_NO_OPTIM", "1")
    arguments = [str(run_file), "--warmup", "1", "--steps", "2", "--out", str(out)]
    assert main(["profile", *arguments]) == 0
    result = json.loads((out / "profile.json").read_text())
    assert result["updates"] == "none"
    assert result["phase_means_s"].keys() >= PHASES
    monkeypatch.delenv("PROFILE_NO_OPTIM")
    with pytest.raises(AssertionError, match="optimizer state"):
        main(["profile", *arguments])
