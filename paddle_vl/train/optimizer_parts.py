"""The optimizer of a colocated model: one `Optimizer` for each of its two parts.

Their gradients are reduced, and their state is sharded, over different ranks. Norm, clipping, the
guard against non-finite updates and the learning rate are common to both.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import paddle
from paddle import Tensor

from paddle_vl.checkpoint.safetensors_io import TensorToWrite
from paddle_vl.nn.adamw import gradient_of
from paddle_vl.nn.master_weights import ParameterStore
from paddle_vl.nn.parameter_table import ParamSpec
from paddle_vl.parallel.ranks import ONE_RANK, SingleRank
from paddle_vl.train.optimizer import Optimizer


class PartsOptimizer:
    """Optimizers of disjoint parameters that step together; has the methods of `Optimizer`.

    Args:
        parts: in the order in which all ranks save them.
        store: of the parameters of all parts.
    """

    def __init__(self, parts: Sequence[Optimizer], store: ParameterStore):
        self.parts, self.store = list(parts), store

    @property
    def tensors_with_specs(self) -> list[tuple[Tensor, ParamSpec]]:
        return [entry for part in self.parts for entry in part.tensors_with_specs]

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for part in self.parts for tensor in part.tensors]

    @property
    def masks_updates(self) -> bool:
        return self.parts[0].masks_updates

    @masks_updates.setter
    def masks_updates(self, masks: bool) -> None:
        for part in self.parts:
            part.masks_updates = masks

    def use_buckets(self) -> None:
        for part in self.parts:
            part.use_buckets()

    def collect_gradients(self) -> None:
        for part in self.parts:
            part.collect_gradients()

    @property
    def max_grad_norm(self) -> float:
        return self.parts[0].max_grad_norm

    @paddle.no_grad()
    def squared_norm(self, ranks: SingleRank = ONE_RANK) -> Tensor:
        """See `Optimizer`; a part without any gradient, in a step without items, counts as zero.

        Raises:
            RuntimeError: no part has a gradient.
        """
        present = [
            part
            for part in self.parts
            if any(gradient_of(tensor) is not None for tensor in part.tensors)
        ]
        # One of the others raises if it has parameters to train.
        return sum((part.squared_norm(ranks) for part in present or self.parts), paddle.zeros([]))

    def update(self, learning_rate: float, norm: Tensor, is_good: Tensor) -> None:
        for part in self.parts:
            part.update(learning_rate, norm, is_good)

    def clear_gradients(self) -> None:
        for part in self.parts:
            part.clear_gradients()

    def state_tensors(self) -> dict[str, Tensor]:
        return {name: state for part in self.parts for name, state in part.state_tensors().items()}

    def state_to_write(self) -> list[TensorToWrite]:
        return [tensor for part in self.parts for tensor in part.state_to_write()]

    def bytes_to_write(self) -> int:
        return sum(part.bytes_to_write() for part in self.parts)

    def load_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        """See `Optimizer`; each part takes its own entries."""
        for part in self.parts:
            part.load_state(arrays)
