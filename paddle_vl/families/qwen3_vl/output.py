"""What a Qwen3-VL returns."""

from dataclasses import dataclass

from paddle import Tensor


@dataclass
class Qwen3VLOutput:
    """What a call returns.

    Attributes:
        logits: `[B, L, V]`; of V this rank's part under model parallelism.
        loss: mean cross entropy over the target tokens of the batch; None without labels. A batch
            without a single target gives 0, where HF gives NaN. With `aux_loss`, and that times the
            configuration's `router_aux_loss_coef`.
        loss_sum: the cross entropy's sum, for whoever averages over several batches.
        num_target_tokens: how many tokens that is; the batch's own host number when it has one.
        aux_loss: how unevenly the experts were used, see `LoadBalance`; None unless asked for.
        aux_weight: what it counts in a loss.
    """

    logits: Tensor
    loss: Tensor | None = None
    loss_sum: Tensor | None = None
    num_target_tokens: int | Tensor | None = None
    aux_loss: Tensor | None = None
    aux_weight: float = 0.0

    def share_of_step(self, num_target_tokens: int, num_batches: int) -> Tensor:
        """What this batch adds to the loss of a step.

        Args:
            num_target_tokens: of all batches of the step, by which the cross entropy is a mean.
            num_batches: how many batches that is. The auxiliary loss, which is about all tokens of
                a batch, is their mean.
        """
        loss = self.loss_sum / num_target_tokens
        if self.aux_loss is not None:
            loss = loss + self.aux_weight * self.aux_loss / num_batches
        return loss
