"""Sharding stages 2 and 3: buckets, and when they are reduced, unsharded and resharded."""

import itertools
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import paddle
from paddle import Tensor, nn

from paddle_vl.nn.flat_buckets import FlatBucket
from paddle_vl.nn.parameter_table import Spread
from paddle_vl.parallel.collectives import all_gathered
from paddle_vl.parallel.layer_wrappers import Level, wrap_layer
from paddle_vl.parallel.sharding.buckets import (
    Bucket,
    BucketEntry,
    Reductions,
    buckets_of,
    own_slice,
)
from paddle_vl.parallel.sharding.unit import TableForward, UnitForward, UnshardedBuckets


@dataclass(frozen=True)
class ShardingOptions:
    """Options of stages 2 and 3.

    Attributes:
        reshard_after_forward: stage 3: False keeps gathered parameters until the end of the step:
            one all-gather of a unit per step, not two per micro-batch.
        reduce_dtype: dtype of reduced gradients; sums over micro-batches are float32.
        reduce_once_per_step: stage 2: accumulate full gradients in float32, and reduce them only in
            the last micro-batch's backward pass.
    """

    reshard_after_forward: bool = True
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    reduce_once_per_step: bool = False


class Sharding:
    """The parameters of a model, sharded over a group whose ranks take different samples.

    A `paddle_vl.nn.master_weights.ParameterStore`.

    A step: `begin_step`; for each micro-batch forward, backward, `end_micro_batch`; then
    `end_backward`, an optimizer step on the shards, `all_gather_parameters`, and the shards'
    gradients are cleared with `set_to_zero=False`. Gradients are summed over ranks and
    micro-batches, not averaged.

    From `end_micro_batch` on these methods are collective, and so are backward passes of units, and
    at stage 3 their forward passes: every rank runs the same units in the same order. Which
    parameters get a gradient may differ per rank; a missing one is reduced as zeros.

    Args:
        parameters: the model's on this rank, trained and frozen, each once, in the same order on
            all ranks. Parameters with `stop_gradient` are frozen from then on. Each is sharded
            before the next is requested from the iterable, so with `Materializable.materialize` a
            rank never needs more memory than its shards and one full tensor. At stage 3 parameters
            of units and tables have no storage afterwards.
        group: process group of at least two ranks.
        group_of: the group of a parameter, which may have one rank; default: `group` for all.
        stage: 2 or 3, see the package.
        chains: sequences of layers that always run together in this order. A layer is a unit: it
            takes its tensors as positional arguments and returns tensors, and its parameters are
            in the list and used nowhere else. Its `forward` is wrapped, outside recomputation, see
            `paddle_vl.parallel.layer_wrappers`. At stage 3 without recomputation, a weight of which
            a graph saved a view (a slice, a transpose) keeps its storage until the backward pass.
        tables: token embeddings and heads, which stage 3 shards too. Two of them may share a
            `weight`, which nothing else uses.
        dp_groups: by sharding group, the ranks that have the same shards, over which gradients are
            all-reduced once per step: after a unit's last backward pass if `begin_step` is called.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        group,
        stage: int,
        chains: Sequence[Sequence[nn.Layer]] = (),
        tables: Sequence[nn.Layer] = (),
        options: ShardingOptions | None = None,
        group_of: Callable[[Tensor], Any] | None = None,
        dp_groups: Mapping[Any, Any] | None = None,
    ):
        self.stage, self.options = stage, options or ShardingOptions()
        self._group_of = group_of or (lambda parameter: group)
        self._entries: dict[int, BucketEntry] = {}
        self._reductions = Reductions(self.options.reduce_dtype, dp_groups)
        self._unsharded = UnshardedBuckets() if stage == 3 else None
        # Remaining micro-batches of this step, if known.
        self._num_left: int | None = None
        self._unreduced: dict[Bucket, None] = {}
        # Tables that this micro-batch's backward pass has reduced.
        self._reduced_tables: set[Bucket] = set()
        tables = tables if stage == 3 else ()
        in_units = {id(p) for chain in chains for layer in chain for p in layer.parameters()}
        in_units |= {id(table.weight) for table in tables}
        trained = self._shard(parameters, in_units)
        root = [self._entries[id(p)] for p in trained if id(p) not in in_units]
        self._root = list(buckets_of(root, self._reductions))
        self._forwards: list[UnitForward] = []
        self._units = [bucket for chain in chains for bucket in self._add_chain(chain)]
        self._tables = self._add_tables(tables)

    def shard_of(self, parameter: Tensor) -> Tensor:
        """`[n]`, this rank's shard: the optimizer's parameter for a trained one.

        A frozen parameter has one only if stage 3 shards it. Values written here reach the full
        parameter with `all_gather_parameters`, or at its next all-gather.

        Raises:
            ValueError: the parameter is not sharded.
        """
        entry = self._entries.get(id(parameter))
        if entry is None:
            raise ValueError(f"{parameter.name} is not sharded: frozen, or not of this model")
        return entry.shard

    def begin_step(self, num_micro_batches: int) -> None:
        """Set the number of micro-batches of the step. Otherwise all-reduces over dp, and with
        `reduce_once_per_step` all reductions, follow the last backward pass, without overlap."""
        self._num_left = num_micro_batches

    def end_micro_batch(self) -> None:
        """After each backward pass: reduce-scatter gradients of the root and of remaining tables.

        Raises:
            RuntimeError: a unit's parameter got a gradient outside of the unit.
        """
        if not self.options.reduce_once_per_step:
            self._check_units()
        left = [bucket for bucket in self._tables if bucket not in self._reduced_tables]
        for bucket in (*self._root, *left):
            self._after_backward(bucket)
        self._reduced_tables.clear()
        if self._unsharded is not None:
            if self.options.reshard_after_forward:
                self._unsharded.reshard_all()
            else:
                self._unsharded.discard_prefetched()
        if self._num_left is not None:
            self._num_left -= 1

    def end_backward(self) -> None:
        """After the last micro-batch: reduce what is left, and give each shard its gradient."""
        for bucket in self._unreduced:
            bucket.start_reduction()
        self._check_units()
        for bucket in self._buckets:
            bucket.assign_gradients()
        self._unreduced.clear()
        self._num_left = None
        for unit in self._forwards:
            # Graphs whose backward pass was never run.
            unit.num_open = 0
        if self._unsharded is not None:
            self._unsharded.reshard_all()

    def use_buckets(self, buckets: Sequence[FlatBucket]) -> None:
        """Nothing to do: shards stay the same tensors."""

    def all_gather_parameters(self) -> None:
        """After the optimizer step: all-gather the parameters that have storage between steps."""
        if self._unsharded is not None:
            # These values are from before the step.
            self._unsharded.reshard_all()
        for bucket in self._root if self.stage == 3 else self._buckets:
            bucket.all_gather_parameters()
        if self.stage == 3:
            for bucket in self._units:
                bucket.assign_whole()

    def gathered_value(self, parameter: Tensor) -> Tensor:
        """The full value of a parameter on every rank, in its shape. Collective: an all-gather.

        A parameter that has storage between steps is returned as it is.
        """
        if parameter._is_initialized():
            return parameter.detach()
        with paddle.no_grad():
            own = self.shard_of(parameter).detach().astype(parameter.dtype)
            flat = all_gathered(own, self._group_of(parameter))
            return flat[: parameter.size].reshape(parameter.shape)

    def spread(self, parameter: Tensor, value: Tensor | None = None) -> Spread:
        """A parameter that has storage between steps is on every rank, of others the shards."""
        if value is None and parameter._is_initialized():
            return Spread(None, parameter.detach)
        group, size = self._group_of(parameter), parameter.size
        length = -(-size // group.nranks)
        ends = [min(length * rank, size) for rank in range(group.nranks + 1)]

        def own() -> Tensor:
            if value is not None:
                return value
            return self.shard_of(parameter).detach().astype(parameter.dtype)

        return Spread([*itertools.pairwise(ends)], own, group.rank)

    def own_shard(self, parameter: Tensor, full: np.ndarray) -> np.ndarray:
        """`[n]`, this rank's shard of an array in the parameter's shape, padded with zeros.

        Raises:
            ValueError: the shapes differ.
        """
        group = self._group_of(parameter)
        length = -(-full.size // group.nranks)
        begin = group.rank * length
        return own_slice(full, parameter, begin, begin + length)

    @property
    def _buckets(self) -> list[Bucket]:
        return [*self._root, *self._tables, *self._units]

    def _after_backward(self, bucket: Bucket, ends: bool = True) -> None:
        """Reduce the gradients of a bucket, or accumulate them for the last micro-batch.

        Args:
            ends: whether no backward pass of the bucket follows in this micro-batch.
        """
        if self.options.reduce_once_per_step and self._num_left != 1:
            bucket.accumulate_gradients()
            # The same buckets on every rank, as all ran the same backward passes.
            self._unreduced[bucket] = None
        else:
            bucket.start_reduction(is_last=ends and self._num_left == 1)
            self._unreduced.pop(bucket, None)

    def _check_units(self) -> None:
        for entry in (entry for unit in self._units for entry in unit.trained):
            if entry.parameter.grad is not None:
                raise RuntimeError(
                    f"{entry.parameter.name} {list(entry.parameter.shape)} belongs to a sharding "
                    "unit and got a gradient outside of it; leave the layer out of the units"
                )

    def _shard(self, parameters: Iterable[Tensor], in_units: Container[int]) -> list[Tensor]:
        """Take this rank's shard of each parameter as it comes; returns the trained ones."""
        trained: list[Tensor] = []
        for parameter in parameters:
            group = self._group_of(parameter)
            loses_storage = self.stage == 3 and id(parameter) in in_units and group.nranks > 1
            if not parameter.stop_gradient:
                trained.append(parameter)
            elif not loses_storage:
                continue
            self._entries[id(parameter)] = BucketEntry.of(parameter, group)
            if loses_storage:
                parameter._clear_data()
        return trained

    def _bucket(self, parameters: Iterable[Tensor]) -> Bucket | None:
        entries = [self._entries[id(p)] for p in parameters if id(p) in self._entries]
        return Bucket(entries, self._reductions) if entries else None

    def _add_chain(self, layers: Sequence[nn.Layer]) -> list[Bucket]:
        keeps, forwards = not self.options.reshard_after_forward, []
        for layer in layers:
            bucket = self._bucket(layer.parameters())
            if bucket is not None:
                unit = UnitForward(bucket, self._unsharded, keeps, self._after_backward)
                wrap_layer(layer, Level.SHARDING, unit)
                forwards.append(unit)
        for one, two in itertools.pairwise(forwards):
            one.following, two.previous = two, one
        self._forwards += forwards
        return [unit.bucket for unit in forwards]

    def _add_tables(self, layers: Sequence[nn.Layer]) -> list[Bucket]:
        """Add buckets of tables. A gradient of an embedding is reduced at the end of the
        micro-batch, since ranks may run its backward at different times; that of an untied head
        after its backward pass."""
        keeps, buckets = not self.options.reshard_after_forward, {}
        users = Counter(id(layer.weight) for layer in layers)
        for layer in layers:
            key = id(layer.weight)
            if key not in buckets:
                buckets[key] = self._bucket([layer.weight])
            # Of a shared weight another layer adds to the same gradient.
            after = self._after_head if users[key] == 1 else lambda bucket, ends: None
            table = TableForward(buckets[key], self._unsharded, keeps, after)
            wrap_layer(layer, Level.SHARDING, table)
            self._forwards.append(table)
        return list(buckets.values())

    def _after_head(self, bucket: Bucket, ends: bool) -> None:
        self._after_backward(bucket, ends)
        self._reduced_tables.add(bucket)
