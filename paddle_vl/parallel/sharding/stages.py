"""The three stages: which buckets there are, and when they are reduced, gathered and freed."""

from collections.abc import Container, Iterable, Sequence

import numpy as np
import paddle
from paddle import Tensor, nn

from paddle_vl.parallel.mp_ops import gathered
from paddle_vl.parallel.sharding.buckets import Bucket, Part, buckets_of, from_rows
from paddle_vl.parallel.sharding.unit import UnitForward


class Sharding:
    """Parameters of one model, divided over a group whose ranks take different samples.

    A step: for each micro-batch forward, backward, `end_micro_batch`; then `end_backward`, an
    optimizer's step on the shards, `spread_parameters`, and the shards' gradients are cleared with
    `set_to_zero=False`. Gradients are summed over ranks and micro-batches, not averaged.

    From `end_micro_batch` on these methods are collective, and so are, from stage 2 on, backward
    passes of units, and at stage 3 their forward passes: every rank runs the same units in the same
    order. Which parameters get a gradient may differ; one without takes part with zeros.

    Args:
        parameters: the model's on this rank, trained and frozen, each once, in the same order on
            the group's ranks. Those that are `stop_gradient` now count as frozen. Each is divided
            before the next is asked for, and at stage 3 without storage then if it is a unit's:
            what comes out of `Fillable.fill` needs no more than this rank's share at any time.
        group: a `paddle.distributed` group of at least two ranks.
        stage: 1, 2 or 3, see the package.
        units: layers that take their tensors as positional arguments and return tensors; their
            parameters are used nowhere else. Not used at stage 1. Their `forward` is replaced:
            apply `recompute_layers` before. At stage 3 without recomputation, a weight of which a
            graph saved a view (a slice, a transpose) keeps its storage until the backward pass.

    Raises:
        ValueError: another stage or group; a parameter listed twice, or in two units, or in a unit
            and not in the list.
    """

    def __init__(
        self, parameters: Iterable[Tensor], group, stage: int, units: Sequence[nn.Layer] = ()
    ):
        if stage not in (1, 2, 3):
            raise ValueError(f"sharding stage is {stage!r}; it must be 1, 2 or 3")
        if group.nranks < 2:
            raise ValueError("a sharding group of one rank has nothing to divide; use no Sharding")
        self.group, self.stage = group, stage
        self._parts: dict[int, Part] = {}
        owned = [list(layer.parameters()) for layer in units] if stage > 1 else []
        unit_of = {id(p): number for number, ps in enumerate(owned) for p in ps}
        left, trained = self._divide(parameters, unit_of)
        for number, of_unit in enumerate(owned):
            for parameter in of_unit:
                if id(parameter) not in left:
                    raise ValueError(
                        f"{parameter.name} {list(parameter.shape)} of sharding unit {number} is in "
                        "another unit too, or not among the parameters to shard"
                    )
                left.remove(id(parameter))
        root = [self._parts[id(p)] for p in trained if id(p) not in unit_of]
        self._root = list(buckets_of(root, group))
        self._units: list[Bucket] = []
        for layer, of_unit in zip(units, owned, strict=False):
            self._add_unit(layer, [self._parts[id(p)] for p in of_unit if id(p) in self._parts])

    def shard_of(self, parameter: Tensor) -> Tensor:
        """`[n]`, this rank's part: the optimizer's parameter for a trained one.

        A frozen parameter has one inside of a unit at stage 3 only. What is written here reaches
        the whole parameter with `spread_parameters`, or when its unit runs.

        Raises:
            ValueError: the parameter is not divided.
        """
        part = self._parts.get(id(parameter))
        if part is None:
            raise ValueError(f"{parameter.name} is not divided: frozen, or not of this model")
        return part.shard

    def copies(self) -> list[Tensor]:
        """The shards."""
        return [part.shard for part in self._parts.values()]

    def gradient_sums(self) -> list[Tensor]:
        """What is held of gradients beside those of parameters and shards."""
        return [total for bucket in self._buckets for total in bucket.gradient_sums()]

    def end_micro_batch(self) -> None:
        """Behind each micro-batch's backward pass: reduce what no unit has reduced.

        At stage 1 nothing travels; half-precision gradients are added up in float32.

        Raises:
            RuntimeError: a unit's parameter got a gradient outside of the unit.
        """
        if self.stage == 1:
            for bucket in self._root:
                bucket.keep_gradients()
            return
        for part in (part for unit in self._units for part in unit.trained):
            if part.parameter.grad is not None:
                raise RuntimeError(
                    f"{part.parameter.name} {list(part.parameter.shape)} belongs to a sharding "
                    "unit and got a gradient outside of it; leave the layer out of the units"
                )
        for bucket in self._root:
            bucket.reduce_gradients()

    def end_backward(self) -> None:
        """Behind the last micro-batch: each shard gets its gradient, and no whole one is left."""
        for bucket in self._buckets:
            if self.stage == 1:
                bucket.reduce_gradients()
            bucket.hand_out_gradients()

    def spread_parameters(self) -> None:
        """Behind the optimizer's step: what is whole between steps gets the shards' values."""
        for bucket in self._root if self.stage == 3 else self._buckets:
            bucket.fill_parameters()

    def gathered_value(self, parameter: Tensor, value: Tensor | None = None) -> Tensor:
        """The parameter's whole value on this rank, in its shape; every rank calls it.

        A parameter that is whole between steps is returned as it is.

        Args:
            value: `[n]`, something else laid out like the parameter's shard, such as a moment.
        """
        if value is None and parameter._is_initialized():
            return parameter.detach()
        shard = value
        if value is None:
            shard = self.shard_of(parameter).detach().astype(parameter.dtype)
        with paddle.no_grad():
            return from_rows(gathered(shard, self.group), parameter)

    def own_shard(self, parameter: Tensor, whole: np.ndarray) -> np.ndarray:
        """`[n]`, this rank's part of an array in the parameter's shape, zeros where it ends.

        Raises:
            ValueError: the shapes differ.
        """
        if whole.shape != tuple(parameter.shape):
            raise ValueError(
                f"an array {list(whole.shape)} to take a shard of does not have the shape "
                f"{list(parameter.shape)} of {parameter.name}"
            )
        length = -(-whole.size // self.group.nranks)
        own = np.zeros(length, whole.dtype)
        values = whole.reshape(-1)[self.group.rank * length :][:length]
        own[: values.size] = values
        return own

    @property
    def _buckets(self) -> list[Bucket]:
        return [*self._root, *self._units]

    def _divide(
        self, parameters: Iterable[Tensor], unit_of: Container[int]
    ) -> tuple[set[int], list[Tensor]]:
        """Take this rank's part of each parameter as it comes.

        Returns:
            Identities of all, and the trained ones.
        """
        seen: set[int] = set()
        trained: list[Tensor] = []
        num_twice = 0
        for parameter in parameters:
            if id(parameter) in seen:
                num_twice += 1
                continue
            seen.add(id(parameter))
            loses_storage = self.stage == 3 and id(parameter) in unit_of
            if not parameter.stop_gradient:
                trained.append(parameter)
            elif not loses_storage:
                continue
            self._parts[id(parameter)] = Part.of(parameter, self.group)
            if loses_storage:
                parameter._clear_data()
        if num_twice:
            raise ValueError(f"{num_twice} parameters to shard are listed twice")
        return seen, trained

    def _add_unit(self, layer: nn.Layer, parts: list[Part]) -> None:
        if not parts:
            return
        bucket = Bucket(parts, self.group)
        layer.forward = UnitForward(layer, bucket, takes_storage=self.stage == 3)
        self._units.append(bucket)
