"""Losses of preference pairs, as a table under TRL's names, and of single rated answers (KTO).

A pair has a chosen and a rejected answer. `c` and `r` are their log-probabilities under the policy,
summed over tokens, `d_c` and `d_r` these minus the reference's (without one, `c` and `r`
themselves), `n_c` and `n_r` their numbers of tokens. Sums are for all losses but `ipo`,
`sigmoid_norm`, `simpo` and `orpo`, which take averages per token.

Source: TRL's DPOTrainer, CPOTrainer, ORPOTrainer and KTOTrainer; PaddleFormers' dpo_loss.py.
Shapes: P pairs, S answers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import paddle
import paddle.nn.functional as F
from paddle import Tensor

from paddle_vl.families.vlm.preference.settings import PreferenceConfig


@dataclass(frozen=True)
class Pairs:
    """The pairs of a micro-batch, `[P]` float32 each.

    Attributes:
        c, r: log-probabilities of the chosen and the rejected answer.
        ref_c, ref_r: the same under the reference; zeros without one.
        n_c, n_r: numbers of tokens.
    """

    c: Tensor
    r: Tensor
    ref_c: Tensor
    ref_r: Tensor
    n_c: Tensor
    n_r: Tensor
    settings: PreferenceConfig

    @cached_property
    def d_c(self) -> Tensor:
        """Log-ratio of the chosen answer."""
        return self.c - self.ref_c

    @cached_property
    def d_r(self) -> Tensor:
        """Log-ratio of the rejected answer."""
        return self.r - self.ref_r

    @cached_property
    def margin(self) -> Tensor:
        """`h`, the scaled difference of both, of their values under another divergence."""
        of = _DIVERGENCES[self.settings.f_divergence_type]
        coefficient = self.settings.f_alpha_divergence_coef
        return self.settings.beta * (of(self.d_c, coefficient) - of(self.d_r, coefficient))

    @cached_property
    def mean_margin(self) -> Tensor:
        """The difference of the log-ratios per token."""
        return self.d_c / self.n_c - self.d_r / self.n_r

    @cached_property
    def log_odds(self) -> Tensor:
        """Log of the ratio of the answers' odds, from averages per token."""
        a, b = self.c / self.n_c, self.r / self.n_r
        return (a - b) - (_log1m_exp(a) - _log1m_exp(b))


