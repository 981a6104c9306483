"""What a run minimises: loss terms, each a sum divided by a count over a whole step.

The micro-batches of all processes make one step as if they were one batch: sums and counts travel,
and a mean is made once. An objective says what a batch counts, what its output adds to the loss,
and what every process must run where layers are collective.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import paddle
from paddle import Tensor, nn

from paddle_vl.batch.positions import real_lengths
from paddle_vl.train.feeding.in_step import empty_batch, has_visual, with_unused_image
from paddle_vl.train.phases import Phase, phase
from paddle_vl.train.reporting.expert_load import expert_counts, load_summary
from paddle_vl.train.reporting.gauges import Gauge

Batch = dict[str, Any]
_HOST_ARRAYS = frozenset({"image_grid_thw", "video_grid_thw", "cu_seqlens"})


class Objective(Protocol):
    """The loss of a family of models.

    Attributes:
        terms: the names of its terms and their weights in the loss.
        reported_counts: for terms whose count is told in the metrics, its name there.
    """

    terms: Mapping[str, float]
    reported_counts: Mapping[str, str]

    def counts(self, batch: Batch) -> list[int]:
        """By how much a batch adds to what each term is divided by."""

    def check_counts(self, totals: Sequence[int], num_batches: int) -> None:
        """Refuse a step that has nothing to learn from.

        Raises:
            ValueError: a count is 0, with what to look at.
        """

    def num_samples(self, batch: Batch) -> int: ...

    def num_tokens(self, batch: Batch) -> int:
        """Real tokens of a batch; 0 where tokens are not what the work consists of."""

    def num_packed_places(self, batch: Batch) -> int:
        """Tokens that packed rows have place for; 0 without."""

    def lengths(self, batch: Batch) -> list[int]:
        """Real tokens of each sample; none where tokens are not counted."""

    def asks(self, batch: Batch) -> list[bool]:
        """What a batch needs that others may not; told to all processes before a step."""

    def prepared(self, batch: Batch) -> Batch:
        """The batch with what is read of its arrays on the host, as long as they are there."""

    def is_for_device(self, name: str) -> bool:
        """Whether the model computes with an entry; it reads the others on the host."""

    def settled(self, batch: Batch, asked: Sequence[int], model: nn.Layer) -> Batch:
        """The batch as a process runs it, when so many processes asked for each of these."""

    def idle_batch(self, model: nn.Layer) -> Batch:
        """A batch that counts nothing, for a process that has run out of them."""

    def output(self, model: nn.Layer, batch: Batch) -> Any:
        """The model's output for a batch, of which the other methods make losses."""

    def share(self, output: Any, totals: Sequence[int], num_batches: int) -> tuple[Tensor, Tensor]:
        """What a batch adds to a step: to its loss, and to each of its terms `[n]`, detached."""

    def sums(self, output: Any) -> Tensor:
        """`[n]`, each term of a batch before it is divided, for evaluation."""

    def gauges(self, model: nn.Layer, counts_losses: bool) -> list[Gauge]:
        """What the metrics tell besides, of this process.

        Args:
            counts_losses: whether this process counts in sums over all of them.
        """

    def line(self, values: Mapping[str, Any]) -> dict[str, float]:
        """Entries of a metrics line from these gauges of all processes."""


class LanguageObjective:
    """The mean cross entropy over target tokens, with the load-balancing loss if there is one."""

    terms: Mapping[str, float] = {"loss": 1.0}
    reported_counts: Mapping[str, str] = {"loss": "target_tokens"}

    def counts(self, batch: Batch) -> list[int]:
        return [batch["num_target_tokens"]]

    def check_counts(self, totals: Sequence[int], num_batches: int) -> None:
        if totals[0] == 0:
            raise ValueError(
                f"the {num_batches} micro-batch(es) of this step have no target token, every "
                "label is -100: nothing can be learned from them; check that the samples have "
                "assistant turns within data.max_length"
            )

    def num_samples(self, batch: Batch) -> int:
        return len(self.lengths(batch))

    def num_tokens(self, batch: Batch) -> int:
        return int(batch["attention_mask"].sum())

    def num_packed_places(self, batch: Batch) -> int:
        return batch["input_ids"].size if "cu_seqlens" in batch else 0

    def lengths(self, batch: Batch) -> list[int]:
        return real_lengths(batch["attention_mask"], batch.get("cu_seqlens")).tolist()

    def asks(self, batch: Batch) -> list[bool]:
        return [has_visual(batch)]

    def prepared(self, batch: Batch) -> Batch:
        return batch

    def is_for_device(self, name: str) -> bool:
        return name not in _HOST_ARRAYS

    def settled(self, batch: Batch, asked: Sequence[int], model: nn.Layer) -> Batch:
        if asked[0] and model.placement.layers_are_collective and not has_visual(batch):
            return with_unused_image(batch, model.config.vision_config)
        return batch

    def idle_batch(self, model: nn.Layer) -> Batch:
        return empty_batch(model.placement.row_part.size)

    def output(self, model: nn.Layer, batch: Batch) -> Any:
        with phase(Phase.HOST_TO_DEVICE):
            batch = {
                name: paddle.to_tensor(value)
                if isinstance(value, np.ndarray) and self.is_for_device(name)
                else value
                for name, value in batch.items()
            }
        return model(**batch)

    def share(self, output: Any, totals: Sequence[int], num_batches: int) -> tuple[Tensor, Tensor]:
        loss = output.share_of_step(totals[0], num_batches)
        return loss, loss.detach().astype("float32").reshape([1])

    def sums(self, output: Any) -> Tensor:
        return output.loss_sum.reshape([1])

    def gauges(self, model: nn.Layer, counts_losses: bool) -> list[Gauge]:
        counts = expert_counts(model)
        if counts is None:
            return []
        counts = counts if counts_losses else paddle.zeros_like(counts)
        return [Gauge("tokens_per_expert", "sum", counts)]

    def line(self, values: Mapping[str, Any]) -> dict[str, float]:
        found = values.get("tokens_per_expert")
        return {} if found is None else load_summary(found)


LANGUAGE = LanguageObjective()


def weighted(means: Sequence[float], objective: Objective) -> float:
    """The loss from its terms."""
    weights = objective.terms.values()
    return sum(weight * mean for weight, mean in zip(weights, means, strict=True) if weight)


def no_terms(objective: Objective) -> Tensor:
    """`[n]` zeros."""
    return paddle.zeros([len(objective.terms)])
