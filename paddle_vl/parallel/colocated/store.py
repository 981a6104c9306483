"""The parameter store of a colocated model: one store for each of its two parts."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from paddle import Tensor

from paddle_vl.nn.adamw import gradient_of
from paddle_vl.nn.flat_buckets import FlatBucket
from paddle_vl.nn.master_weights import MasterWeights, ParameterStore
from paddle_vl.parallel.colocated.grid import EncoderGroups
from paddle_vl.parallel.sharding import Sharding, ShardingOptions


class PartsStore:
    """Language model and encoder, whose gradients are reduced over different ranks.

    A `ParameterStore`. The encoder has one backward pass per step, after the last micro-batch.

    Args:
        language, encoder: their stores.
        encoder_parameters: the encoder's parameters.
    """

    def __init__(
        self,
        language: ParameterStore,
        encoder: ParameterStore,
        encoder_parameters: Iterable[Tensor],
    ):
        self.language, self.encoder, self.stage = language, encoder, language.stage
        self._of_encoder = {id(parameter): parameter for parameter in encoder_parameters}

    def shard_of(self, parameter: Tensor) -> Tensor | None:
        return self._store_of(parameter).shard_of(parameter)

    def own_shard(self, parameter: Tensor, full: np.ndarray) -> np.ndarray:
        return self._store_of(parameter).own_shard(parameter, full)

    def gathered_value(self, parameter: Tensor, value: Tensor | None = None) -> Tensor:
        return self._store_of(parameter).gathered_value(parameter, value)

    def copies(self) -> list[Tensor]:
        return [*self.language.copies(), *self.encoder.copies()]

    def gradient_sums(self) -> list[Tensor]:
        return [*self.language.gradient_sums(), *self.encoder.gradient_sums()]

    def use_buckets(self, buckets: Sequence[FlatBucket]) -> None:
        """Never called: each part's optimizer gives its buckets to the part's store."""
        raise RuntimeError("the buckets of a part belong to the store of the part")

    def begin_step(self, num_micro_batches: int) -> None:
        self.language.begin_step(num_micro_batches)
        self.encoder.begin_step(1)

    def end_micro_batch(self) -> None:
        """After a backward pass of the language model."""
        self.language.end_micro_batch()

    def end_backward(self) -> None:
        """After the encoder's backward pass. In a step without items no rank has gradients of the
        encoder, so that nothing is reduced and its state does not decay, as on one device."""
        self.language.end_backward()
        if any(gradient_of(parameter) is not None for parameter in self._of_encoder.values()):
            self.encoder.end_micro_batch()
            self.encoder.end_backward()

    def all_gather_parameters(self) -> None:
        self.language.all_gather_parameters()
        self.encoder.all_gather_parameters()

    def _store_of(self, parameter: Tensor) -> Any:
        return self.encoder if id(parameter) in self._of_encoder else self.language


def encoder_store(parameters: Iterable[Tensor], groups: EncoderGroups) -> ParameterStore:
    """The store of an encoder: master weights, or with `encoder.sharding_stage` 1 shards of the
    optimizer state over the encoder's lanes; gradients are then reduce-scattered once per step."""
    parameters = list(parameters)
    if not groups.shards_state or all(parameter.stop_gradient for parameter in parameters):
        return MasterWeights(parameters)
    options = ShardingOptions(reduce_once_per_step=True)
    return Sharding(parameters, groups.dp_group, stage=2, options=options)
