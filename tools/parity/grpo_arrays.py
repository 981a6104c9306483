"""Golden cases of learning from rewards, from arrays alone: advantages, losses of given
log-probabilities, their derivatives, metrics, and the order of prompts."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import paddle

from paddle_vl.families.vlm.grpo.advantages import (
    EPSILON,
    advantages,
    of_groups,
    std_of,
    total_rewards,
)
from paddle_vl.families.vlm.grpo.importance import sampler_weights
from paddle_vl.families.vlm.grpo.losses import Answers
from paddle_vl.families.vlm.grpo.metrics import completion_metrics, reward_metrics, sampler_metrics
from paddle_vl.families.vlm.grpo.objective import RolloutLoss, RolloutOutput
from paddle_vl.families.vlm.grpo.rows import Rows
from paddle_vl.families.vlm.grpo.settings import GRPOConfig
from parity.comparison import CaseReport
from parity.grpo_golden import (
    GRPOCase,
    advantages_of,
    compare_metrics,
    is_on_policy,
    loss_of,
    losses_of,
    reads_sampler,
    settings_of,
)
from parity.grpo_order import generations

FROM_ARRAYS = 1e-5
# Rewards that differ by the rounding of float32, normalised by their own deviation.
_ILL_CONDITIONED = ("nearly_equal", "normalize_then_sum")
Tensors = Mapping[str, np.ndarray]


def answers_of(
    tensors: Tensors,
    settings: GRPOConfig,
    advantages_S: np.ndarray,
    chosen: Sequence[int],
    has_old: bool = True,
    has_sampler: bool = False,
) -> tuple[Answers, tuple[paddle.Tensor, paddle.Tensor]]:
    """Some rows of a case's arrays, and the leaves: log-probabilities and entropies."""
    mask_ST = tensors["loss_mask"][chosen] == 1
    numbers_N, positions_N = np.nonzero(mask_ST)

    def of(name: str) -> paddle.Tensor:
        values_N = tensors[name][chosen][mask_ST]
        return paddle.to_tensor(values_N if len(values_N) else np.zeros(1, np.float32))

    is_target_N = np.ones(max(1, len(numbers_N)), bool) if len(numbers_N) else np.zeros(1, bool)
    if not len(numbers_N):
        numbers_N = positions_N = np.zeros(1, np.int64)
    lengths_S = paddle.to_tensor(mask_ST.sum(axis=1).astype(np.float32))
    numbers, is_target, positions = map(paddle.to_tensor, (numbers_N, is_target_N, positions_N))
    rows = Rows(numbers, is_target, lengths_S, positions)
    leaves = of("policy.per_token_logps"), of("policy.per_token_entropy")
    for leaf in leaves:
        leaf.stop_gradient = False
    others = [
        of("old.per_token_logps") if has_old else None,
        of("reference.per_token_logps") if settings.has_reference else None,
        of("sampler.per_token_logps") if has_sampler else None,
    ]
    found_S = paddle.to_tensor(np.asarray(advantages_S[chosen], np.float32))
    return Answers(settings, rows, *leaves, found_S, *others), leaves


def divisors(tensors: Tensors, settings: GRPOConfig, chosen: Sequence[int]) -> dict[str, int]:
    learned_S = tensors["loss_mask"][chosen].sum(axis=1)
    return {
        "num_target_tokens": int(learned_S.sum()),
        "num_rows": len(chosen),
        "num_learned_rows": int((learned_S > 0).sum()),
        "num_row_places": len(chosen) * settings.max_completion_length,
        "num_batches": 1,
        "num_learned_batches": int((learned_S > 0).any()),
    }


def from_arrays(case: GRPOCase, report: CaseReport) -> None:
    tensors = case.tensors
    chosen = list(range(len(tensors["loss_mask"])))
    mask_ST = tensors["loss_mask"] == 1
    for name, wanted, settings in losses_of(case):
        loss = RolloutLoss(settings)
        advantages_S = advantages_of(case, name)
        has_old = not is_on_policy(wanted)
        answers, leaves = answers_of(
            tensors, settings, advantages_S, chosen, has_old, reads_sampler(name, settings)
        )
        counts = divisors(tensors, settings, chosen)
        output = RolloutOutput(answers, paddle.ones([len(chosen)]))
        share, terms = loss.share(output, [counts[each] for each in loss.divisors], 1)
        total, means = loss_of(loss, terms)
        if "aux_loss" not in wanted.get("metrics", {}):
            allowed = FROM_ARRAYS * max(1, abs(wanted["loss"]))
            report.absolute("arrays", name, total, allowed, wanted["loss"])
        compare_metrics(report, name, means, wanted.get("metrics", {}), FROM_ARRAYS)
        _sampler(case, report, name, settings, wanted.get("metrics", {}))
        if (stored := case.slopes.get(name)) is not None:
            share.backward()
            for key, leaf in zip((name, f"{name}.entropy"), leaves, strict=True):
                found_ST = np.zeros(mask_ST.shape, np.float32)
                if leaf.grad is not None and mask_ST.any():
                    found_ST[mask_ST] = leaf.grad.numpy()
                stored = case.slopes.get(key, np.zeros_like(found_ST))
                # The loss of no signal is 0 with terms that cancel.
                if np.abs(stored).max() or np.abs(found_ST).max():
                    report.relative("slopes", key, found_ST, FROM_ARRAYS, stored)


