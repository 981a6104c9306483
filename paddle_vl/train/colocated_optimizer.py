"""The optimizer of a colocated model: one `Optimizer` for its encoder, one for its language model.

Their gradients are reduced, and their state is sharded, over different ranks. Norm, clipping, the
guard against non-finite updates and the learning rate are common to both.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.checkpoint.safetensors_io import TensorToWrite
from paddle_vl.nn.master_weights import ParameterStore
from paddle_vl.nn.parameter_table import ParamSpec
from paddle_vl.parallel.ranks import ONE_RANK, SingleRank
from paddle_vl.train.optimizer import Optimizer


def _of_each(name: str) -> Callable[..., None]:
    """A method that calls the method of this name of each optimizer."""

    def call(self: "ColocatedOptimizer", *args: Any) -> None:
        for each in self.optimizers:
            getattr(each, name)(*args)

    return call


class ColocatedOptimizer(Optimizer):
    """Optimizers of disjoint parameters that step together.

    Args:
        optimizers: in the order in which all ranks save their state.
        store: of the parameters of all of them.
    """

    def __init__(self, optimizers: Sequence[Optimizer], store: ParameterStore):
        self.optimizers, self.store = list(optimizers), store

    use_buckets, begin_step, collect_gradients = map(
        _of_each, ("use_buckets", "begin_step", "collect_gradients")
    )
    update, clear_gradients = map(_of_each, ("update", "clear_gradients"))
    update_average, swap_average = map(_of_each, ("update_average", "swap_average"))
    # Each takes its own entries.
    load_state = _of_each("load_state")

    @property
    def tensors_with_specs(self) -> list[tuple[Tensor, ParamSpec]]:
        return [entry for each in self.optimizers for entry in each.tensors_with_specs]

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for tensor, _ in self.tensors_with_specs]

    def squared_norm(self, ranks: SingleRank = ONE_RANK) -> Tensor:
        return sum((each.squared_norm(ranks) for each in self.optimizers), paddle.zeros([]))

    def reached(self) -> np.ndarray:
        return np.maximum.reduce([each.reached() for each in self.optimizers])

    def state_tensors(self) -> dict[str, Tensor]:
        return {
            name: state for each in self.optimizers for name, state in each.state_tensors().items()
        }

    def state_to_write(self) -> list[TensorToWrite]:
        return [tensor for each in self.optimizers for tensor in each.state_to_write()]
