"""Loss and batch adapter of learning from rewards.

A micro-batch has sampled answers as samples. The model gives log-probabilities and entropies of
their learned tokens at the sampling temperature; the losses are in `grpo.losses`.

Every term has its own divisor, counted over all micro-batches and ranks of an update: answers,
answers times the longest length, learned tokens, micro-batches.

Shapes: S answers, N learned tokens of this rank.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import paddle
from paddle import Tensor, nn

from paddle_vl.batch.rows import IGNORE_INDEX
from paddle_vl.batch.schema import Batch
from paddle_vl.families.vlm.grpo.losses import (
    Answers,
    aggregated,
    aggregation,
    clip_shares,
    clips_answers,
    kl_sums,
    policy_sums,
    vespo_weights,
)
from paddle_vl.families.vlm.grpo.rows import Rows
from paddle_vl.families.vlm.grpo.settings import CLIPPED, GRPOConfig
from paddle_vl.families.vlm.inputs.rollouts import REFERENCE, RolloutBatch, without_rollouts
from paddle_vl.families.vlm.modeling.model import VLOutput
from paddle_vl.families.vlm.preference.objective import PreferenceStage
from paddle_vl.families.vlm.training.objective import VLBatchAdapter, VLLoss
from paddle_vl.families.vlm.training.pipeline import VLStage
from paddle_vl.nn.placement import Context

_CLIPS = ("low", "high", "region")
# Of the sampler's log-probabilities and the trainer's, of tokens; the largest of micro-batches.
GAP_MEAN = "sampling/sampling_logp_difference/mean"
GAP = (
    *(GAP_MEAN, "sampling/sampling_logp_difference/max"),
    *(f"sampling/importance_sampling_ratio/{name}" for name in ("mean", "min", "max")),
)


@dataclass
class RolloutOutput:
    """The model's output by answer.

    Attributes:
        aux_loss: of the model, for load balance; None without it.
        is_real: `[S]`, 1 of answers that were sampled.
    """

    answers: Answers
    is_real: Tensor
    aux_loss: Tensor | None = None

    @classmethod
    def of(
        cls, output: VLOutput, batch: RolloutBatch, settings: GRPOConfig, context: Context
    ) -> "RolloutOutput":
        """The output of a batch on the device."""
        tokens = output.tokens
        assert tokens is not None, "the collator asks for log-probabilities"
        is_target_N = batch.target_rows[1] != IGNORE_INDEX
        rows = Rows(
            batch.target_branches, is_target_N, batch.answer_lengths, batch.target_rows[0],
            context.total, (context.rank, context.size),
        )  # fmt: skip
        answers = Answers(
            settings, rows, tokens.log_probs, tokens.entropy, batch.advantages,
            batch.old_log_probs, batch.reference_log_probs, batch.sampler_log_probs,
        )  # fmt: skip
        return cls(answers, batch.is_real, output.aux_loss)


class RolloutLoss(VLLoss):
    """The loss of sampled answers, with TRL's metrics.

    Args:
        aux_weight: weight of the load-balancing loss; None of a model without it.
    """

    reported_counts: Mapping[str, str] = {"entropy": "target_tokens"}

    def __init__(self, settings: GRPOConfig, aux_weight: float | None = None):
        self.settings = settings
        tokens, answers = "num_target_tokens", "num_rows"
        self._adds_kl = settings.loss_type == "real" and not settings.kl_in_reward
        # Weight and divisor of each term, the latter by its entry in a batch.
        terms: dict[str, tuple[float, str]] = {
            "policy_loss": (1.0, aggregation(settings)[1]),
            "entropy": (0.0, tokens),
        }
        if settings.entropy_coef:
            terms["entropy_bonus"] = -settings.entropy_coef, tokens
        if aux_weight is not None:
            terms["aux_loss"] = aux_weight, "num_batches"
        if settings.has_reference:
            # Beside real, otherwise in the policy's term or in rewards.
            terms["kl"] = (settings.beta if self._adds_kl else 0.0), tokens
        divisor = answers if clips_answers(settings) else tokens
        if settings.loss_type in (*CLIPPED, "gmpo", "rloo"):
            terms |= {f"clip_ratio/{name}_mean": (0.0, divisor) for name in _CLIPS}
            ends = ("clip_ratio/low_min", "clip_ratio/high_max")
            terms |= dict.fromkeys(ends, (0.0, "num_learned_batches"))
        elif settings.loss_type in ("cispo", "cispo_range"):
            terms["cispo_clip_ratio"] = 0.0, divisor
        elif settings.loss_type == "vespo":
            terms["vespo/phi_seq_mean"] = 0.0, answers
        terms |= {name: (0.0, tokens if "mean" in name else "num_learned_batches") for name in GAP}
        self.terms = {name: weight for name, (weight, _) in terms.items()}
        self.divisors = [divisor for _, divisor in terms.values()]

    def check_counts(self, totals: Sequence[int], num_batches: int) -> None:
        """See `Loss`. Answers of which nothing is learned are no error: their loss is 0."""

    def share(
        self, output: RolloutOutput, totals: Sequence[int], num_batches: int
    ) -> tuple[Tensor, Tensor]:
        shares = {
            name: value / max(total, 1)
            for (name, value), total in zip(self._sums(output).items(), totals, strict=True)
        }
        trained = [w * shares[name] for name, w in self.terms.items() if w]
        return sum(trained[1:], trained[0]), paddle.stack(list(shares.values())).detach()

    def sums(self, output: RolloutOutput) -> Tensor:
        return paddle.stack(list(self._sums(output).values()))

    def _sums(self, output: RolloutOutput) -> dict[str, Tensor]:
        """The sum of each term over the micro-batch, in the order of `terms`."""
        a, settings = output.answers, self.settings
        sums_S = policy_sums(a)
        entropy_S = a.rows.sum(a.entropy)
        found = {"entropy": entropy_S.detach().sum()}
        if "kl" in self.terms:
            if settings.kl_in_reward:
                assert a.reference is not None, "a run with beta has a reference"
                kl_S = a.rows.sum(a.trainer_old - a.reference)
            else:
                kl_S = kl_sums(a)
            if not (self._adds_kl or settings.kl_in_reward):
                sums_S, kl_S = sums_S + settings.beta * kl_S, kl_S.detach()
            found["kl"] = kl_S.sum()
        found["policy_loss"] = aggregated(sums_S * output.is_real, a)
        if "entropy_bonus" in self.terms:
            found["entropy_bonus"] = self._bonus(a, entropy_S)
        if output.aux_loss is not None:
            # An idle batch counts none.
            found["aux_loss"] = output.aux_loss * output.is_real.max()
        with paddle.no_grad():
            found |= self._clips(output)
            if "vespo/phi_seq_mean" in self.terms:
                found["vespo/phi_seq_mean"] = (vespo_weights(a) * output.is_real).sum()
            found |= dict(zip(GAP, self._gaps(a), strict=True))
        return {name: found[name] for name in self.terms}

    def _bonus(self, a: Answers, entropy_S: Tensor) -> Tensor:
        """The sum of entropies over tokens; of those that keep a policy term their mean times the
        number of all, where the loss is a mean over answers."""
        chosen_N = a.high_entropy
        if chosen_N is None:
            return entropy_S.sum()
        total = a.rows.sum(a.entropy * chosen_N).sum()
        if aggregation(self.settings)[1] == "num_target_tokens":
            return total
        return total * a.rows.lengths.sum() / chosen_N.sum().clip(min=1.0)

    def _clips(self, output: RolloutOutput) -> dict[str, Tensor]:
        a, found = output.answers, {}
        lengths_S = a.rows.lengths
        for name, clips in clip_shares(a).items():
            of_answers = clips_answers(self.settings)
            means_S = clips if of_answers else a.rows.mean(clips)
            total = clips * output.is_real if of_answers else a.rows.sum(clips)
            if name == "cispo_clip_ratio":
                return {name: total.sum()}
            found[f"clip_ratio/{name}_mean"] = total.sum()
            # An answer of which nothing is learned has no share.
            is_learned_S = lengths_S > 0
            if name == "low":
                means_S = paddle.where(is_learned_S, means_S, paddle.ones_like(means_S))
                least = means_S.min() * is_learned_S.any().astype("float32")
                found["clip_ratio/low_min"] = least
            elif name == "high":
                found["clip_ratio/high_max"] = (means_S * is_learned_S.astype("float32")).max()
        return found

    @staticmethod
    def _gaps(a: Answers) -> list[Tensor]:
        """The values of `GAP`."""
        is_learned = (a.rows.lengths.sum() > 0).astype("float32")
        gap_N = a.trainer_old - a.sampled
        # A token that stands for none.
        gap_N = paddle.where(a.rows.is_target, gap_N, paddle.zeros_like(gap_N))
        ratio_N, is_target_N = gap_N.exp(), a.rows.is_target.astype("float32")
        means = [a.rows.total((x * is_target_N).sum()) for x in (gap_N.abs(), ratio_N)]
        most, low, high = (
            a.rows.largest(x.max()) * is_learned for x in (gap_N.abs(), -ratio_N, ratio_N)
        )
        return [means[0], most, means[1], -low, high]

    def values(self, output: RolloutOutput) -> Tensor:
        """`[N]`: the log-probabilities, which passes before an update keep."""
        return output.answers.log_probs.detach()

    def other_batches(self, batches: Sequence[Batch]) -> list[Batch]:
        """See `paddle_vl.train.reference.ComparingRunner`."""
        return []

    def compared(
        self,
        batches: Sequence[Batch],
        reference: Sequence[Tensor],
        own: Sequence[Tensor],
        summed: Callable[[Tensor], Tensor] | None,
    ) -> list[Batch]:
        """The batches with the reference's log-probabilities; see `ComparingRunner`."""
        found: list[Any] = list(batches)
        for number, values_N in enumerate(reference):
            found[number] = found[number] | {REFERENCE: values_N}
        return found


