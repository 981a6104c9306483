"""Settings of learning from rewards: names of other trainers, and what is refused."""

import pytest
from pydantic import ValidationError

from paddle_vl.families.vlm.grpo.settings import GRPOConfig

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
    ],
)
def test_settings_that_mean_nothing_together_are_refused(given, message):
    settings = GRPOConfig(**given)
    problems = list(settings.problems(rows=8, accumulation=2))
    assert [each for each in problems if message in each], problems


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
        ({"rollout_importance_sampling_mode": "token_mask"}, "take the geometric mean"),
        ({"norm_adv_by_std_in_grpo": True}, "verl adds 1e-6 to the deviation, and here it is 1e-4"),
        ({"beta": 0.1, "kl_loss_coef": 0.1}, "kl_loss_coef and beta are the same setting"),
        ({"loss_type": ["grpo", "dapo"]}, "must be one loss"),
        ({"loss_type": "fipo"}, "loss_type"),
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
