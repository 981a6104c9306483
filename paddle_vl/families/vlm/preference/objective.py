"""Loss and batch adapter of preference training.

A micro-batch has the answers of its pairs as samples, so both of a pair are in one forward pass.
The model gives log-probabilities of their tokens; this module sums them by answer and compares the
sums with the reference's, which a pass without gradient has computed before (`train.reference`).

Every term has its own divisor, counted over the global batch: pairs or rated answers, tokens of
chosen answers, micro-batches.

Shapes: S answers (chosen and rejected in turn), P pairs, N target tokens, B, L as in
`paddle_vl.batch.schema`.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn

from paddle_vl.batch.schema import GRIDS, OF_PATCHES, OTHER_LANES, Batch
from paddle_vl.data.worker_pool import warn_once
from paddle_vl.families.vlm.inputs.preference import (
    MISMATCHED,
    REFERENCE,
    PreferenceBatch,
    empty_answers,
)
from paddle_vl.families.vlm.modeling.model import VLOutput
from paddle_vl.families.vlm.preference.losses import Pairs, kto_losses, pair_losses
from paddle_vl.families.vlm.preference.settings import PreferenceConfig
from paddle_vl.families.vlm.training.objective import VLBatchAdapter, VLLoss
from paddle_vl.families.vlm.training.pipeline import VLStage
from paddle_vl.nn.head_loss import TokenStatistics
from paddle_vl.nn.transfer import device_tensor

logger = logging.getLogger(__name__)


@dataclass
class AnswerOutput:
    """The model's output by answer.

    Attributes:
        log_probs: `[S]`, summed over the tokens, with `ld_alpha` weighted ones.
        tokens: `[S]` by statistic: sums over the tokens, not weighted.
        batch: with what the passes before the step have found.
        output: of the model.
    """

    log_probs: Tensor
    tokens: TokenStatistics
    batch: PreferenceBatch
    output: VLOutput

    @classmethod
    def of(cls, output: VLOutput, batch: PreferenceBatch) -> "AnswerOutput":
        """Sums the tokens of each answer, in the same order on every device."""
        tokens, answers_N = output.tokens, batch.target_branches
        assert tokens is not None, "the collator asks for log-probabilities"
        numbers_S = paddle.arange(batch.answer_lengths.shape[0])
        is_of_NS = (answers_N.unsqueeze(1) == numbers_S).astype("float32")

        def by_answer(values_N: Tensor) -> Tensor:
            return (values_N.unsqueeze(1) * is_of_NS).sum(axis=0)

        sums = TokenStatistics(*map(by_answer, tokens))
        weights_N = batch.target_weights
        weighted_S = sums.log_probs if weights_N is None else by_answer(tokens[0] * weights_N)
        return cls(weighted_S, sums, batch, output)

    @property
    def reference(self) -> Tensor:
        """`[S]` of the reference; zeros without one."""
        given = self.batch.reference_log_probs
        return paddle.zeros_like(self.log_probs) if given is None else given


class PreferenceLoss(VLLoss):
    """Losses of pairs or of rated answers, with rewards, accuracies and log-probabilities.

    Args:
        aux_weight: weight of the load-balancing loss; None of a model without it.
    """

    def __init__(self, settings: PreferenceConfig, aux_weight: float | None = None):
        self.settings = settings
        self.has_reference = settings.has_reference and not settings.precompute_ref_log_probs
        sides = {"chosen": "num_chosen", "rejected": "num_rejected"}
        # Weight and divisor of each term, the latter by its entry in a batch.
        terms: dict[str, tuple[float, str]] = {"preference_loss": (1.0, "num_compared")}
        if settings.sft_weight:
            terms["sft_loss"] = settings.sft_weight, "num_chosen_tokens"
        if aux_weight is not None:
            terms["aux_loss"] = aux_weight, "num_batches"
        for side, count in sides.items():
            terms |= {f"{name}/{side}": (0.0, count) for name in ("rewards", "logps")}
            terms[f"logits/{side}"] = 0.0, f"{count}_tokens"
        if settings.is_unpaired:
            terms |= {"kl": (0.0, "num_with_other")} if settings.has_baseline else {}
        else:
            names = ["rewards/margins", "rewards/accuracies"]
            names += ["log_odds_chosen", "log_odds_ratio"] if settings.has_odds else []
            terms |= dict.fromkeys(names, (0.0, "num_compared"))
        terms["mean_token_accuracy"] = 0.0, "num_chosen_tokens"
        terms["entropy"] = 0.0, "num_target_tokens"
        self.terms = {name: weight for name, (weight, _) in terms.items()}
        self.divisors = [divisor for _, divisor in terms.values()]
        of_run = "answers" if settings.is_unpaired else "pairs"
        self.reported_counts = {"preference_loss": of_run}

    def check_counts(self, totals: Sequence[int], num_batches: int) -> None:
        if totals[0] == 0:
            raise ValueError(
                f"the {num_batches} micro-batch(es) of this step have no pair or rated answer: "
                "nothing can be learned from them; check the data"
            )
        if self.settings.has_baseline and totals[list(self.terms).index("kl")] == 0:
            warn_once(
                logger,
                "kto's baseline",
                "steps whose micro-batches have one answer each have nothing to estimate kto's "
                "baseline from, and it is 0 there: raise train.per_device_train_batch_size, or "
                "data.packing_length",
            )

    def share(
        self, output: AnswerOutput, totals: Sequence[int], num_batches: int
    ) -> tuple[Tensor, Tensor]:
        sums = self._sums(output)
        shares = {
            name: value / max(total, 1)
            for (name, value), total in zip(sums.items(), totals, strict=True)
        }
        trained = [w * shares[name] for name, w in self.terms.items() if w]
        return sum(trained[1:], trained[0]), paddle.stack(list(shares.values())).detach()

    def sums(self, output: AnswerOutput) -> Tensor:
        return paddle.stack(list(self._sums(output).values()))

    def _sums(self, output: AnswerOutput) -> dict[str, Tensor]:
        """The sum of each term over the micro-batch, in the order of `terms`."""
        batch, tokens = output.batch, output.tokens
        compared = self._of_answers if self.settings.is_unpaired else self._of_pairs
        found = compared(output)
        is_chosen_S, is_real_S = batch.is_chosen, batch.is_real
        found["sft_loss"] = -(tokens.log_probs * is_chosen_S * is_real_S).sum()
        aux = output.output.aux_loss
        if aux is not None:
            # An idle batch counts none.
            found["aux_loss"] = aux * is_real_S.max()
        for side, is_own_S in (("chosen", is_chosen_S), ("rejected", 1 - is_chosen_S)):
            own_S = is_own_S * is_real_S
            found[f"logps/{side}"] = (output.log_probs * own_S).sum()
            found[f"logits/{side}"] = (tokens.mean_logit * own_S).sum()
            found[f"rewards/{side}"] = (found["rewards"] * own_S).sum()
        found["mean_token_accuracy"] = (tokens.is_top * is_chosen_S).sum()
        found["entropy"] = tokens.entropy.sum()
        return {name: found[name] for name in self.terms}

    def _of_pairs(self, output: AnswerOutput) -> dict[str, Tensor]:
        settings, is_real_P = self.settings, output.batch.is_real[::2]
        lengths_S = output.batch.answer_lengths
        sides = (output.log_probs, output.reference, lengths_S)
        (c, r), refs, lengths = ((x[::2], x[1::2]) for x in sides)
        pairs = Pairs(c, r, *refs, *lengths, settings)
        losses_P = pair_losses(pairs, settings.pair_weights) if settings.pair_weights else 0 * c
        if settings.use_weighting:
            losses_P = losses_P * self._likelihood(output)
        with paddle.no_grad():
            scale_S = settings.beta * (output.log_probs - output.reference)
            if settings.has_odds or "simpo" in settings.loss_type:
                scale_S = scale_S / lengths_S
            elif "normalized" in settings.loss_type:
                mean_P = 0.5 * (lengths_S[::2] + lengths_S[1::2])
                scale_S = scale_S / lengths_S * mean_P.repeat_interleave(2)
            margins_P = scale_S[::2] - scale_S[1::2]
            found = {
                "rewards": scale_S,
                "rewards/margins": (margins_P * is_real_P).sum(),
                "rewards/accuracies": ((margins_P > 0).astype("float32") * is_real_P).sum(),
            }
            if settings.has_odds:
                found["log_odds_chosen"] = (pairs.log_odds * is_real_P).sum()
                found["log_odds_ratio"] = (F.log_sigmoid(pairs.log_odds) * is_real_P).sum()
        return found | {"preference_loss": (losses_P * is_real_P).sum()}

    @paddle.no_grad()
    def _likelihood(self, output: AnswerOutput) -> Tensor:
        """`[P]`: WPO's weight of each pair."""
        tokens, lengths_S = output.tokens, output.batch.answer_lengths
        means_S = (tokens.log_probs - tokens.log_collision) / lengths_S
        weights_S = means_S.exp()
        return (weights_S[::2] * weights_S[1::2]).clip(max=1.0)

    def _of_answers(self, output: AnswerOutput) -> dict[str, Tensor]:
        settings, batch = self.settings, output.batch
        d_S = output.log_probs - output.reference
        baseline = paddle.zeros([]) if batch.kto_baseline is None else batch.kto_baseline
        name = settings.loss_type[0]
        losses_S = kto_losses(d_S, batch.is_chosen, baseline, name, settings)
        found = {
            "preference_loss": (losses_S * batch.is_real).sum(),
            "rewards": settings.beta * d_S.detach(),
        }
        if settings.has_baseline:
            found["kl"] = baseline * batch.has_other.sum()
        return found

    def values(self, output: AnswerOutput) -> Tensor:
        """`[S]`: what the reference's pass keeps of a micro-batch."""
        return output.log_probs.detach()

    def other_batches(self, batches: Sequence[Batch]) -> list[Batch]:
        """KTO's mismatched answers, each row's prompt with the answer of another row."""
        return [batch[MISMATCHED] for batch in batches if MISMATCHED in batch]

    def compared(
        self,
        batches: Sequence[Batch],
        reference: Sequence[Tensor],
        own: Sequence[Tensor],
        summed: Callable[[Tensor], Tensor] | None,
    ) -> list[Batch]:
        """The batches with what the passes before a step have found.

        Args:
            reference: `values` of the batches and then of `other_batches` under the reference;
                empty without one, and on pipeline stages without a head.
            own: of `other_batches` under the policy.
            summed: sums over all ranks, which all call it; None in an evaluation, where each batch
                has a baseline of its own.
        """
        found: list[Any] = list(batches)
        for number, values_S in enumerate(reference[: len(found)]):
            found[number] = found[number] | {REFERENCE: values_S}
        if not self.settings.has_baseline:
            return found
        totals = [paddle.zeros([2]) for _ in found]
        for number, policy_S in enumerate(own):
            ratios_S = policy_S - reference[len(batches) + number]
            counts_S = device_tensor(found[number].has_other)
            totals[number] = paddle.stack([(ratios_S * counts_S).sum(), counts_S.sum()])
        if summed is not None:
            totals = [summed(sum(totals[1:], totals[0]))] * len(found)
        # The mean before the clamp; 0 without any mismatched answer.
        means = [F.relu(total / count.clip(min=1.0)) for total, count in totals]
        return [batch | {"kto_baseline": mean} for batch, mean in zip(found, means, strict=True)]


