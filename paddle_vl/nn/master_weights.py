"""Float32 copies of half-precision parameters, which are what an optimizer updates.

One regime for every half-precision model, on one process or many: parameters and activations are
bfloat16, the gradients of micro-batches are added up in float32, the optimizer's weights and state
are float32, and the parameters are their roundings. `paddle_vl.parallel.sharding` does the same
with copies that are divided over processes.
"""

from collections.abc import Iterable

import numpy as np
import paddle
from paddle import Tensor
from paddle.base.framework import EagerParamBase

# What a copy tells the steps behind the backward pass about its parameter.
MARKS = ("is_partial", "is_distributed", "is_tied", "is_tied_copy", "is_expert")


def master_copy(parameter: Tensor, value: Tensor) -> Tensor:
    """A float32 leaf of some or all of a parameter's values, with the parameter's marks.

    Args:
        value: its storage is taken over if it is float32.
    """
    copy = EagerParamBase.from_tensor(value.astype("float32"), trainable=True)
    copy_marks(parameter, copy)
    return copy


def gradient_of(tensor: Tensor) -> Tensor | None:
    """What the optimizer takes as a tensor's gradient: fleet's float32 `main_grad`, or its own."""
    main = getattr(tensor, "main_grad", None)
    return tensor.grad if main is None else main


def copy_marks(parameter: Tensor, copy: Tensor) -> None:
    """Have a copy or a part of a parameter say of itself what the parameter says."""
    for mark in MARKS:
        if hasattr(parameter, mark):
            setattr(copy, mark, getattr(parameter, mark))


class WideGradients:
    """Float32 sums of half-precision gradients over the micro-batches of a step.

    Args:
        parameters: those of a half type; their own gradients are dropped when they are taken.
    """

    def __init__(self, parameters: Iterable[Tensor]):
        self.parameters = list(parameters)
        self._sums: dict[int, Tensor] = {}

    @paddle.no_grad()
    def take(self) -> None:
        """Add what a backward pass has left."""
        for parameter in self.parameters:
            if parameter.grad is None:
                continue
            grad, total = parameter.grad.astype("float32"), self._sums.get(id(parameter))
            self._sums[id(parameter)] = grad if total is None else total.add_(grad)
            parameter.clear_gradient(False)

    def give(self, parameter: Tensor) -> Tensor | None:
        """The sum of a parameter's gradients, which is forgotten here; None without any."""
        return self._sums.pop(id(parameter), None)

    def sums(self) -> list[Tensor]:
        """Those that are held now."""
        return list(self._sums.values())


class MasterWeights:
    """Whole float32 copies of the trained half-precision parameters of a model.

    The interface of `paddle_vl.parallel.sharding.Sharding`, of which this is the undivided case.

    Args:
        parameters: of the model, trained and frozen; each is copied before the next is asked for.
    """

    stage = 0

    def __init__(self, parameters: Iterable[Tensor]):
        halves: list[Tensor] = []
        self._masters: dict[int, Tensor] = {}
        with paddle.no_grad():
            for parameter in parameters:
                if not parameter.stop_gradient and parameter.dtype != paddle.float32:
                    halves.append(parameter)
                    self._masters[id(parameter)] = master_copy(parameter, parameter.detach())
        self._gradients = WideGradients(halves)

    def shard_of(self, parameter: Tensor) -> Tensor:
        """What the optimizer updates: the copy, or a float32 parameter itself."""
        return self._masters.get(id(parameter), parameter)

    def copies(self) -> list[Tensor]:
        """What is held beside the parameters."""
        return list(self._masters.values())

    def gradient_sums(self) -> list[Tensor]:
        """What is held of gradients beside those of parameters and copies."""
        return self._gradients.sums()

    def begin_step(self, num_micro_batches: int) -> None:
        """Tell how many micro-batches the step has."""

    def end_micro_batch(self) -> None:
        """Behind each micro-batch's backward pass."""
        self._gradients.take()

    def end_backward(self) -> None:
        """Behind the last micro-batch: the copies get their gradients."""
        self._gradients.take()
        for parameter in self._gradients.parameters:
            grad = self._gradients.give(parameter)
            if grad is not None:
                self.shard_of(parameter).grad = grad

    @paddle.no_grad()
    def all_gather_parameters(self) -> None:
        """Behind the optimizer's step: parameters are the roundings of their copies."""
        for parameter in self._gradients.parameters:
            paddle.assign(self.shard_of(parameter).astype(parameter.dtype), parameter)

    def gathered_value(self, parameter: Tensor, value: Tensor | None = None) -> Tensor:
        """The parameter's own value, or a `value` of its copy's shape as it is."""
        return parameter if value is None else value

    def own_shard(self, parameter: Tensor, whole: np.ndarray) -> np.ndarray:
        """All of an array in the parameter's shape."""
        return whole
