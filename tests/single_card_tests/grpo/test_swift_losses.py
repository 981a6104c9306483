"""Losses and advantages of ms-swift, against formulas in float64."""

from functools import partial

import numpy as np
import paddle
import pytest

from paddle_vl.families.vlm.grpo.advantages import advantages
from paddle_vl.families.vlm.grpo.objective import RolloutLoss, RolloutOutput
from paddle_vl.families.vlm.grpo.settings import GRPOConfig
from parity.grpo_arrays import answers_of, divisors
from parity.grpo_golden import GRPOFolders
from tests.support.tiny import GOLDEN

FOLDERS = GRPOFolders([GOLDEN / "grpo"])
NEW, OLD = "policy.per_token_logps", "old.per_token_logps"


def means_of(x_ST, mask_ST):
    return (x_ST * mask_ST).sum(1) / np.maximum(mask_ST.sum(1), 1)


def clipped(w, A, most=np.inf):
    return -np.minimum(np.minimum(w, most) * A, np.clip(w, 0.8, 1.28) * A)


def sequence_token(l_ST, frozen_ST, old_ST, mask_ST, A_S, _):
    w_ST = np.exp(means_of(frozen_ST - old_ST, mask_ST)[:, None] + l_ST - frozen_ST)
    return means_of(clipped(w_ST, A_S[:, None]), mask_ST).mean()


def fipo(l_ST, frozen_ST, old_ST, mask_ST, A_S, _, most=np.inf, bounds=(1.0, 1.2), safe=4.0):
    total, (S, T) = 0.0, l_ST.shape
    for s in range(S):
        for t in range(T):
            ratio = np.exp(frozen_ST[s, t] - old_ST[s, t])
            gaps = [
                0.5 ** ((j - t) / 32.0) * (frozen_ST[s, j] - old_ST[s, j]) * mask_ST[s, j]
                for j in range(t, T) if np.exp(frozen_ST[s, j] - old_ST[s, j]) <= most
            ]  # fmt: skip
            weight = np.clip(np.exp(sum(gaps)), *bounds)
            if A_S[s] < 0 and ratio > safe:
                weight = np.clip(weight, 0.8, 1.0)
            term = clipped(np.exp(l_ST[s, t] - old_ST[s, t]), A_S[s], most)
            total += weight * term * mask_ST[s, t]
    return total / mask_ST.sum()


def real(l_ST, _, old_ST, mask_ST, A_S, reference_ST, beta=0.04):
    scores_S, losses = means_of(l_ST - old_ST, mask_ST) / 0.5, []
    for group in np.arange(len(A_S)).reshape(-1, 4):
        good = [s for s in group if A_S[s] > 0 and mask_ST[s].any()]
        bad = [s for s in group if s not in good]
        positive = np.log(1 + sum(np.exp(-scores_S[s]) for s in good))
        negative = np.log(1 + sum(np.exp(scores_S[s]) for s in bad))
        losses.append(positive + negative if good and bad else 0.0)
    q_ST = np.clip(reference_ST - l_ST, -20, 20)
    kl_ST = np.minimum(np.exp(q_ST) - q_ST - 1, 10)
    return np.mean(losses) + beta * (kl_ST * mask_ST).sum() / mask_ST.sum()


LOSSES = [
    ("sequence_token", sequence_token, {"loss_type": "grpo"}),
    ("token", fipo, {"loss_type": "fipo"}),
    (
        "token",
        partial(fipo, most=2.0, bounds=(0.1, 1.9), safe=1.5),
        {"loss_type": "fipo", "delta": 2.0, "fipo_clip_range": 0.9,
         "fipo_clip_high_only": False, "fipo_safety_threshold": 1.5},
    ),
    ("token", real, {"loss_type": "real", "beta": 0.04}),
]  # fmt: skip


