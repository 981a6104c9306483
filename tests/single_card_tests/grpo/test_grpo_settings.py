"""Settings of learning from rewards: names of other trainers, and what is refused."""

import re

import numpy as np
import pytest
from pydantic import ValidationError

from paddle_vl.config.load import load_run_config
from paddle_vl.families.vlm.grpo.metrics import check_sampler, sampler_metrics
from paddle_vl.families.vlm.grpo.settings import GRPOConfig
from tests.single_card_tests.train.tiny_run import write_tiny_run

CISPO = {"loss_type": "cispo"}
RLOO = {"loss_type": "rloo"}
CORRECTS = "vllm_importance_sampling_correction"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (CISPO, "grpo.epsilon_high is None, which is the largest weight of grpo.loss_type cispo"),
        (CISPO | {"epsilon_high": 0.28}, "grpo.epsilon_high is 0.28, which is the largest weight"),
        ({"loss_type": "sapo", "delta": 4.0}, "grpo.delta is 4.0, which grpo.loss_type sapo does"),
        ({"delta": 1.2}, "grpo.delta is 1.2, within the clipped ratios, which end at 1.2"),
        ({"ref_model": "m"}, "grpo.ref_model is m but grpo.beta is 0"),
        (
            {"beta": 0.1, "kl_estimator": "k2", "use_bias_correction_kl": True},
            "grpo.use_bias_correction_kl is set with grpo.kl_estimator k2",
        ),
        (
            {"loss_type": "vespo", "importance_sampling_mode": "sequence_mask"},
            "grpo.importance_sampling_mode is sequence_mask, but vespo",
        ),
        (
            {"importance_sampling_mode": "token_mask", "old_log_probs": "sampler"},
            "with grpo.old_log_probs sampler there is nothing to correct",
        ),
        (
            {"importance_sampling_clip_max": 2.0},
            "grpo.importance_sampling_clip_max is 2.0 but grpo.importance_sampling_mode is not set",
        ),
        ({"top_p": 0.9}, "grpo.top_p is 0.9: answers would be drawn from another distribution"),
        ({"num_generations": 3}, "a generation has 16 answers (8 of a micro-batch on all ranks, 2"),
        ({"steps_per_generation": 3}, "an update would be of two generations"),
        ({"rewards": ["a"], "reward_weights": [1.0, 2.0]}, "has 2 weights for 1 of grpo.rewards"),
        ({"rewards": ["a", "a"]}, "grpo.rewards ['a', 'a'] names a reward twice"),
        (RLOO | {"scale_rewards": "none"}, "which advantages of rloo do not read"),
        (RLOO | {"advantage_estimator": "grpo"}, "grpo.loss_type rloo has advantages of its own"),
        ({"normalize_advantages": True}, "which advantages of grpo do not read"),
        (
            {"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "none"},
            "which normalize_then_sum does not read",
        ),
        (RLOO | {"reward_clip_range": [1.0, 0.0]}, "the first must be smaller"),
        (
            {"advantage_estimator": "reinforce_plus_plus", "beta": 0.1, "kl_estimator": "k2"},
            "grpo.kl_estimator is k2, which advantages of reinforce_plus_plus do not read",
        ),
        ({"loss_type": "real", "entropy_coef": 0.1}, "which grpo.loss_type real does not read"),
        ({"fipo_clip_range": None}, "grpo.fipo_clip_range is None, which grpo.loss_type dapo"),
    ],
)
def test_settings_that_mean_nothing_together_are_refused(given, message):
    settings = GRPOConfig(**given)
    problems = list(settings.problems(rows=8, accumulation=2))
    assert [each for each in problems if message in each], problems


