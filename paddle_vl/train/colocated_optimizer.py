"""The optimizer of a colocated model: one `Optimizer` for its encoder, one for its language model.

Their gradients are reduced, and their state is sharded, over different ranks. Norm, clipping, the
guard against non-finite updates and the learning rate are common to both.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.checkpoint.safetensors_io import TensorToWrite
from paddle_vl.nn.master_weights import ParameterStore
from paddle_vl.nn.parameter_table import ParamSpec
from paddle_vl.parallel.ranks import ONE_RANK, SingleRank
from paddle_vl.train.optimizer import Optimizer


class ColocatedOptimizer:
    """Optimizers of disjoint parameters that step together; has the methods of `Optimizer`.

    Args:
        optimizers: in the order in which all ranks save their state.
        store: of the parameters of all of them.
    """

    def __init__(self, optimizers: Sequence[Optimizer], store: ParameterStore):
        self.optimizers, self.store = list(optimizers), store

    @property
    def tensors_with_specs(self) -> list[tuple[Tensor, ParamSpec]]:
        return [entry for each in self.optimizers for entry in each.tensors_with_specs]

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for each in self.optimizers for tensor in each.tensors]

    def use_buckets(self) -> None:
        for each in self.optimizers:
            each.use_buckets()

    def begin_step(self, step: int) -> None:
        for each in self.optimizers:
            each.begin_step(step)

    def collect_gradients(self) -> None:
        for each in self.optimizers:
            each.collect_gradients()

    def squared_norm(self, ranks: SingleRank = ONE_RANK) -> Tensor:
        return sum((each.squared_norm(ranks) for each in self.optimizers), paddle.zeros([]))

    def reached(self) -> np.ndarray:
        return np.maximum.reduce([each.reached() for each in self.optimizers])

    def update(self, learning_rate: float, norm: float, reached: np.ndarray | None = None) -> None:
        for each in self.optimizers:
            each.update(learning_rate, norm, reached)

    def update_average(self, decay: float, is_good: Tensor) -> None:
        for each in self.optimizers:
            each.update_average(decay, is_good)

    def swap_average(self) -> None:
        for each in self.optimizers:
            each.swap_average()

    def clear_gradients(self) -> None:
        for each in self.optimizers:
            each.clear_gradients()

    def state_tensors(self) -> dict[str, Tensor]:
        return {
            name: state for each in self.optimizers for name, state in each.state_tensors().items()
        }

    def state_to_write(self) -> list[TensorToWrite]:
        return [tensor for each in self.optimizers for tensor in each.state_to_write()]

    def load_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        """See `Optimizer`; each takes its own entries."""
        for each in self.optimizers:
            each.load_state(arrays)