def _sampler(
    case: GRPOCase,
    report: CaseReport,
    name: str,
    settings: GRPOConfig,
    wanted: Mapping[str, float],
) -> None:
    """Weights and metrics of the sampler, of given log-probabilities."""
    has_metrics = any(key.startswith("sampling/") for key in wanted)
    if settings.importance_sampling_mode is None or not has_metrics:
        return
    chosen = list(range(len(case.tensors["loss_mask"])))
    answers, _ = answers_of(
        case.tensors, settings, case.tensors["advantages"], chosen, has_sampler=True
    )
    assert answers.old is not None
    assert answers.sampler is not None
    weights_N = sampler_weights(answers.old, answers.sampler, answers.rows, settings).numpy()
    mask_ST = case.tensors["loss_mask"] == 1
    by_answer = settings.importance_sampling_mode.startswith("sequence")
    ends = f"{settings.importance_sampling_clip_min}_{settings.importance_sampling_clip_max}"
    key = f"importance_sampling_ratio.{settings.importance_sampling_mode}"
    key += f"_{ends}" if settings.importance_sampling_clip_min else ""
    if key in case.tensors:
        stored = np.broadcast_to(case.tensors[key], mask_ST.shape)[mask_ST]
        report.relative("weights", f"{name} {key}", weights_N, FROM_ARRAYS, stored)
    weights = weights_N
    if by_answer:
        firsts = [int(np.nonzero(np.nonzero(mask_ST)[0] == row)[0][0]) if mask_ST[row].any() else -1
                  for row in chosen]  # fmt: skip
        weights = np.array([weights_N[first] if first >= 0 else 1.0 for first in firsts])
    found = sampler_metrics(answers.old.numpy(), answers.sampler.numpy(), weights)
    for each, value in found.items():
        report.near("sampler", f"{name} {each}", value, FROM_ARRAYS, FROM_ARRAYS, wanted[each])


# Rewards and counts.


def generation(case: GRPOCase, report: CaseReport) -> None:
    meta, tensors = case.meta, case.tensors
    settings = GRPOConfig(
        num_generations=meta["num_generations"],
        rewards=meta["reward_functions"],
        reward_weights=meta["reward_weights"],
    )
    rewards_SF = tensors["rewards_per_func"]
    found_S = advantages(rewards_SF, settings)
    report.absolute("advantages", "advantages", found_S, FROM_ARRAYS, tensors["advantages"])
    old, reference = tensors["old.per_token_logps"], tensors["reference.per_token_logps"]
    kl_S = ((old - reference) * tensors["loss_mask"]).sum(axis=1)
    for key in [each for each in tensors if each.startswith("advantages.rloo")]:
        beta = float(key.partition("beta")[2] or 0)
        own = settings.model_copy(update={"loss_type": "rloo", "beta": beta})
        found_S = advantages(rewards_SF, own, kl_S if beta else None)
        # The KL term is of sums over tokens of rounded numbers.
        report.absolute("advantages", key, found_S, FROM_ARRAYS, tensors[key])
    lengths_S = tensors["in.completion_lengths"]
    ends_S = _is_truncated(case)
    found = reward_metrics(rewards_SF, meta["reward_functions"], settings)
    found |= completion_metrics(lengths_S, ends_S, tensors["in.prompt_lengths"])
    for key, value in meta["generation_metrics"].items():
        if key not in found:
            report.fail("generation", key, "it is not reported")
        else:
            report.near("generation", key, found[key], FROM_ARRAYS, 1e-7, value)