GRPO = "train.objective=grpo"
SERVER = "train.rollout={endpoint: 'http://h/v1', model: m}"
BETA = "grpo.beta=0.1"
LORA = "model.lora={r: 2, target_modules: [all-linear], lora_dropout: 0.1}"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["grpo.beta=0.1"], "grpo has settings but train.objective is sft, which does not read"),
        ([GRPO, "preference.beta=1.0"], "preference has settings but train.objective is grpo"),
        ([GRPO, "data.packing=true"], "data.packing is set, but with train.objective grpo"),
        ([GRPO], "a generation has 4 answers (2 of a micro-batch on all ranks, 2 of these)"),
        ([GRPO, BETA], "grpo.beta is 0.1, for which the reference is the model that the run"),
        (
            [GRPO, "parallel.sharding_degree=2", "parallel.cp_degree=2",
             "grpo.top_entropy_quantile=0.5"],
            "grpo.top_entropy_quantile is 0.5 with parallel.cp_degree 2",
        ),
        (
            [GRPO, "parallel.sharding_degree=2", "parallel.cp_degree=2", "grpo.loss_type=fipo"],
            "grpo.loss_type is fipo with parallel.cp_degree 2",
        ),
        ([GRPO, "grpo.loss_type=real"], "grpo.loss_type is real, which compares the answers to a"),
        ([GRPO, LORA], "model.lora.lora_dropout is 0.1"),
        ([GRPO, "data.html_tables=otsl"], "data.html_tables is otsl, but with train.objective"),
        ([SERVER], "train.rollout is set but train.objective is sft, which samples no answers"),
        ([GRPO, "train.rollout={endpoint: host, model: m}"], "train.rollout.endpoint host is no"),
        (
            [GRPO, SERVER, "train.rollout.retokenize=true", "grpo.old_log_probs=sampler"],
            "train.rollout.retokenize is set, so the server gives no log-probabilities",
        ),
        ([GRPO, SERVER, "train.rollout.sync_steps=4"], "train.rollout.sync_steps is 4: answers"),
    ],
)  # fmt: skip
def test_a_run_whose_settings_contradict_each_other_is_refused(tmp_path, settings, message):
    run_file = write_tiny_run(tmp_path, 2)
    with pytest.raises(ValueError, match=re.escape(message)):
        load_run_config(str(run_file), settings)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        # TRL's ways to write a value.
        ({"loss_type": ["grpo"]}, {"loss_type": "grpo"}),
        ({"scale_rewards": True}, {"scale_rewards": "group"}),
        ({"scale_rewards": False}, {"scale_rewards": "none"}),
        ({CORRECTS: True}, {"importance_sampling_mode": "sequence_mask"}),
        ({"vllm_importance_sampling_mode": "token_mask", CORRECTS: False}, {}),
        ({"reward_funcs": "exact_match"}, {"rewards": ["exact_match"]}),
        # ms-swift's names.
        ({"overlong_filter": True}, {"mask_truncated_completions": True}),
        ({"scale_rewards": "gdpo"}, {"multi_objective_aggregation": "normalize_then_sum"}),
        ({"tau_pos": 2.0}, {"sapo_temperature_pos": 2.0}),
        (
            {"rollout_importance_sampling_mode": "sequence_mask"},
            {
                "importance_sampling_mode": "geometric_mask", "importance_sampling_clip_max": 2.0,
                "importance_sampling_weighs_kl": True,
            },
        ),
        # verl's.
        ({"clip_ratio_low": 0.1, "clip_ratio_high": 0.3}, {"epsilon": 0.1, "epsilon_high": 0.3}),
        ({"kl_loss_coef": 0.1, "kl_loss_type": "low_var_kl"}, {"beta": 0.1}),
        ({"bypass_mode": True, "n": 4}, {"old_log_probs": "sampler", "num_generations": 4}),
    ],
)  # fmt: skip
def test_names_of_other_trainers_are_taken(given, wanted):
    assert GRPOConfig(**given) == GRPOConfig(**wanted)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"use_adaptive_entropy": True}, "entropy_coef is constant here"),
        ({"norm_adv_by_std_in_grpo": True}, "verl adds 1e-6 to the deviation, and here it is 1e-4"),
        ({"beta": 0.1, "kl_loss_coef": 0.1}, "kl_loss_coef and beta are the same setting"),
        ({"loss_type": ["grpo", "dapo"]}, "must be one loss"),
        ({"loss_type": "ppo"}, "loss_type"),
        ({"temperature": 0.0}, "temperature"),
        ({"num_generations": 1}, "num_generations"),
    ],
)
def test_other_settings_are_refused_with_the_reason(given, message):
    with pytest.raises(ValidationError, match=message):
        GRPOConfig(**given)


@pytest.mark.parametrize(
    ("given", "accumulation", "wanted"),
    [
        ({}, 4, True),
        ({"num_iterations": 2}, 4, False),
        ({"steps_per_generation": 8}, 4, False),
        ({"steps_per_generation": 2, "num_iterations": 2}, 4, True),
    ],
)
def test_old_log_probabilities_are_the_policys_own_where_an_update_is_a_generation(
    given, accumulation, wanted
):
    assert GRPOConfig(**given).is_on_policy(accumulation) is wanted


def test_a_sampler_that_differs_from_the_trainer_is_refused():
    old_N = np.array([-1.0, -2.0, -3.0], np.float32)
    near, far = (sampler_metrics(old_N, old_N + gap) for gap in (1e-5, 0.1))
    check_sampler(near, GRPOConfig())
    check_sampler(far, GRPOConfig(max_sampling_logp_difference=None))
    with pytest.raises(
        ValueError, match="differ from the trainer's by 0.1 nats a token in the mean"
    ):
        check_sampler(far, GRPOConfig())
