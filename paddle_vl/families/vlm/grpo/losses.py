"""Losses of sampled answers under TRL's names, as sums over tokens and answers.

`l` is a token's log-probability under the policy, `old` under the policy that answered, `A` the
advantage of its answer. The ratio `w` is exp(l - old), or with sequences exp of the mean over the
answer's learned tokens, which has a gradient through all of them.

Source: TRL's GRPOTrainer, RLOOTrainer and GMPOTrainer; verl's core_algos (dual clip, aggregation,
KL estimators); ms-swift's GRPOTrainer (real, fipo, sequence_token). Shapes: N learned tokens of
this rank, S answers, G answers to a prompt, K prompts.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import mul

import paddle
import paddle.nn.functional as F
from paddle import Tensor

from paddle_vl.families.vlm.grpo.importance import log_gap, sampler_weights
from paddle_vl.families.vlm.grpo.rows import Rows
from paddle_vl.families.vlm.grpo.settings import CLIPPED, OF_TOKENS, GRPOConfig

# Bounds of log-ratios whose exp is summed.
_LARGEST_LOG, _SMALLEST_LOG = 20.0, math.log(1e-8)
# Of fipo, of tokens above its safety threshold.
_SAFE_WEIGHTS = (0.8, 1.0)
# What the terms of an answer's tokens become, and the divisor of the sum over answers.
_OF_LOSS = {
    "grpo": ("seq-mean-token-mean", "num_rows"),
    "sapo": ("seq-mean-token-mean", "num_rows"),
    "gmpo": ("seq-mean-token-mean", "num_rows"),
    "rloo": ("seq-mean-token-sum", "num_rows"),
    "luspo": ("seq-mean-token-sum", "num_rows"),
    "real": ("seq-mean-token-sum", "num_rows"),
    "dr_grpo": ("token-mean", "num_row_places"),
}
_OF_MODE = {
    "token-mean": "num_target_tokens",
    "seq-mean-token-mean": "num_learned_rows",
    "seq-mean-token-sum": "num_learned_rows",
    "seq-mean-token-sum-norm": "num_batches",
}


def aggregation(settings: GRPOConfig) -> tuple[str, str]:
    """How the tokens of an answer are added up, under verl's name, and the divisor of the sum over
    answers, by its entry in a batch."""
    if (mode := settings.loss_agg_mode) is not None:
        return mode, _OF_MODE[mode]
    return _OF_LOSS.get(settings.loss_type, ("token-mean", "num_target_tokens"))


@dataclass(frozen=True)
class Answers:
    """The learned tokens of a micro-batch.

    Attributes:
        log_probs: `[N]` under the policy, with a gradient.
        entropy: `[N]` of the policy, in nats.
        advantages: `[S]`.
        old: `[N]` of the policy that answered; None for the policy as it is.
        reference, sampler: `[N]`; None without them. NaN where the sampler gave none.
    """

    settings: GRPOConfig
    rows: Rows
    log_probs: Tensor
    entropy: Tensor
    advantages: Tensor
    old: Tensor | None = None
    reference: Tensor | None = None
    sampler: Tensor | None = None

    @cached_property
    def trainer_old(self) -> Tensor:
        """`[N]`, of the policy that answered, as the trainer computes it."""
        return self.log_probs.detach() if self.old is None else self.old

    @cached_property
    def sampled(self) -> Tensor:
        """`[N]` of the sampler, of the trainer where the sampler gave none."""
        own_N = self.trainer_old
        return own_N if self.sampler is None else own_N - log_gap(own_N, self.sampler)

    @cached_property
    def log_ratio(self) -> Tensor:
        """`[N]`: l - old."""
        of_sampler = self.settings.old_log_probs == "sampler"
        # Its first reader may be a metric.
        with paddle.enable_grad():
            return self.log_probs - (self.sampled if of_sampler else self.trainer_old)

    @cached_property
    def by_row(self) -> bool:
        """Whether ratios are of answers."""
        return self.settings.importance_sampling_level == "sequence"

    @cached_property
    def ratio(self) -> Tensor:
        """`w`: `[N]`, or `[S]` of answers."""
        level, log_ratio = self.settings.importance_sampling_level, self.log_ratio
        with paddle.enable_grad():
            if level == "token":
                return log_ratio.exp()
            mean_S = self.rows.mean(log_ratio)
            if level == "sequence":
                return mean_S.exp()
            # The value of the answer, the gradient of the token.
            return (log_ratio - log_ratio.detach() + self.rows.spread(mean_S.detach())).exp()

    @cached_property
    def frozen_ratio(self) -> Tensor:
        """`[N]`: `w` of each token, without a gradient."""
        ratio = self.ratio.detach()
        return self.rows.spread(ratio) if self.by_row else ratio

    @cached_property
    def spread_advantages(self) -> Tensor:
        """`[N]`: `A` of each token."""
        return self.rows.spread(self.advantages)

    @cached_property
    def high_entropy(self) -> Tensor | None:
        """`[N]`: 1 of tokens in the top quantile of entropies of this micro-batch; None for all."""
        share = self.settings.top_entropy_quantile
        if share == 1.0:
            return None
        # All tokens are real, but for the one of a batch without any.
        sorted_N, place = self.entropy.detach().sort(), (1 - share) * (self.entropy.shape[0] - 1)
        below, above = sorted_N[math.floor(place)], sorted_N[math.ceil(place)]
        threshold = below + (above - below) * (place - math.floor(place))
        return (self.entropy.detach() >= threshold).astype("float32")

    @cached_property
    def corrections(self) -> Tensor | None:
        """`[N]`: `sampler_weights`; None without them."""
        if self.settings.importance_sampling_mode is None:
            return None
        assert self.sampler is not None, "the sampler gives them"
        return sampler_weights(self.trainer_old, self.sampler, self.rows, self.settings)

    @cached_property
    def token_weights(self) -> Tensor | None:
        """`[N]`, of the policy's terms, without a gradient; None for 1."""
        # vespo has the corrections in its own weight.
        name = self.settings.loss_type
        of_sampler = None if name == "vespo" else self.corrections
        of_future = future_weights(self) if name == "fipo" else None
        given = [each for each in (self.high_entropy, of_sampler, of_future) if each is not None]
        return reduce(mul, given) if given else None

    def sums(self, x: Tensor, of_rows: bool, weights_N: Tensor | None = None) -> Tensor:
        """`[S]`: sums of weighted terms over the tokens of each answer.

        Args:
            x: `[N]`, or where `of_rows` `[S]`, the term of all tokens of an answer.
        """
        if of_rows:
            return x * (self.rows.lengths if weights_N is None else self.rows.sum(weights_N))
        return self.rows.sum(x if weights_N is None else x * weights_N)


