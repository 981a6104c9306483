"""Errors of predicted chunks of actions on held-out demonstrations, in the units of the data.

Shapes: B batch, C steps of a chunk, A action dims of the data, G data sets.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from paddle_vl.families.policy.normalize import Normalizer

# Chunks that are kept to be looked at.
_NUM_SHOWN = 4


class ActionErrors:
    """A `paddle_vl.families.base.Measure`: mean absolute and root mean squared error.

    Steps after the end of an episode, and dims that a robot has not, do not count.

    Args:
        predict: normalized chunks `[B, C, A or more]` for a batch of `PolicyCollator`.
        normalizer: turns them into actions.
        num_dims: A.
        datasets: their names, in the order of the rows of the statistics.
        parts: named dims whose errors are told together too.
    """

    def __init__(
        self,
        predict: Callable[[Mapping[str, Any]], np.ndarray],
        normalizer: Normalizer,
        num_dims: int,
        datasets: Sequence[str],
        parts: Mapping[str, Sequence[int]],
    ):
        self.predict, self.normalizer, self.datasets = predict, normalizer, datasets
        self.parts: dict[str, Sequence[int]] = {str(dim): [dim] for dim in range(num_dims)}
        self.parts |= parts
        self.num_dims = num_dims
        self.begin()

    def begin(self) -> None:
        # Absolute errors, squared errors, and their number, `[3, G, A]`.
        self.sums = np.zeros((3, len(self.datasets), self.num_dims))
        self.shown: list[dict[str, Any]] = []

    def add(self, batch: Mapping[str, Any]) -> None:
        group_B = batch["group_index"]
        predicted_BCA, true_BCA = (
            self.normalizer.unnormalize({"actions": x[:, :, : self.num_dims]}, group_B)["actions"]
            for x in (self.predict(batch), batch["actions"])
        )
        is_real_BC = ~np.asarray(batch.get("actions_is_pad", np.zeros(true_BCA.shape[:2], bool)))
        dims_B = batch.get("real_action_dim", np.full(len(true_BCA), self.num_dims))
        in_use_BA = np.arange(self.num_dims) < dims_B[:, None]
        counts_BCA = is_real_BC[:, :, None] & in_use_BA[:, None]
        errors_BCA = np.where(counts_BCA, predicted_BCA.astype(np.float64) - true_BCA, 0.0)
        for sums_GA, values_BCA in zip(
            self.sums, (np.abs(errors_BCA), errors_BCA**2, counts_BCA), strict=True
        ):
            np.add.at(sums_GA, group_B, values_BCA.sum(axis=1))
        for row in range(len(true_BCA)):
            steps, dims = is_real_BC[row], in_use_BA[row]
            if len(self.shown) < _NUM_SHOWN and steps.any():
                pair = {"predicted": predicted_BCA, "true": true_BCA}
                chunks = {name: x[row][steps][:, dims].tolist() for name, x in pair.items()}
                self.shown.append({"dataset": self.datasets[group_B[row]], **chunks})

    def entries(self, sums: np.ndarray) -> dict[str, float]:
        """`action_mae/NAME` and `action_rmse/NAME` of every dim and part, of the sums of all ranks;
        of several data sets `action_mae/DATASET/NAME`."""
        found = {}
        for number, dataset in enumerate(self.datasets):
            prefix = f"{dataset}/" if len(self.datasets) > 1 else ""
            for name, dims in self.parts.items():
                absolute, squared, count = sums[:, number, list(dims)].sum(axis=1).tolist()
                if count:
                    found[f"action_mae/{prefix}{name}"] = absolute / count
                    found[f"action_rmse/{prefix}{name}"] = (squared / count) ** 0.5
        return found