def _is_truncated(case: GRPOCase) -> np.ndarray:
    """Whether an answer's last id is no end: what a case has in place of the engine's reason."""
    t = case.tensors
    places = t["in.prompt_lengths"] + t["in.completion_lengths"] - 1
    last_S = t["in.input_ids"][np.arange(len(places)), places]
    return ~np.isin(last_S, (504, 505))


def of_advantages(case: GRPOCase, report: CaseReport) -> None:
    for each in case.meta["cases"]:
        names = list(each["rewards_per_func"])
        columns = [np.ravel(rows).astype(np.float32) for rows in each["rewards_per_func"].values()]
        rewards_SF = np.stack(columns, axis=1)
        for name, wanted in each["trl"].items():
            if (each["name"], name) == _ILL_CONDITIONED:
                continue
            own: dict[str, Any] = {
                "normalize_then_sum": {"multi_objective_aggregation": name},
                "rloo": {"advantage_estimator": "rloo"},
                "rloo_normalized": {"advantage_estimator": "rloo", "normalize_advantages": True},
                "rloo_clip_0_1": {"advantage_estimator": "rloo", "reward_clip_range": [0.0, 1.0]},
            }.get(name, {"scale_rewards": name})
            settings = GRPOConfig(
                num_generations=each["num_generations"], rewards=names,
                reward_weights=each["weights"], **own,
            )  # fmt: skip
            stored_S = np.asarray(wanted["advantages"], np.float64)
            label, unit_S = f"{each['name']} {name}", _units(rewards_SF, stored_S, settings)
            found_S = advantages(rewards_SF, settings) / unit_S
            report.absolute("advantages", label, found_S, FROM_ARRAYS, stored_S / unit_S)
            found = reward_metrics(rewards_SF, names, settings)
            for key, value in (wanted.get("metrics") or {}).items():
                report.near("metrics", f"{label} {key}", found[key], FROM_ARRAYS, 1e-7, value)


def _units(rewards_SF: np.ndarray, stored_S: np.ndarray, settings: GRPOConfig) -> np.ndarray:
    """`[S]`, what an error of 1e-5 is relative to: TRL's float32 rounds rewards, which weighs where
    those of a group are nearly equal, as the deviation divides it."""
    total_S = total_rewards(rewards_SF.astype(np.float64), settings)
    deviation_S = of_groups(total_S, settings.num_generations, std_of)
    rounding = np.spacing(np.nanmax(np.abs(total_S)).astype(np.float32))
    deviation_S = np.nan_to_num(deviation_S)
    rounding_S = np.where(stored_S != 0, rounding / (deviation_S + EPSILON), 0.0)
    return np.maximum(1.0, np.abs(stored_S)) + rounding_S / FROM_ARRAYS


def of_order(case: GRPOCase, report: CaseReport) -> None:
    for number, each in enumerate(case.meta["cases"]):
        size, copies = each["prompts_per_generation"], each["num_generations"]
        every = generations(each["prompts"], size, each["seed"], each["shuffle"])
        count = len(each["indices"]) // (size * copies * each["repeats"])
        found = [
            np.tile(np.repeat(prompts, copies), each["repeats"]) for prompts in islice(every, count)
        ]
        report.exact("order", str(number), np.concatenate(found), each["indices"])


def of_accumulation(case: GRPOCase, report: CaseReport) -> None:
    """The rows of a case as micro-batches: their shares add up to the loss of one batch."""
    inputs = case.folders.case("shared_image")
    for each in case.meta["cases"]:
        wanted = inputs.meta["losses"][each["loss"]]
        settings = settings_of(each["loss"], wanted["settings"], inputs.meta)
        loss = RolloutLoss(settings)
        rows, number = case.meta["rows"], each["micro_batches"]
        batches = np.asarray(rows).reshape(number, -1).tolist()
        steps = each["gradient_accumulation_steps"]
        found = []
        for begin in range(0, number, steps):
            own = batches[begin : begin + steps]
            counts = [divisors(inputs.tensors, settings, chosen) for chosen in own]
            totals = [sum(one[name] for one in counts) for name in loss.divisors]
            terms = paddle.zeros([len(loss.terms)])
            for chosen in own:
                answers, _ = answers_of(
                    inputs.tensors, settings, inputs.tensors["advantages"], chosen
                )
                output = RolloutOutput(answers, paddle.ones([len(chosen)]))
                terms = terms + loss.share(output, totals, len(own))[1]
            found.append(loss_of(loss, terms)[0])
        stored = np.asarray(each["one_batch"])
        label = f"{each['loss']} {number} {steps}"
        allowed = FROM_ARRAYS * max(1.0, np.abs(stored).max())
        report.absolute("updates", label, found, allowed, stored)