class PreferenceAdapter(VLBatchAdapter):
    """Batches of `PreferenceCollator`.

    Args:
        inner: of the model's batches under the run's schedule.
    """

    def __init__(self, inner: VLBatchAdapter, loss: PreferenceLoss):
        self.inner, self.loss = inner, loss

    def synchronized(self, batch: Any, needed: Sequence[int], model: nn.Layer) -> Any:
        found: Any = self.inner.synchronized(batch, needed, model)
        if MISMATCHED in batch:
            names = (*GRIDS, *OF_PATCHES, "optional_branches", OTHER_LANES)
            shared = {name: getattr(batch, name) for name in names}
            own: Any = self.inner.synchronized(batch[MISMATCHED] | shared, needed, model)
            found = found | {MISMATCHED: own}
        return found

    def idle_batch(self, model: nn.Layer) -> Any:
        counts = (0,) * len(self.loss.divisors)
        idle = self.inner.idle_batch(model) | {"counts": counts}
        return empty_answers(idle, self.loss.settings.has_baseline)

    def forward(self, model: Any, batch: PreferenceBatch) -> AnswerOutput:
        return AnswerOutput.of(model(batch), batch)


class PreferenceStage:
    """A pipeline stage; the last one sums the tokens of each answer. See `ModelChunk`.

    Args:
        stage: of the model under the run's schedule.
    """

    def __init__(self, stage: VLStage):
        self.stage, self.layers = stage, stage.layers
        self.is_first, self.is_last = stage.is_first, stage.is_last
        self.input_shape, self.reserved_shape = stage.input_shape, stage.reserved_shape

    def __call__(self, batch: Any, rows_RD: Tensor | None = None) -> Any:
        batch = self.stage.on_device(batch)
        found = self.stage(batch, rows_RD)
        return self.output_of(found, batch) if isinstance(found, VLOutput) else found

    def output_of(self, found: VLOutput, batch: Any) -> Any:
        """The output of the last stage by answer."""
        return AnswerOutput.of(found, batch)
