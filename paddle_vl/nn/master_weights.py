"""Float32 master weights of half-precision parameters, which the optimizer updates.

Mixed precision, the same on one rank or many: parameters and activations are bfloat16; gradients of
micro-batches are accumulated in float32; master weights and optimizer state are float32; parameters
are the rounded master weights. `paddle_vl.parallel.sharding` does the same with shards.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import paddle
from paddle import Tensor
from paddle.base.framework import EagerParamBase

from paddle_vl.nn.parameter_table import Spread

if TYPE_CHECKING:
    from paddle_vl.nn.flat_buckets import FlatBucket


class ParameterStore(Protocol):
    """What the optimizer updates in place of a model's parameters: master weights or shards.

    `MasterWeights` is the unsharded implementation; `paddle_vl.parallel.sharding` has the others.
    A step: `begin_step`; forward, backward and `end_micro_batch` for each micro-batch;
    `end_backward`; the optimizer's step on `shard_of`; `all_gather_parameters`.

    Attributes:
        stage: sharding stage; 0 without.
    """

    stage: int

    def shard_of(self, parameter: Tensor) -> Tensor | None:
        """What the optimizer updates for a trained parameter: the parameter, its master weight, or
        this rank's shard of that; None if other ranks have all of it."""
        ...

    def own_shard(self, parameter: Tensor, full: np.ndarray, /) -> np.ndarray:
        """This rank's shard of an array of the parameter's shape, sharded like `shard_of`."""
        ...

    def gathered_value(self, parameter: Tensor) -> Tensor:
        """The unsharded parameter; collective where it is sharded."""
        ...

    def spread(self, parameter: Tensor, value: Tensor | None = None) -> Spread:
        """Where the parameter's values are, or those of a `value` that is sharded like `shard_of`,
        such as a moment."""
        ...

    def use_buckets(self, buckets: "Sequence[FlatBucket]") -> None:
        """The tensors of `shard_of` have become views of these."""
        ...

    def begin_step(self, num_micro_batches: int) -> None:
        """Before the first micro-batch of a step."""
        ...

    def end_micro_batch(self) -> None:
        """After the backward pass of each micro-batch."""
        ...

    def end_backward(self) -> None:
        """After the last micro-batch: give the tensors of `shard_of` their gradients."""
        ...

    def all_gather_parameters(self) -> None:
        """After the optimizer's step: copy the updated values into the parameters."""
        ...


@paddle.no_grad()
def exchange_values(pairs: Iterable[tuple[Tensor, Tensor]], store: ParameterStore) -> None:
    """Exchange tensors of `shard_of` with others, and update the parameters. Doing it twice changes
    no bit. Collective where parameters are sharded."""
    for shard, other in pairs:
        before = shard.clone()
        paddle.assign(other, shard)
        paddle.assign(before, other)
    store.all_gather_parameters()


def master_copy(parameter: Tensor, value: Tensor) -> Tensor:
    """A trainable float32 leaf with some or all of a parameter's values.

    Args:
        value: the values; float32 storage is reused.
    """
    copy = EagerParamBase.from_tensor(value.astype("float32"), trainable=True)
    # Fleet reads it.
    copy.is_distributed = parameter.is_distributed
    return copy


class WideGradients:
    """Float32 accumulation of half-precision gradients over the micro-batches of a step.

    Args:
        parameters: half-precision parameters; `take` drops their own gradients.
    """

    def __init__(self, parameters: Iterable[Tensor]):
        self.parameters = list(parameters)
        self._sums: dict[int, Tensor] = {}

    @paddle.no_grad()
    def take(self) -> None:
        """Add the gradients that a backward pass has left."""
        for parameter in self.parameters:
            if parameter.grad is None:
                continue
            grad, total = parameter.grad.astype("float32"), self._sums.get(id(parameter))
            self._sums[id(parameter)] = grad if total is None else total.add_(grad)
            parameter.clear_gradient(False)

    def give(self, parameter: Tensor) -> Tensor | None:
        """Remove and return the sum of a parameter's gradients; None without any."""
        return self._sums.pop(id(parameter), None)


class MasterWeights:
    """Unsharded float32 master weights of the trained half-precision parameters of a model.

    A `ParameterStore`; empty without half-precision parameters.

    Args:
        parameters: of the model, trained and frozen; each is copied before the next one is
            requested from the iterable.
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
        # Of half-precision parameters.
        self._buckets: Sequence[FlatBucket] = ()

    def shard_of(self, parameter: Tensor) -> Tensor:
        """The master weight, or a float32 parameter itself."""
        return self._masters.get(id(parameter), parameter)

    def use_buckets(self, buckets: "Sequence[FlatBucket]") -> None:
        """Accumulate half-precision gradients in the buckets, and round from them."""
        self._buckets = [bucket for bucket in buckets if bucket.halves]

    def begin_step(self, num_micro_batches: int) -> None:
        """Nothing to do."""

    def end_micro_batch(self) -> None:
        """Accumulate half-precision gradients."""
        for bucket in self._buckets:
            bucket.take_all()
        if not self._buckets:
            self._gradients.take()

    def end_backward(self) -> None:
        """Master weights, or their buckets, get their gradients."""
        self.end_micro_batch()
        for parameter in self._gradients.parameters:
            grad = self._gradients.give(parameter)
            if grad is not None:
                self.shard_of(parameter).grad = grad

    @paddle.no_grad()
    def all_gather_parameters(self) -> None:
        """Round the master weights into the parameters."""
        for bucket in self._buckets:
            bucket.round()
        for parameter in () if self._buckets else self._gradients.parameters:
            paddle.assign(self.shard_of(parameter).astype(parameter.dtype), parameter)

    def gathered_value(self, parameter: Tensor) -> Tensor:
        """The parameter itself."""
        return parameter

    def spread(self, parameter: Tensor, value: Tensor | None = None) -> Spread:
        """The parameter itself, or `value` as it is."""
        return Spread(None, lambda: parameter if value is None else value)

    def own_shard(self, parameter: Tensor, full: np.ndarray) -> np.ndarray:
        """The array itself."""
        return full