def policy_sums(a: Answers) -> Tensor:
    """`[S]`: policy terms added up over each answer's tokens, and over these `mean`s of losses of
    whole answers."""
    name = a.settings.loss_type
    if name not in OF_TOKENS:
        return _OF_ANSWERS[name](a)
    of_rows = a.by_row and name in (*CLIPPED, "sapo")
    terms = _TERMS.get(name, _clipped)(a)
    found_S = a.sums(terms, of_rows, a.token_weights)
    threshold = a.settings.off_policy_mask_threshold
    if threshold is None:
        return found_S
    with paddle.no_grad():
        drift_S = a.rows.mean(a.sampled - a.log_probs)
        is_kept_S = (a.advantages >= 0) | (drift_S <= threshold)
    return found_S * is_kept_S.astype("float32")


def kl_sums(a: Answers) -> Tensor:
    """`[S]`: estimates of the KL divergence from the reference, added up over each answer's
    tokens."""
    assert a.reference is not None, "a run with beta has a reference"
    settings, q_N = a.settings, a.reference - a.log_probs
    bound = settings.kl_clamp
    if bound is not None:
        q_N = q_N.clip(-_LARGEST_LOG, _LARGEST_LOG)
    kl_N = _KL[settings.kl_estimator](q_N)
    if bound is not None:
        kl_N = kl_N.clip(-bound, bound)
    if settings.kl_estimator == "k3+":
        # The value of k3, the gradient of k2.
        own_N = 0.5 * q_N.square()
        kl_N = kl_N.detach() + own_N - own_N.detach()
    if settings.importance_sampling_weighs_kl and a.corrections is not None:
        kl_N = kl_N * a.corrections
    if not settings.corrects_kl:
        return a.rows.sum(kl_N)
    return a.ratio * a.rows.sum(kl_N) if a.by_row else a.rows.sum(kl_N * a.ratio)