class RolloutAdapter(VLBatchAdapter):
    """Batches of `RolloutCollator`.

    Args:
        inner: of the model's batches under the run's schedule.
    """

    def __init__(self, inner: VLBatchAdapter, loss: RolloutLoss):
        self.inner, self.loss = inner, loss

    def synchronized(self, batch: Any, needed: Sequence[int], model: nn.Layer) -> Any:
        return self.inner.synchronized(batch, needed, model)

    def idle_batch(self, model: nn.Layer) -> Any:
        counts = (0,) * len(self.loss.divisors)
        return without_rollouts(self.inner.idle_batch(model) | {"counts": counts})

    def forward(self, model: Any, batch: Any) -> Any:
        found = model(batch)
        # Of prompts the next tokens.
        if not batch.returns_log_probs:
            return found
        context = model.placement.ops.context
        return RolloutOutput.of(found, batch, self.loss.settings, context)


class RolloutStage(PreferenceStage):
    """A pipeline stage; the last one gives each answer's tokens. See `ModelChunk`.

    Args:
        stage: of the model under the run's schedule.
    """

    def __init__(self, stage: VLStage, settings: GRPOConfig):
        super().__init__(stage)
        self.settings = settings

    def output_of(self, found: VLOutput, batch: Any) -> Any:
        if not batch.returns_log_probs:
            return found
        context = self.stage.model.placement.ops.context
        return RolloutOutput.of(found, batch, self.settings, context)