def _log1m_exp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) of x < 0, exact at both ends."""
    near = x > -math.log(2)
    # Neither branch may see values where its gradient is infinite.
    of_near = paddle.where(near, x, paddle.full_like(x, -0.5))
    of_far = paddle.where(near, paddle.full_like(x, -1.0), x)
    return paddle.where(near, (-of_near.expm1()).log(), (-of_far.exp()).log1p())


_DIVERGENCES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "reverse_kl": lambda d, _: d,
    "forward_kl": lambda d, _: 1 - (-d).exp(),
    "js_divergence": lambda d, _: math.log(2) + F.log_sigmoid(d),
    "alpha_divergence": lambda d, a: (((a - 1) * d).exp() - 1) / (a - 1),
}


def _smoothed(h: Tensor, p: Pairs) -> Tensor:
    e = p.settings.label_smoothing
    # Without smoothing one term, which has no rounding of the other.
    return -F.log_sigmoid(h) if not e else -(1 - e) * F.log_sigmoid(h) - e * F.log_sigmoid(-h)


def _robust(p: Pairs) -> Tensor:
    e, h = p.settings.label_smoothing, p.margin
    return (-(1 - e) * F.log_sigmoid(h) + e * F.log_sigmoid(-h)) / (1 - 2 * e)


def _exo(p: Pairs) -> Tensor:
    e, log_p, log_q = p.settings.label_smoothing, F.log_sigmoid(p.margin), F.log_sigmoid(-p.margin)
    return log_p.exp() * (log_p - math.log(1 - e)) + log_q.exp() * (log_q - math.log(e))


def _nca(p: Pairs) -> Tensor:
    d_c, d_r = p.settings.beta * p.d_c, p.settings.beta * p.d_r
    return -F.log_sigmoid(d_c) - 0.5 * F.log_sigmoid(-d_c) - 0.5 * F.log_sigmoid(-d_r)


def _bco(p: Pairs) -> Tensor:
    beta = p.settings.beta
    return -F.log_sigmoid(beta * p.d_c) - F.log_sigmoid(-beta * p.d_r)


def _sppo(p: Pairs) -> Tensor:
    half = 0.5 / p.settings.beta
    return (p.d_c - half) ** 2 + (p.d_r + half) ** 2


def _apo_zero(p: Pairs) -> Tensor:
    beta = p.settings.beta
    return 1 - F.sigmoid(beta * p.d_c) + F.sigmoid(beta * p.d_r)


def _apo_down(p: Pairs) -> Tensor:
    return F.sigmoid(p.settings.beta * p.d_c) + 1 - F.sigmoid(p.margin)


def _discopop(p: Pairs) -> Tensor:
    h = p.margin
    w = F.sigmoid(h / p.settings.discopop_tau)
    return (1 - w) * -F.log_sigmoid(h) + w * (-h).exp()


def _aot(p: Pairs) -> Tensor:
    policy, reference = (p.c - p.r).sort(), (p.ref_c - p.ref_r).sort()
    return _smoothed(p.settings.beta * (policy - reference), p)


def _dpop(p: Pairs) -> Tensor:
    penalty = p.settings.dpop_lambda * F.relu(-p.d_c)
    return -F.log_sigmoid(p.settings.beta * (p.d_c - p.d_r - penalty))


def _kto_pair(p: Pairs) -> Tensor:
    # Both terms of a pair, so that the mean over pairs is that over answers.
    beta = p.settings.beta
    chosen = 1 - F.sigmoid(beta * (p.d_c - F.relu(p.d_r.mean())))
    rejected = 1 - F.sigmoid(beta * (F.relu(p.d_c.mean()) - p.d_r))
    return 0.5 * (chosen + rejected)


def _normalized(p: Pairs) -> Tensor:
    mean = 0.5 * (p.n_c + p.n_r)
    return _smoothed(p.settings.beta * mean * p.mean_margin, p)


def _simpo(p: Pairs) -> Tensor:
    beta, gamma = p.settings.beta, p.settings.simpo_gamma
    return _smoothed(beta * p.mean_margin - gamma, p)


def _odds_ratio(p: Pairs) -> Tensor:
    return -p.settings.beta * F.log_sigmoid(p.log_odds)


# The loss of each pair by its name; the mean over the pairs of the global batch is minimized.
PAIR_LOSSES: dict[str, Callable[[Pairs], Tensor]] = {
    "sigmoid": lambda p: _smoothed(p.margin, p),
    "robust": _robust,
    "hinge": lambda p: F.relu(1 - p.margin),
    "ipo": lambda p: (p.mean_margin - 0.5 / p.settings.beta) ** 2,
    "sigmoid_norm": lambda p: _smoothed(p.settings.beta * p.mean_margin, p),
    "exo_pair": _exo,
    "nca_pair": _nca,
    "bco_pair": _bco,
    "sppo_hard": _sppo,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "discopop": _discopop,
    "aot": _aot,
    "aot_unpaired": lambda p: _smoothed(p.settings.beta * (p.d_c.sort() - p.d_r.sort()), p),
    "dpop": _dpop,
    "kto_pair": _kto_pair,
    "normalized": _normalized,
    "sft_per_pair": lambda p: -p.c / p.n_c,
    "cpo": lambda p: _smoothed(p.margin, p),
    "simpo": _simpo,
    "or": _odds_ratio,
    "orpo": _odds_ratio,
}


def pair_losses(p: Pairs, weights: dict[str, float]) -> Tensor:
    """`[P]`: the weighted sum of several losses of each pair."""
    losses = [weight * PAIR_LOSSES[name](p) for name, weight in weights.items()]
    return sum(losses[1:], losses[0])


def kto_losses(
    d_S: Tensor, is_desirable_S: Tensor, baseline: Tensor, name: str, settings: PreferenceConfig
) -> Tensor:
    """`[S]`: the loss of each rated answer.

    Args:
        d_S: log-ratios of the answers.
        is_desirable_S: float32, 1 or 0.
        baseline: z0, the mean log-ratio of mismatched answers, at least 0; a scalar.
        name: `kto` or `apo_zero_unpaired`.
    """
    beta = settings.beta
    if name == "kto":
        desirable = settings.desirable_weight * (1 - F.sigmoid(beta * (d_S - baseline)))
        undesirable = settings.undesirable_weight * (1 - F.sigmoid(beta * (baseline - d_S)))
    else:
        desirable = settings.desirable_weight * (1 - F.sigmoid(beta * d_S))
        undesirable = settings.undesirable_weight * F.sigmoid(beta * d_S)
    return is_desirable_S * desirable + (1 - is_desirable_S) * undesirable