def aggregated(sums_S: Tensor, a: Answers) -> Tensor:
    """A scalar, of sums over answers' tokens, to be divided by the divisor of `aggregation`."""
    mode = aggregation(a.settings)[0]
    if mode == "seq-mean-token-mean":
        return (sums_S / a.rows.lengths.clip(min=1.0)).sum()
    if mode == "seq-mean-token-sum-norm":
        return sums_S.sum() / a.settings.max_completion_length
    return sums_S.sum()


def _clipped(a: Answers) -> Tensor:
    settings, w = a.settings, a.ratio
    A = a.advantages if a.by_row else a.spread_advantages
    clipped = w.clip(1 - settings.epsilon, 1 + settings.upper)
    if settings.delta is not None:
        w = w.clip(max=settings.delta)
    losses = -paddle.minimum(w * A, clipped * A)
    if settings.clip_ratio_c is None:
        return losses
    return paddle.where(A < 0, paddle.minimum(losses, -settings.clip_ratio_c * A), losses)


def _cispo(a: Answers) -> Tensor:
    settings, w_N = a.settings, a.frozen_ratio
    if settings.loss_type == "cispo":
        w_N = w_N.clip(max=settings.upper)
    else:
        w_N = w_N.clip(1 - settings.epsilon, 1 + settings.upper)
    return -w_N * a.spread_advantages * a.log_probs


def _sapo(a: Answers) -> Tensor:
    A, settings = a.advantages if a.by_row else a.spread_advantages, a.settings
    positive, others = settings.sapo_temperature_pos, settings.sapo_temperature_neg
    tau = paddle.where(A > 0, paddle.full_like(A, positive), paddle.full_like(A, others))
    return -F.sigmoid(tau * (a.ratio - 1)) * (4.0 / tau) * A


@paddle.no_grad()
def vespo_weights(a: Answers) -> Tensor:
    """`[S]`: phi of each answer."""
    settings, A = a.settings, a.advantages
    log_w_N = a.log_ratio.clip(-_LARGEST_LOG, _LARGEST_LOG)
    if a.corrections is not None:
        log_w_N = log_w_N + a.corrections.log().clip(_SMALLEST_LOG, _LARGEST_LOG)
    log_w_S = a.rows.sum(log_w_N).clip(_SMALLEST_LOG, _LARGEST_LOG)
    is_good_S = (A >= 0).astype("float32")
    k_S = is_good_S * settings.vespo_k_pos + (1 - is_good_S) * settings.vespo_k_neg
    decay_S = is_good_S * settings.vespo_lambda_pos + (1 - is_good_S) * settings.vespo_lambda_neg
    return (decay_S + k_S * log_w_S - decay_S * log_w_S.exp()).exp()


def _vespo(a: Answers) -> Tensor:
    return -a.rows.spread(vespo_weights(a) * a.advantages) * a.log_probs


def _gmpo(a: Answers) -> Tensor:
    settings, r_N = a.settings, a.log_ratio
    is_good_N = a.spread_advantages > 0
    clipped_N = paddle.where(is_good_N, r_N.clip(max=settings.upper), r_N.clip(-settings.epsilon))
    # Of the whole answer, so that the mean over its tokens is it.
    return -a.advantages * a.rows.mean(clipped_N).exp() * a.rows.lengths.clip(min=1.0)


@paddle.no_grad()
def future_weights(a: Answers) -> Tensor:
    """`[N]`: fipo's weight of each token, of the log-ratios from it on."""
    settings, log_ratio_N, w_N = a.settings, a.log_ratio, a.frozen_ratio
    if settings.delta is not None:
        is_near_N = (w_N <= settings.delta).astype("float32")
        log_ratio_N = log_ratio_N * is_near_N
    found_N = a.rows.discounted(log_ratio_N, 2 ** (-1 / settings.fipo_decay_rate)).exp()
    if (width := settings.fipo_clip_range) is not None:
        found_N = found_N.clip(1.0 if settings.fipo_clip_high_only else 1 - width, 1 + width)
    if settings.fipo_safety_threshold is None:
        return found_N
    is_unsafe_N = (a.spread_advantages < 0) & (w_N > settings.fipo_safety_threshold)
    return paddle.where(is_unsafe_N, found_N.clip(*_SAFE_WEIGHTS), found_N)