@pytest.mark.parametrize("case", ["extremes", "masked_truncation"])
@pytest.mark.parametrize(
    ("level", "formula", "given"), LOSSES, ids=["sequence_token", "fipo", "other bounds", "real"]
)
def test_the_loss_and_its_gradient_are_those_of_the_formula(level, formula, given, case):
    tensors = {name: each.copy() for name, each in FOLDERS.case(case).tensors.items()}
    # A tool wrote a token of an answer.
    tensors["loss_mask"][0, 2] = 0
    read_by_real = {} if given["loss_type"] == "real" else {"epsilon_high": 0.28}
    settings = GRPOConfig(
        num_generations=4, importance_sampling_level=level, **read_by_real, **given
    )
    assert not [*settings.problems(rows=8, accumulation=1)]
    A_S = tensors["advantages"].copy()
    # One group whose answers are all as good.
    A_S[4:] = A_S[4:] if given["loss_type"] != "real" else 0.5
    loss, every = RolloutLoss(settings), [*range(8)]
    counts = divisors(tensors, settings, every)
    total, found_ST = 0.0, np.zeros(tensors[NEW].shape)
    # Of two micro-batches, whose divisors are of the update.
    for chosen in (every[:4], every[4:]):
        answers, (leaf, _) = answers_of(tensors, settings, A_S, chosen)
        output = RolloutOutput(answers, paddle.ones([len(chosen)]))
        share, _ = loss.share(output, [counts[each] for each in loss.divisors], 2)
        share.backward()
        total += float(share)
        assert leaf.grad is not None
        rows, columns = np.nonzero(tensors["loss_mask"][chosen])
        found_ST[np.array(chosen)[rows], columns] = leaf.grad.numpy()[: len(rows)]
    names = (OLD, "loss_mask")
    l_ST, old_ST, mask_ST = (tensors[name].astype(np.float64) for name in (NEW, *names))
    others = (old_ST, mask_ST, A_S, tensors["reference.per_token_logps"].astype(np.float64))
    np.testing.assert_allclose(total, formula(l_ST, l_ST, *others), rtol=1e-5, atol=1e-6)
    wanted_ST = np.zeros_like(l_ST)
    for place in zip(*np.nonzero(mask_ST), strict=True):
        step = np.zeros_like(l_ST)
        step[place] = 1e-6
        ends = [formula(l_ST + sign * step, l_ST, *others) for sign in (1, -1)]
        wanted_ST[place] = (ends[0] - ends[1]) / 2e-6
    np.testing.assert_allclose(found_ST, wanted_ST, atol=1e-5 * np.abs(wanted_ST).max())


@pytest.mark.parametrize("scale", ["batch", "group", "none"])
def test_reinforce_plus_plus_scales_by_the_deviation_of_the_distances_from_the_group(scale):
    given = {} if scale == "batch" else {"scale_rewards": scale}
    settings = GRPOConfig(
        num_generations=4, rewards=["a"], beta=0.1, advantage_estimator="reinforce_plus_plus",
        **given,
    )  # fmt: skip
    assert settings.scale_rewards == scale
    assert settings.kl_in_reward
    rng = np.random.default_rng(0)
    rewards_S, kl_S = rng.normal(size=8).astype(np.float32).astype(float), rng.normal(size=8)
    rewards_S[4:] += 5
    distances_KG = (rewards_S - 0.1 * kl_S).reshape(2, 4)
    distances_KG = distances_KG - distances_KG.mean(1, keepdims=True)
    deviation = {
        "batch": distances_KG.std(ddof=1) + 1e-4,
        "group": distances_KG.std(1, ddof=1, keepdims=True) + 1e-4,
        "none": 1.0,
    }[scale]
    found_S = advantages(rewards_S[:, None], settings, kl_S)
    np.testing.assert_allclose(found_S, (distances_KG / deviation).flatten(), rtol=1e-5)


@pytest.mark.parametrize("estimator", ["rloo", "reinforce_plus_plus"])
def test_a_kl_term_that_is_in_the_rewards_is_not_in_the_loss(estimator):
    tensors, found = FOLDERS.case("extremes").tensors, []
    for beta in (0.0, 0.1):
        settings = GRPOConfig(num_generations=4, advantage_estimator=estimator, beta=beta)
        answers, _ = answers_of(tensors, settings, tensors["advantages"], [*range(8)])
        loss = RolloutLoss(settings)
        output = RolloutOutput(answers, paddle.ones([8]))
        counts = divisors(tensors, settings, [*range(8)])
        share, _ = loss.share(output, [counts[each] for each in loss.divisors], 1)
        found.append(float(share))
    assert found[0] == found[1]
