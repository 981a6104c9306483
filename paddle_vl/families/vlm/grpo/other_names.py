"""Names and values that TRL, ms-swift and verl give settings of learning from rewards."""

from collections.abc import Mapping
from typing import Any

# What TRL (for vLLM), ms-swift and verl call a setting of the same meaning.
_OTHER_NAMES = {
    "reward_funcs": "rewards",
    "vllm_importance_sampling_mode": "importance_sampling_mode",
    "vllm_importance_sampling_clip_min": "importance_sampling_clip_min",
    "vllm_importance_sampling_clip_max": "importance_sampling_clip_max",
    "vllm_importance_sampling_cap": "importance_sampling_clip_max",
    "rollout_importance_sampling_threshold": "importance_sampling_clip_max",
    "overlong_filter": "mask_truncated_completions", "tau_pos": "sapo_temperature_pos",
    "tau_neg": "sapo_temperature_neg", "epsilon_low": "epsilon", "n": "num_generations",
    "ppo_epochs": "num_iterations", "response_length": "max_completion_length",
    "clip_ratio": "epsilon", "clip_ratio_low": "epsilon", "clip_ratio_high": "epsilon_high",
    "kl_loss_coef": "beta", "kl_loss_type": "kl_estimator", "entropy_coeff": "entropy_coef",
}  # fmt: skip
_KL_IN_REWARD = (
    "with advantages of rloo and reinforce_plus_plus the KL term is in the reward, otherwise in "
    "the loss"
)
# And settings of theirs that mean something else, or have no place here.
_REFUSED = {
    "rollout_is": "verl's weights are importance_sampling_mode token_truncate and "
    "sequence_truncate, with importance_sampling_clip_max 2",
    "off_policy_sequence_mask_delta": "ms-swift takes the masked tokens out of the divisor: use "
    "off_policy_mask_threshold, which leaves it",
    "train_batch_size": "verl counts prompts there: set train.per_device_train_batch_size and "
    "steps_per_generation, in completions",
    "ppo_mini_batch_size": "verl counts prompts there: set train.gradient_accumulation_steps, in "
    "micro-batches of completions",
    "norm_adv_by_std_in_grpo": "verl adds 1e-6 to the deviation, and here it is 1e-4: use "
    "scale_rewards group or none",
    "online_filtering": "EasyR1 filters by the mean of one reward, which is another rule",
    "use_kl_loss": "the KL term is there with beta above 0",
    "kl_in_reward": _KL_IN_REWARD,
    "use_kl_in_reward": _KL_IN_REWARD,
    "use_adaptive_entropy": "entropy_coef is constant here",
    "sync_ref_model": "the reference does not move here",
}
_NAMES_OF_KL = {"low_var_kl": "k3", "kl": "k1", "mse": "k2"}


def renamed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under the names, and with the values, that they have here.

    Raises:
        ValueError: a setting that means something else here, or is given under two names.
    """
    values = dict(given)
    for name, reason in _REFUSED.items():
        if name in values:
            raise ValueError(f"{name} is no setting of grpo: {reason}")
    if "bypass_mode" in values:
        values["old_log_probs"] = "sampler" if values.pop("bypass_mode") else "computed"
    for other, name in _OTHER_NAMES.items():
        if other in values:
            if name in values:
                raise ValueError(f"{other} and {name} are the same setting: set one of them")
            values[name] = values.pop(other)
    if isinstance(mode := values.pop("rollout_importance_sampling_mode", None), str):
        # ms-swift's, which are by geometric means of answers, and weigh the KL term.
        values["importance_sampling_mode"] = mode.replace("sequence_", "geometric_")
        values.setdefault("importance_sampling_weighs_kl", True)
        values.setdefault("importance_sampling_clip_max", 2.0)
    corrects = values.pop("vllm_importance_sampling_correction", None)
    if corrects:
        values.setdefault("importance_sampling_mode", "sequence_mask")
    elif corrects is not None:
        values.pop("importance_sampling_mode", None)
    if isinstance(values.get("rewards"), str):
        values["rewards"] = [values["rewards"]]
    if isinstance(losses := values.get("loss_type"), list):
        if len(losses) != 1:
            raise ValueError(f"loss_type {losses} must be one loss")
        values["loss_type"] = losses[0]
    if values.get("advantage_estimator") == "reinforce_plus_plus":
        values.setdefault("scale_rewards", "batch")
    scale = values.get("scale_rewards")
    if isinstance(scale, bool):
        values["scale_rewards"] = "group" if scale else "none"
    elif scale == "gdpo":
        del values["scale_rewards"]
        values.setdefault("multi_objective_aggregation", "normalize_then_sum")
    if isinstance(kl := values.get("kl_estimator"), str):
        values["kl_estimator"] = _NAMES_OF_KL.get(kl, kl)
    return values