def _real(a: Answers) -> Tensor:
    size, scores_S = a.settings.num_generations, a.rows.mean(a.log_ratio) / a.settings.real_tau
    if len(scores_S) == 1:
        # That of a batch without answers.
        return 0.0 * scores_S
    is_good_S = (a.advantages > 0) & (a.rows.lengths > 0)
    scores_KG, is_good_KG = scores_S.reshape([-1, size]), is_good_S.reshape([-1, size])

    def soft_sum(x_KG: Tensor, is_counted_KG: Tensor) -> Tensor:
        """`[K, 1]`: log(1 + the sum of exp of what counts)."""
        counted_KG = paddle.where(is_counted_KG, x_KG, paddle.full_like(x_KG, -math.inf))
        one_K1 = paddle.zeros_like(x_KG[:, :1])
        return paddle.concat([one_K1, counted_KG], 1).logsumexp(1, keepdim=True)

    losses_K1 = soft_sum(scores_KG, ~is_good_KG) + soft_sum(-scores_KG, is_good_KG)
    has_both_K1 = is_good_KG.any(1, keepdim=True) & ~is_good_KG.all(1, keepdim=True)
    # On each answer, so that the mean over answers is that over groups.
    return (losses_K1 * has_both_K1.astype("float32")).expand([-1, size]).flatten()


def _rloo(a: Answers) -> Tensor:
    settings, A, w_S = a.settings, a.advantages, answer_ratios(a)
    clipped_S = w_S.clip(1 - settings.epsilon, 1 + settings.upper)
    return -paddle.minimum(w_S * A, clipped_S * A)


def answer_ratios(a: Answers) -> Tensor:
    """`[S]`: the products of the ratios of each answer's tokens."""
    return a.rows.sum(a.log_ratio).exp()


_TERMS: dict[str, Callable[[Answers], Tensor]] = {
    "cispo": _cispo, "cispo_range": _cispo, "sapo": _sapo, "vespo": _vespo,
}  # fmt: skip
_OF_ANSWERS: dict[str, Callable[[Answers], Tensor]] = {
    "gmpo": _gmpo, "rloo": _rloo, "real": _real,
}  # fmt: skip
_KL: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda q: -q,
    "abs": lambda q: q.abs(),
    "k2": lambda q: 0.5 * q.square(),
    "k3": lambda q: q.exp() - q - 1,
    "k3+": lambda q: q.exp() - q - 1,
}


@paddle.no_grad()
def clip_shares(a: Answers) -> dict[str, Tensor]:
    """Under TRL's names whether each token `[N]`, or `[S]` each answer where the loss has its
    ratio, is clipped; empty of losses without a bound."""
    settings, name = a.settings, a.settings.loss_type
    if name in ("cispo", "cispo_range"):
        top, A = settings.upper + (name == "cispo_range"), a.advantages
        found = (a.ratio > top) & ((A if a.by_row else a.spread_advantages) > 0)
        return {"cispo_clip_ratio": found.astype("float32")}
    if name in ("sapo", "vespo", "real"):
        return {}
    low, high = 1 - settings.epsilon, 1 + settings.upper
    if name == "rloo":
        w, A = answer_ratios(a), a.advantages
    elif name == "gmpo":
        w, A = a.log_ratio, a.spread_advantages
        low, high = -settings.epsilon, settings.upper
    else:
        w, A = a.ratio, a.advantages if a.by_row else a.spread_advantages
        w = w if settings.delta is None else w.clip(max=settings.delta)
    is_low, is_high = (w < low) & (A < 0), (w > high) & (A > 0)
    shares = {"low": is_low, "high": is_high, "region": is_low | is_high}
    return {key: value.astype("float32") for key, value in shares.items()}


def clips_answers(settings: GRPOConfig) -> bool:
    """Whether `clip_shares` are of answers."""
    by_row = settings.importance_sampling_level == "sequence"
    return settings.loss_type == "rloo" or (by_row and settings.loss_type != "gmpo")
