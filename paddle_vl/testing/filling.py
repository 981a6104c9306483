"""Parameters of one model given to another of the same configuration."""

from typing import NamedTuple

import numpy as np
from paddle import nn

from paddle_vl.checkpoint.reading import fill_parameters


class _Array(NamedTuple):
    """An array in the place of a checkpoint's tensor."""

    array: np.ndarray

    @property
    def dtype(self) -> str:
        return "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def read(self, *, must_be_finite: bool = True) -> np.ndarray:
        return self.array


def copy_parameters(full: nn.Layer, model: nn.Layer) -> None:
    """Give a model under any placement its shards of the parameters of a single device's.

    Args:
        full, model: with `stored_parameters()`.
    """
    stored = {
        item.key: _Array(item.layout.to_stored(item.of_own(item.parameter.numpy())))
        for item in full.stored_parameters()
    }
    fill_parameters(model.stored_parameters(), stored)
